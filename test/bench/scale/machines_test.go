package scale

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	mrand "math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/host"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ipvs"
	"github.com/edgebake/edgebake/ondisk"
)

// order describes the machines to the process that simulates them.
type order struct {
	Nodes int
	// Within is the time within which they are switched on, at equal intervals.
	Within time.Duration
	// Limit is the time after which the first boot of a machine is given up.
	Limit      time.Duration
	Masters    []string
	Token, Pin string
	Endpoint   string
	VIP        string
}

// joined is the result of all machines.
type joined struct {
	// Ready and Finished have the seconds from power-on until each machine was Ready and until its
	// first boot was complete.
	Ready, Finished []float64
	// Repeated counts machines that ran kubeadm join more than once.
	Repeated int
	TooMany  int64 // number of 429 responses to the simulated programs
	// Dials counts the connections that first boot, ipvscare and the simulated programs begin.
	// Opened counts all connections of the network namespace.
	Dials  map[string]int64
	Opened int64
	Faults map[string]int
	// Said counts each console line that reports a fault.
	Said map[string]int
}

// orderFile names the variable that is set if this test binary simulates the machines.
const orderFile = "EDGEBAKE_SCALE_ORDER"

// Commands on the standard input of the process that simulates the machines, and its answers. Some
// are followed by a value on the same line.
const (
	wordJoined    = "joined "    // and a value of type joined
	wordEased     = "eased"      // the control plane has its processors again
	wordRecovered = "recovered " // and the seconds since then
)

// fleet holds all machines.
type fleet struct {
	order
	tooMany atomic.Int64
	dials   map[string]*atomic.Int64

	mu     sync.Mutex
	faults map[string]int
}

func (f *fleet) fault(ctx context.Context, what string) {
	if ctx.Err() != nil {
		return // the process was told to end
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults[what]++
}

// node is one machine. First boot's own phases and ipvscare's own daemon run on it; the machine is
// fake and its kernel is in memory.
type node struct {
	fleet           *fleet
	name            string
	ip              netip.Addr
	machineID, uuid string
	world           *worldtest.World
	kernel          *memory
	care            atomic.Pointer[ipvs.Daemon]
	leased          atomic.Int64 // when the lease was last renewed

	poweredOn, ended time.Time
	joins            int
	caring           bool

	mu    sync.Mutex
	ready time.Time

	stopKubelet, restartKubelet func()
}

func newNode(t *testing.T, f *fleet, i int) *node {
	id := uint32(i) * 2654435761 // spreads the IDs over all values
	n := &node{fleet: f, name: fmt.Sprintf("edge-%04d", i), ip: netip.AddrFrom4([4]byte{10, 99, byte(i >> 8), byte(i)}),
		machineID: fmt.Sprintf("6f1c8f3e2a0b4d5c9e7f8a1b%08x", id), uuid: fmt.Sprintf("4c4c4544-0042-3510-8052-c7c0%08x", id), stopKubelet: func() {}}
	n.kernel = newMemory(n.ip)
	n.world = worldtest.New(t, firstboot.New)
	n.world.Put("/etc/machine-id", n.machineID+"\n")
	n.world.Put("/sys/class/dmi/id/product_serial", fmt.Sprintf("SN%05d\n", i))
	n.world.Put("/sys/class/dmi/id/product_uuid", n.uuid+"\n")
	lines := []string{"apiVersion: edgebake.io/v1alpha1", "kind: Site", "masters: [" + strings.Join(f.Masters, ", ") + "]", "caCertHashes: ['" + f.Pin + "']",
		"nodeName: " + n.name, "endpoint: " + f.Endpoint, "vip: " + f.VIP, "credentials: {token: " + f.Token + "}"}
	if spread := configs.DefaultSpread(f.Nodes); spread > 0 {
		lines = append(lines, fmt.Sprintf("spreadSeconds: %d", spread))
	}
	n.world.Stamp(worldtest.SlotDevice, strings.Join(lines, "\n")+"\n")
	return n
}

// dialFor returns a dial function for a program of the machine. A connection to the VIP goes
// through the virtual server.
func (n *node) dialFor(who string) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		n.fleet.dials[who].Add(1)
		hostname, _, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		if hostname == n.fleet.Endpoint || hostname == n.fleet.VIP {
			return n.kernel.dial(ctx, netip.AddrPortFrom(netip.MustParseAddr(n.fleet.VIP), 6443))
		}
		var d net.Dialer
		return d.DialContext(ctx, network, addr)
	}
}

func (n *node) isReady() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ready.IsZero() {
		n.ready = time.Now()
	}
}

// env returns the machine's Env, in real time and on a real network. ctx ends its daemons.
func (n *node) env(ctx context.Context) *machine.Env {
	w := n.world
	e := w.Env()
	e.Now, e.Sleep = time.Now, host.Sleep
	e.ClockSynced = func(context.Context) (bool, error) { return true, nil }
	e.Rand = mrand.Float64
	e.Random = func(n int) []byte {
		b := make([]byte, n)
		rand.Read(b)
		return b
	}
	e.Sessions = new(kubeapi.Sessions)
	e.ProbeTimeout = 0 // the real default
	toKubelet, toOthers := e.Dial, n.dialFor("first boot")
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if addr == "127.0.0.1:10248" {
			return toKubelet(ctx, network, addr)
		}
		return toOthers(ctx, network, addr)
	}
	e.Source = func(context.Context, string) (netip.Addr, error) { return n.ip, nil }
	e.Resolve = func(context.Context, string) ([]netip.Addr, error) {
		return []netip.Addr{netip.MustParseAddr(n.fleet.VIP)}, nil
	}
	run, unit, write := e.Run, e.Unit, e.WriteFile
	e.Run = func(ctx context.Context, c machine.Cmd) error {
		if len(c.Args) > 3 && c.Args[0] == "kubeadm" && c.Args[1] == "join" {
			return n.kubeadmJoin(ctx, c)
		}
		return run(ctx, c)
	}
	e.WriteFile = func(path string, data []byte, o machine.Owner) error {
		if err := write(path, data, o); err != nil || path != ondisk.IPVSConfig {
			return err
		}
		return n.configureIPVS(data)
	}
	e.Unit = func(uctx context.Context, verb, name string) error {
		w.Now = time.Now() // the time at which units start
		switch {
		case name == ondisk.UnitIPVSCare && verb != "stop":
			w.Units[name] = "active"
			if n.caring {
				return nil
			}
			n.caring = true
			return n.startIPVSCare(ctx)
		case name == ondisk.UnitKubelet && verb != "start":
			if verb == "restart" && n.restartKubelet != nil {
				n.fleet.fault(ctx, "kubelet was restarted")
				n.restartKubelet()
			} else {
				n.stopKubelet()
			}
		}
		return unit(uctx, verb, name)
	}
	return e
}

// below returns the host path of a path on the machine.
func (n *node) below(path string) string { return filepath.Join(n.world.Root, path) }

// Files of ipvscare, below the directory that represents the machine.
const (
	careConfig = "ipvscare.json"
	careCert   = "ipvscare.pem"
)

func (n *node) configureIPVS(data []byte) error {
	data = bytes.ReplaceAll(data, []byte(ondisk.KubeCA), []byte(n.below(ondisk.KubeCA)))
	next := n.below(careConfig + ".new")
	return errors.Join(os.WriteFile(next, data, 0o600), os.Rename(next, n.below(careConfig)))
}

// startIPVSCare starts the daemon and returns when it is ready.
func (n *node) startIPVSCare(ctx context.Context) error {
	serves, ended := make(chan struct{}), make(chan error, 1)
	d := ipvs.NewDaemon(ipvs.Options{ConfigFile: n.below(careConfig), ClientCert: n.below(careCert), Kernel: n.kernel,
		Log: func(string) {}, Ready: sync.OnceFunc(func() { close(serves) })})
	n.care.Store(d)
	go func() { ended <- d.Run(ctx) }()
	select {
	case <-serves:
		return nil
	case err := <-ended:
		return cmp.Or(err, ctx.Err())
	case <-time.After(90 * time.Second):
		return errors.New("ipvscare does not start")
	}
}

// kubeadmJoin simulates kubeadm join and the kubelet that it starts.
func (n *node) kubeadmJoin(ctx context.Context, c machine.Cmd) error {
	n.joins++
	say := func(err error) error {
		fmt.Fprintln(c.Output, err)
		n.fleet.fault(ctx, "kubeadm join: "+strings.ReplaceAll(err.Error(), n.name, "NODE"))
		return errors.New("exit status 1")
	}
	conf, err := kubeapi.ParseKubeconfig([]byte(n.world.Get(member.DiscoveryFile)))
	if err != nil {
		return err
	}
	user, err := conf.User()
	if err != nil {
		return err
	}
	cluster, err := conf.Cluster()
	if err != nil {
		return err
	}
	ca, err := cluster.CA("")
	if err != nil {
		return err
	}
	if err := host.Sleep(ctx, 300*time.Millisecond); err != nil { // start-up time
		return err
	}
	k := n.client("kubeadm", cluster.Server, ca, user.Token, nil)
	defer k.close()
	if err := n.kubeadmReads(ctx, k); err != nil {
		return say(err)
	}
	w := n.world
	w.PutUnsynced(member.BootstrapConf, "token: "+user.Token)
	w.PutUnsynced(ondisk.KubeletConfig, "kind: KubeletConfiguration\n")
	w.PutUnsynced(member.KubeadmFlags, "KUBELET_KUBEADM_ARGS=\"--container-runtime-endpoint="+ondisk.CRISocket+"\"\n")
	w.Units[ondisk.UnitKubelet], w.Started[ondisk.UnitKubelet] = "active", time.Now()
	enrolled := n.startKubelet(cluster.Server, ca, user.Token, credentials{})
	var own credentials
	select {
	case own = <-enrolled:
	case <-time.After(8 * time.Minute): // the timeout that first boot gives kubeadm
		return say(errNoCertificate)
	case <-ctx.Done():
		return ctx.Err()
	}
	n.restartKubelet = func() {
		n.stopKubelet()
		n.startKubelet("https://"+n.fleet.Endpoint+":6443", ca, "", own)
	}
	pair := string(own.cert) + string(own.key)
	dated := member.KubeletPKI + "/kubelet-client-2026-11-20-10-00-00.pem"
	w.PutUnsynced(dated, pair)
	link := n.below(member.ClientCert)
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := errors.Join(os.Symlink(dated, link), os.WriteFile(n.below(careCert), []byte(pair), 0o600)); err != nil {
		return err
	}
	kubeletConf, err := kubeapi.NewKubeconfig(kubeapi.Cluster{Server: cluster.Server, TLSServerName: cluster.TLSServerName, CAData: base64.StdEncoding.EncodeToString(ca)},
		kubeapi.User{CertFile: member.ClientCert, KeyFile: member.ClientCert})
	if err != nil {
		return err
	}
	w.PutUnsynced(ondisk.KubeletConf, string(kubeletConf))
	if err := host.Sleep(ctx, 500*time.Millisecond); err != nil { // kubeadm checks kubelet's health
		return err
	}
	return os.Remove(n.below(member.BootstrapConf))
}

// TestMachines simulates all machines of a row. The benchmark runs it in the control plane's
// network namespace.
func TestMachines(t *testing.T) {
	path := os.Getenv(orderFile)
	if path == "" {
		t.Skip("this is a part of the benchmark")
	}
	f := &fleet{faults: map[string]int{}, dials: map[string]*atomic.Int64{"first boot": {}, "kubeadm and kubelet": {}}}
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &f.order)
	}
	if err != nil {
		t.Fatal(err)
	}
	all := make([]*node, f.Nodes)
	for i := range all {
		all[i] = newNode(t, f, i+1)
	}
	ctx, cancel := context.WithCancel(t.Context())
	before := opened(t)
	var boots sync.WaitGroup
	for _, n := range all {
		wait := time.Duration(mrand.Int64N(int64(f.Within)))
		boots.Go(func() {
			if host.Sleep(ctx, wait) != nil {
				return
			}
			n.poweredOn = time.Now()
			bctx, end := context.WithTimeout(ctx, f.Limit)
			defer end()
			if err := firstboot.New(n.env(ctx)).Run(bctx); err == nil {
				n.ended = time.Now()
			}
		})
	}
	go f.report(ctx, all)
	boots.Wait()
	f.tell(t, wordJoined, f.joined(all, opened(t)-before))
	words := bufio.NewScanner(os.Stdin)
	for words.Scan() {
		if words.Text() == wordEased {
			f.tell(t, wordRecovered, recovered(ctx, all))
		}
	}
	cancel()
	for _, n := range all {
		n.stopKubelet()
	}
}

// report prints the progress of the machines at intervals, and the number of nodes whose lease is
// overdue.
func (f *fleet) report(ctx context.Context, all []*node) {
	for began := time.Now(); host.Sleep(ctx, 10*time.Second) == nil; {
		ready, late := 0, 0
		for _, n := range all {
			n.mu.Lock()
			if !n.ready.IsZero() {
				ready++
			}
			n.mu.Unlock()
			if last := n.leased.Load(); last != 0 && time.Since(time.Unix(0, last)) > 20*time.Second {
				late++
			}
		}
		fmt.Fprintf(os.Stderr, "%3.0f s: %d of %d machines are Ready, %d leases are late; %s\n", time.Since(began).Seconds(), ready, len(all), late, f.traffic(all))
	}
}

// traffic describes the requests of the machines so far.
func (f *fleet) traffic(all []*node) string {
	sent := careTraffic(all)
	return fmt.Sprintf("connections: ipvscare %d, first boot %d, kubeadm and kubelet %d; ipvscare: %d requests, %d PINGs",
		sent["dials"], f.dials["first boot"].Load(), f.dials["kubeadm and kubelet"].Load(), sent["requests"], sent["pings"])
}

// careTraffic returns the sums of ipvscare's counters of connections, requests and PINGs.
func careTraffic(all []*node) map[string]int64 {
	sum := map[string]int64{}
	for _, n := range all {
		d := n.care.Load()
		if d == nil {
			continue
		}
		for line := range strings.Lines(string(d.Metrics())) {
			for _, what := range []string{"dials", "requests", "pings"} {
				if v, ok := strings.CutPrefix(strings.TrimSpace(line), "ipvscare_"+what+"_total "); ok {
					count, _ := strconv.ParseInt(v, 10, 64)
					sum[what] += count
				}
			}
		}
	}
	return sum
}

func (f *fleet) tell(t *testing.T, word string, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("\n%s%s\n", word, text)
}

func (f *fleet) joined(all []*node, opened int64) joined {
	j := joined{TooMany: f.tooMany.Load(), Dials: map[string]int64{}, Opened: opened, Said: map[string]int{}}
	for who, dials := range f.dials {
		j.Dials[who] = dials.Load()
	}
	j.Dials["ipvscare"] = careTraffic(all)["dials"]
	f.mu.Lock()
	j.Faults = maps.Clone(f.faults)
	f.mu.Unlock()
	for _, n := range all {
		if n.joins > 1 {
			j.Repeated++
		}
		if !n.ended.IsZero() {
			j.Finished = append(j.Finished, n.ended.Sub(n.poweredOn).Seconds())
		}
		n.mu.Lock()
		if !n.ready.IsZero() {
			j.Ready = append(j.Ready, n.ready.Sub(n.poweredOn).Seconds())
		}
		n.mu.Unlock()
		for _, line := range n.world.Console {
			if strings.Contains(line, "fail") || strings.Contains(line, "attempt") {
				j.Said[strings.ReplaceAll(line, n.name, "NODE")]++
			}
		}
	}
	return j
}

// recovered returns the seconds until each node that has a lease has renewed it.
func recovered(ctx context.Context, all []*node) float64 {
	began := time.Now()
	for _, n := range all {
		for n.leased.Load() != 0 && n.leased.Load() < began.UnixNano() {
			if host.Sleep(ctx, 50*time.Millisecond) != nil || time.Since(began) > 10*time.Minute {
				return -1
			}
		}
	}
	return time.Since(began).Seconds()
}

// opened returns the number of TCP connections that this network namespace has opened.
func opened(t *testing.T) int64 {
	text, err := os.ReadFile("/proc/net/snmp")
	if err != nil {
		t.Fatal(err)
	}
	const activeOpens = 5
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > activeOpens && f[0] == "Tcp:" {
			if n, err := strconv.ParseInt(f[activeOpens], 10, 64); err == nil {
				return n
			}
		}
	}
	t.Fatal("/proc/net/snmp has no ActiveOpens")
	return 0
}
