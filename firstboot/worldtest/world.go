package worldtest

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/tools/txtar"

	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/openyurt"
	"github.com/edgebake/edgebake/test/disktest"
)

const (
	TestToken  = "abcdef.0123456789abcdef"
	TestSecret = "0123456789abcdef"
)

// These names are repeated here instead of using first boot's constants: a test that
// compares a constant with itself proves nothing.
const (
	appliedFile      = ondisk.EtcDir + "/applied"
	hubNFT           = ondisk.EtcDir + "/yurthub.nft"
	portsUnitFile    = "/etc/systemd/system/edgebake-yurthub-ports.service"
	portsKubelet     = "/etc/systemd/system/kubelet.service.d/20-edgebake-yurthub-ports.conf"
	socketAnnotation = "kubeadm.alpha.kubernetes.io/cri-socket"
	kubeadmConfigMap = "/api/v1/namespaces/kube-system/configmaps/kubeadm-config"
	kubeletConfigMap = "/api/v1/namespaces/kube-system/configmaps/kubelet-config"
	proxyConfigMap   = "/api/v1/namespaces/kube-system/configmaps/kube-proxy"
	markerPath       = "/api/v1/namespaces/kube-system/configmaps/edgebake-manifests"
	applyingLabel    = "edgebake.io/applying"
	documentsKey     = "edgebake.io/documents"
)

// World simulates a machine and its cluster: a directory, with slots and API servers in memory.
// It counts every effect, and the machine can lose its power before any of them.
type World struct {
	T       *testing.T
	Root    string
	Slots   map[string]*memDevice
	Log     bytes.Buffer
	Cluster *Cluster
	machineState
	machineSettings

	// A copy does not have the fields below: funcs and servers of this World, and counters of one run.

	// Records of one run.
	SlotReads     []string // devices from which more than the label was read
	ReportProxies []string // used for reports

	// The clock.
	clockSteps map[string]time.Duration // how far the clock was set since a unit's start, by unit
	clockAsked uint64                   // number of calls of BootClock
	deadlines  map[time.Time]time.Time  // deadlines of contexts, and their times on the simulated clock
	// TimeServerAnswers reports whether a time server has set the clock. If it is nil, ClockSynced
	// is used.
	TimeServerAnswers func() bool

	// The network, servers of this machine, and locks.
	// NetworkWorks reports whether the network works with the settings in place; nil means always.
	NetworkWorks        func() bool
	networkMu           sync.Mutex // several connections are tried at once
	hubHealthServer     Listener
	kubeletHealthServer Listener
	locks               map[string]bool

	// Only on a control-plane node: kubeadm init phase, ctr run, connections to servers
	// outside of Cluster, and first boot's listeners.
	KubeadmInit func(machine.Cmd) error
	CtrRun      func(machine.Cmd) error
	DialOther   func(ctx context.Context, addr string) (net.Conn, error, bool)
	Listen      func(addr string) (net.Listener, error)
	// RefuseDial returns the error that DialOther would return for addr now. ours means that
	// DialOther handles addr.
	RefuseDial func(addr string) (err error, ours bool)

	// Effects and power cuts.
	Mu           sync.Mutex
	PowerCutAt   int // number of the first effect that fails; 0: none
	PoweredOff   bool
	Shutdown     context.CancelFunc
	BeforeEffect func(effect string) // called before each effect
}

// machineState is the state of a machine apart from its files and slots. CloneWith copies it, and
// Fingerprint hashes it.
type machineState struct {
	Units   map[string]string
	Started map[string]time.Time
	// LoadedConfig has the configuration with which each daemon was started, by unit.
	LoadedConfig map[string]string
	Now          time.Time
	ClockSkew    time.Duration // how far the machine's clock is ahead of the cluster's
	NFTRules     string        // loaded by nft
	Randoms      byte
	// Joins counts the runs of kubeadm join.
	Joins             int
	KubeletLastActive time.Time // when kubelet was last active
	// HubJoinConf is the JoinConfiguration of a kubelet that uses yurthub.
	HubJoinConf string
	// Unregistered means that kubelet has not registered its Node since its start. kubelet
	// registers only once, so a deleted Node comes back only when kubelet starts again.
	Unregistered bool
	// Unsynced has the files that were written and not synced.
	Unsynced map[string]bool
}

// machineSettings has the rest of what CloneWith copies. Fingerprint omits it: these values are the
// same in all machines of a test that cuts the power, or are only output.
type machineSettings struct {
	start        func(*machine.Env) *run.Runner
	singleMaster bool              // its Sites have only one API server
	SlotFiles    map[string]string // additional files on sticks, by "device/name"
	ReadOnly     map[string]bool
	// DNSRecords maps names in DNS to addresses. DeadDNSServer is the
	// address of a server that does not answer.
	DNSRecords    map[string]string
	DeadDNSServer string
	Console       []string
	Reports       [][]byte // bodies of reports
	// JoinError, which may be nil, returns the error of the n-th run of kubeadm join.
	JoinError func(n int) error
	NodeAddr  netip.Addr
	// ExtraAddrs has the machine's addresses in addition to NodeAddr, which is on eth0.
	ExtraAddrs     []machine.InterfaceAddr
	Offline        bool
	HasRoute       bool                // an address and a route exist although the machine is Offline
	FSUUIDs        map[string][16]byte // of file systems, by device
	VarUsed        int64               // used bytes of /var (4 GiB), without snapshots of etcd
	KubeletVersion string              // output of kubelet --version
	joinConf       string              // of the last join
	// KubeletFailsBehindHub means that kubelet is running, but does not reach the cluster through
	// yurthub.
	KubeletFailsBehindHub bool
	NoNFT                 bool   // nft is not installed
	RejectedKubeletArg    string // argument with which kubelet does not start
	HealthRefusals        int    // how many connections to kubelet's health port are refused
	CrashLoop             bool   // kubelet is first healthy, and ends soon after; with RejectedKubeletArg, only with that argument
	KubeletIgnoresFlags   bool   // its unit does not read kubeadm-flags.env
	ClockSynced           bool
	boots                 int // how often the power was switched on after the first time
	Effects               int
	EffectNames           []string
	// Patience limits how long a run may wait.
	Patience time.Duration
}

// WorldStart is the initial time.
var WorldStart = time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)

// ClusterTime returns the cluster's time.
func (w *World) ClusterTime() time.Time { return w.Now.Add(-w.ClockSkew) }

// SetClock sets the machine's clock. Running units do not notice that.
func (w *World) SetClock(now time.Time) {
	w.ClockSkew += now.Sub(w.Now)
	w.Now = now
}

var errPower = errors.New("the power is gone")

// machineFiles has the files of a machine that boots for the first time.
//
//go:embed machine.txtar
var machineFiles []byte

// New returns a machine that boots for the first time. start makes the Runner of first boot:
// firstboot.New, which this package cannot import. names are additional names in the API servers'
// certificate.
func New(t *testing.T, start func(*machine.Env) *run.Runner, names ...string) *World {
	t.Helper()
	w := &World{
		T: t, Root: disktest.Scratch(t), Slots: map[string]*memDevice{}, Cluster: NewCluster(t, names...), deadlines: map[time.Time]time.Time{},
		machineState:    machineState{Units: map[string]string{}, Started: map[string]time.Time{}, LoadedConfig: map[string]string{}, Unsynced: map[string]bool{}, Now: WorldStart},
		machineSettings: machineSettings{start: start, NodeAddr: netip.MustParseAddr("192.0.2.50"), Patience: 6 * time.Minute, KubeletVersion: "Kubernetes v1.36.3\n"},
	}
	w.Cluster.Attach(w)
	for _, f := range txtar.Parse(machineFiles).Files {
		name, target, link := strings.Cut(f.Name, " -> ")
		p := filepath.Join(w.Root, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		err := error(nil)
		if link {
			err = os.Symlink(target, p)
		} else {
			err = os.WriteFile(p, f.Data, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	w.startDaemons()
	return w
}

// networkError returns an error if the machine has no network.
func (w *World) networkError() error {
	if w.Offline || !w.networkWorks() {
		return errors.New("network is unreachable")
	}
	return nil
}

// networkWorks reports whether the network settings work.
func (w *World) networkWorks() bool {
	w.networkMu.Lock()
	defer w.networkMu.Unlock()
	return w.NetworkWorks == nil || w.NetworkWorks()
}

// kubeletReportTime returns the current time if kubelet reaches the cluster, and zero otherwise.
func (w *World) kubeletReportTime() time.Time {
	flags, _ := os.ReadFile(filepath.Join(w.Root, member.KubeadmFlags))
	if w.Units[ondisk.UnitKubelet] != "active" || w.KubeletFailsBehindHub && strings.Contains(string(flags), openyurt.KubeletConf) {
		return time.Time{}
	}
	return w.Now
}

// registerNode registers the Node if kubelet reaches the cluster through ipvscare
// and has a valid certificate. c.Mu is held.
func (w *World) registerNode(c *Cluster) {
	if !w.Unregistered || w.kubeletReportTime().IsZero() || w.networkError() != nil || c.Down[Endpoint] || c.OtherClusters[Endpoint] != nil {
		return
	}
	cert, err := member.KubeletCert(w.Env())
	if now := w.ClusterTime(); err != nil || now.After(cert.NotAfter) || now.Before(cert.NotBefore) || cert.CheckSignatureFrom(c.CA) != nil {
		return
	}
	name := strings.TrimPrefix(cert.Subject.CommonName, "system:node:")
	c.register(name, w.joinConf, strings.TrimSpace(w.Get("/etc/machine-id")))
	w.Unregistered = c.Nodes[name] == nil
}

// kubeletSilent reports whether kubelet has been off for 40 s, after which
// the cluster marks its Node as not Ready.
func (w *World) kubeletSilent(machineID string) bool {
	own, _ := os.ReadFile(filepath.Join(w.Root, "etc/machine-id"))
	if w.Units[ondisk.UnitKubelet] == "active" {
		w.KubeletLastActive = w.Now
	}
	return machineID == strings.TrimSpace(string(own)) && w.Now.Sub(w.KubeletLastActive) > 40*time.Second
}

// Site returns the tests' usual Site with additional lines.
func (w *World) Site(lines ...string) string {
	return strings.Join(append([]string{
		"apiVersion: edgebake.io/v1alpha1", "kind: Site",
		"masters: [" + w.Masters() + "]",
		"caCertHashes: ['" + w.Cluster.Pin + "']",
		"nodeName: edge-{{.Serial}}",
	}, lines...), "\n") + "\n"
}

const WithToken = "credentials: {token: " + TestToken + "}"

// Stamp stamps a Site into a slot.
func (w *World) Stamp(dev, site string) {
	w.T.Helper()
	var text []byte
	if site != "" {
		text = []byte(site)
	}
	// Scrub writes the same bytes as slot.Make, but needs no 16 MiB for each slot.
	d := blankDevice(ondisk.SlotSize)
	if err := slot.Scrub(d, ondisk.SlotInfo{Version: 1, Plan: "plan", Stamped: 1767000000}, text); err != nil {
		w.T.Fatal(err)
	}
	w.Slots[dev] = d
}

// NewSlot makes a slot with the same bytes as slot.Make, but needs no 16 MiB for it.
func (w *World) NewSlot(c slot.Contents) *memDevice {
	w.T.Helper()
	d := blankDevice(ondisk.SlotSize)
	if err := slot.Rewrite(d, c); err != nil {
		w.T.Fatal(err)
	}
	return d
}

// UseSingleMaster reduces the Site to one API server, for tests that do not depend on their
// number: first boot connects to all of them at once.
func (w *World) UseSingleMaster() {
	w.T.Helper()
	w.Stamp(SlotDevice, strings.Replace(w.SlotSite(SlotDevice), w.Masters(), "192.0.2.11:6443", 1))
	w.singleMaster = true
}

func (w *World) Masters() string {
	if w.singleMaster {
		return "192.0.2.11:6443"
	}
	return "192.0.2.11:6443, 192.0.2.12:6443, 192.0.2.13:6443"
}

// Effect counts an effect, and returns an error if the power is off.
func (w *World) Effect(name string) error {
	if w.BeforeEffect != nil {
		w.BeforeEffect(name)
	}
	w.Mu.Lock()
	defer w.Mu.Unlock()
	if w.PoweredOff {
		return errPower
	}
	w.Effects++
	w.EffectNames = append(w.EffectNames, name)
	if w.PowerCutAt != 0 && w.Effects >= w.PowerCutAt {
		w.PoweredOff = true
		w.Shutdown()
		return errPower
	}
	return nil
}

func (w *World) Run(r *run.Runner) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	w.Shutdown, w.PoweredOff = cancel, false
	left := w.Patience
	sleep := r.Env.Sleep
	r.Env.Sleep = func(ctx context.Context, d time.Duration) error {
		if err := sleep(ctx, d); err != nil {
			return err
		}
		if left -= d; left < 0 {
			cancel()
		}
		return ctx.Err()
	}
	return r.Run(ctx)
}

// Sleep advances the clock. A context's deadline counts from its first use in Sleep.
func (w *World) Sleep(ctx context.Context, d time.Duration) error {
	w.Now = w.Now.Add(d)
	if w.TimeServerAnswers != nil {
		w.TimeServerAnswers()
	}
	if end, ok := ctx.Deadline(); ok {
		if w.deadlines[end].IsZero() {
			w.deadlines[end] = w.Now.Add(time.Until(end) - d)
		}
		if w.Now.After(w.deadlines[end]) {
			return context.DeadlineExceeded
		}
	}
	return ctx.Err()
}

// PowerOn boots the machine. Everything in its memory is lost.
func (w *World) PowerOn() {
	w.T.Helper()
	if err := os.RemoveAll(filepath.Join(w.Root, "run")); err != nil {
		w.T.Fatal(err)
	}
	for u := range w.Units {
		w.Units[u] = "inactive"
	}
	w.startDaemons()
	if _, err := os.Stat(filepath.Join(w.Root, ondisk.IPVSConfig)); err == nil {
		w.Units[ondisk.UnitIPVSCare] = w.ipvscare()
	}
	w.NFTRules = ""
	if w.Has(portsUnitFile) && !w.NoNFT {
		w.NFTRules = w.Get(hubNFT)
	}
	if _, err := os.Stat(filepath.Join(w.Root, ondisk.YurthubEnv)); err == nil && w.NFTRules != "" {
		w.Units[openyurt.Unit] = "active"
		w.startHub()
	}
	w.PowerCutAt, w.PoweredOff = 0, false
	if err := member.TakeOverKubelet(w.Env(), w.kubernetesMinor()); err != nil { // a unit that runs before kubelet
		w.T.Fatal(err)
	}
	// These are the conditions of kubelet.service.
	if b, err := os.ReadFile(filepath.Join(w.Root, ondisk.KubeletConfig)); err == nil && len(b) > 0 && (w.Has(appliedFile) || !w.Has(ondisk.SiteCopy)) && !(w.Has(portsKubelet) && w.NoNFT) {
		w.Units[ondisk.UnitKubelet] = "active"
		w.Started[ondisk.UnitKubelet] = w.Now
		w.Unregistered = true
	}
	name, err := os.ReadFile(filepath.Join(w.Root, "etc/hostname"))
	if err != nil {
		name = []byte("localhost\n")
	}
	w.Put("/proc/sys/kernel/hostname", string(name))
	w.boots++
	w.clockSteps = nil
	w.Put("/proc/sys/kernel/random/boot_id", fmt.Sprintf("boot-%d\n", w.boots))
	w.PowerCutAt, w.Effects, w.EffectNames, w.Console, w.PoweredOff = 0, 0, nil, nil, false
	if err := member.RestoreCertificates(w.Env()); err != nil { // a unit that runs before kubelet
		w.T.Fatal(err)
	}
	w.Effects, w.EffectNames = 0, nil
}

// kubernetesMinor returns the minor version of Kubernetes in the machine's image.
func (w *World) kubernetesMinor() (minor int) {
	w.T.Helper()
	var image ondisk.ImageInfo
	if err := json.Unmarshal([]byte(w.Get(ondisk.ImageInfoFile)), &image); err != nil {
		return 0 // damaged
	}
	return kubeadm.Minor(image.Kubernetes)
}

// StepClock changes the machine's clock by this much while its units run.
func (w *World) StepClock(by time.Duration) {
	if w.clockSteps == nil {
		w.clockSteps = map[string]time.Duration{}
	}
	w.SetClock(w.Now.Add(by))
	for unit := range w.Started {
		w.Started[unit] = w.Started[unit].Add(by)
		w.clockSteps[unit] += by
	}
}

// PutUnsynced writes a file without syncing it, as some programs do.
func (w *World) PutUnsynced(path, data string) {
	w.Put(path, data)
	if target, err := os.Readlink(filepath.Join(w.Root, path)); err == nil && filepath.IsAbs(target) {
		path = target // the file that was written
	}
	if !strings.HasPrefix(path, ondisk.RunDir+"/") {
		w.Unsynced[path] = true
	}
}

// ipvscare returns the state of ipvscare's unit, which is activating until an API server serves.
func (w *World) ipvscare() string {
	w.Cluster.Mu.Lock()
	defer w.Cluster.Mu.Unlock()
	if w.Cluster.Down[Endpoint] {
		return "activating"
	}
	return "active"
}

// LoseUnsynced empties the files that were not synced, as delayed allocation does after a power cut.
func (w *World) LoseUnsynced() {
	w.T.Helper()
	for p := range w.Unsynced {
		if w.Has(p) {
			if err := os.Truncate(filepath.Join(w.Root, p), 0); err != nil {
				w.T.Fatal(err)
			}
		}
	}
	clear(w.Unsynced)
}

func (w *World) Put(path, data string) {
	w.T.Helper()
	p := w.HostPath(path)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		w.T.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(data), 0o644); err != nil {
		w.T.Fatal(err)
	}
}

// HostPath returns the path on the host. An absolute link is resolved inside the machine.
func (w *World) HostPath(path string) string {
	p := filepath.Join(w.Root, path)
	if target, err := os.Readlink(p); err == nil && filepath.IsAbs(target) {
		return filepath.Join(w.Root, target)
	}
	return p
}

func (w *World) Get(path string) string {
	w.T.Helper()
	b, err := os.ReadFile(w.HostPath(path))
	if err != nil {
		w.T.Fatal(err)
	}
	return string(b)
}

// DirSize returns the number of bytes in a directory's files.
func (w *World) DirSize(dir string) (n int64) {
	entries, _ := os.ReadDir(filepath.Join(w.Root, dir)) // none, where it is missing
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			n += info.Size()
		}
	}
	return n
}

func (w *World) Has(path string) bool {
	_, err := os.Lstat(filepath.Join(w.Root, path))
	return err == nil
}

func (w *World) State() *ondisk.State {
	w.T.Helper()
	s, err := run.LoadState(w.Root)
	if err != nil {
		w.T.Fatal(err)
	}
	return s
}

func (w *World) ConsoleHas(words string) bool {
	return slices.ContainsFunc(w.Console, func(l string) bool { return strings.Contains(l, words) })
}

// cutDevice is a device whose power may fail before each write. A sequence
// of writes of zeros counts as one write.
type cutDevice struct {
	*memDevice
	effect func() error
	zeroTo int64 // end of the zeros that were written last, or 0
}

func (d *cutDevice) WriteAt(p []byte, off int64) (int, error) {
	zero := bytes.Count(p, []byte{0}) == len(p)
	if !zero || off == 0 || off != d.zeroTo {
		if err := d.effect(); err != nil {
			return 0, err
		}
	}
	if d.zeroTo = 0; zero {
		d.zeroTo = off + int64(len(p))
	}
	return d.memDevice.WriteAt(p, off)
}

// writeSlot writes a slot as two effects: the power may fail after the first sector is zeroed.
func (w *World) writeSlot(dev string, write func(*memDevice) error) error {
	if err := w.Effect("blank " + dev); err != nil {
		return err
	}
	before := w.Slots[dev].Clone()
	if _, err := w.Slots[dev].WriteAt(make([]byte, 512), 0); err != nil {
		return err
	}
	if err := w.Effect("write slot " + dev); err != nil {
		return err
	}
	w.Slots[dev] = before
	return write(before)
}

// startHub writes yurthub's files, unless they exist and are not empty.
func (w *World) startHub() {
	write := func(path, text string) {
		if !w.Has(path) || w.Get(path) == "" {
			w.Put(path, text)
		}
	}
	for _, p := range openyurt.Identities() {
		if filepath.Ext(p) == ".conf" {
			write(p, "kind: Config\n")
		} else if !w.Has(p) || w.Has(p+"/kept") {
			write(p+"/kept", "by yurthub\n")
		}
	}
}

// dialHub connects to yurthub's health port if it runs.
func (w *World) dialHub(ctx context.Context) (net.Conn, error) {
	// A static pod runs while kubelet does.
	if w.Units[openyurt.Unit] != "active" && !(w.Has(openyurt.Manifest) && w.Units[ondisk.UnitKubelet] == "active") {
		return nil, errors.New("connection refused")
	}
	if w.Has(openyurt.Manifest) && !w.Has(openyurt.Identity) && !w.enrolHub() {
		return nil, errors.New("connection refused") // nothing listens without certificates
	}
	if w.hubHealthServer.backlog == nil {
		w.hubHealthServer = Serve(w.T, &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
			if w.Cluster.hubTrouble(w.Has(openyurt.Manifest)) {
				http.Error(rw, "error: caches not synced", http.StatusInternalServerError)
				return
			}
			fmt.Fprint(rw, "OK")
		})})
	}
	return w.hubHealthServer.Dial(ctx, openyurt.Health)
}

const kubeletHealth = "127.0.0.1:10248"

// dialKubelet connects to kubelet's health port if it runs with valid arguments.
func (w *World) dialKubelet(ctx context.Context) (net.Conn, error) {
	bad := w.RejectedKubeletArg != "" && strings.Contains(w.Get(member.KubeadmFlags), w.RejectedKubeletArg)
	bad = bad && !w.CrashLoop
	if w.HealthRefusals > 0 {
		w.HealthRefusals--
		bad = true
	}
	if w.Units[ondisk.UnitKubelet] != "active" || bad {
		return nil, errors.New("connection refused")
	}
	if w.kubeletHealthServer.backlog == nil {
		w.kubeletHealthServer = Serve(w.T, &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprint(rw, "ok") })})
	}
	return w.kubeletHealthServer.Dial(ctx, kubeletHealth)
}

// enrolHub gets a certificate with the token for yurthub as a static pod, and
// registers the Node of the kubelet behind it.
func (w *World) enrolHub() bool {
	if w.Cluster.HubClientCSR != "" {
		return false
	}
	boot, err := kubeapi.ParseKubeconfig([]byte(w.Get(member.HubBootstrap)))
	if err != nil {
		w.T.Fatal(err)
	}
	u, err := boot.User()
	if err != nil || u.Token != TestToken {
		w.T.Fatalf("yurthub's token is %q, %v", u.Token, err)
	}
	cl, err := boot.Cluster()
	if err != nil {
		w.T.Fatal(err)
	}
	name := nodeNameOf(w.HubJoinConf)
	pem := openyurt.Root + "/pki/yurthub-current.pem"
	w.PutUnsynced(pem, w.Cluster.Client("system:node:"+name, w.ClusterTime().AddDate(1, 0, 0)))
	kc, err := kubeapi.NewKubeconfig(kubeapi.Cluster{Server: cl.Server, CAData: cl.CAData}, kubeapi.User{CertFile: pem, KeyFile: pem})
	if err != nil {
		w.T.Fatal(err)
	}
	w.PutUnsynced(openyurt.Identity, string(kc))
	w.Cluster.Register(name, w.HubJoinConf, strings.TrimSpace(w.Get("/etc/machine-id")))
	return true
}

func nodeNameOf(joinConf string) string {
	for line := range strings.Lines(joinConf) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "name: "); ok {
			return strings.Trim(v, `"`)
		}
	}
	return ""
}

// RunProgram runs a fake program.
func (w *World) RunProgram(ctx context.Context, c machine.Cmd) error {
	name := strings.Join(c.Args, " ")
	if err := w.Effect("run " + name); err != nil {
		return err
	}
	switch {
	case name == "ipvscare clean":
		if !w.Has(ondisk.IPVSConfig) {
			break
		}
		if err := json.Unmarshal([]byte(w.Get(ondisk.IPVSConfig)), new(ondisk.IPVS)); err != nil {
			return fmt.Errorf("reading %s: %w", ondisk.IPVSConfig, err)
		}
	case name == "kubelet --version":
		_, err := io.WriteString(c.Output, w.KubeletVersion)
		return err
	case name == openyurt.Program+" --version":
		said := w.Get(openyurt.Program)
		if said == "for another processor" {
			return errors.New("exec format error")
		}
		_, err := io.WriteString(c.Output, said)
		return err
	case strings.HasPrefix(name, "systemctl show --property MainPID"):
		conf := ondisk.KubeletConf
		if strings.Contains(w.Get(member.KubeadmFlags), openyurt.KubeletConf) && !w.KubeletIgnoresFlags {
			conf = openyurt.KubeletConf
		}
		w.Put("/proc/700/cmdline", "/usr/bin/kubelet\x00--kubeconfig="+ondisk.KubeletConf+"\x00--kubeconfig="+conf+"\x00")
		_, err := io.WriteString(c.Output, "700\n")
		return err
	case strings.HasPrefix(name, "ip link delete "):
		return os.Remove(filepath.Join(w.Root, "/sys/class/net", c.Args[3])) // it fails for a directory that is not empty
	case c.Args[0] == "nft":
		return w.nft(c)
	case strings.HasPrefix(name, "kubeadm join"):
		return w.kubeadmJoin(ctx, c)
	case name == "kubeadm upgrade node phase kubelet-config":
		return w.kubeadmUpgrade()
	case strings.HasPrefix(name, "ctr --namespace k8s.io run "):
		return w.CtrRun(c)
	case strings.HasPrefix(name, "kubeadm init phase "):
		return w.KubeadmInit(c)
	}
	return nil
}

func (w *World) nft(c machine.Cmd) error {
	switch {
	case w.NoNFT:
		return errors.New(`exec: "nft": executable file not found in $PATH`)
	case c.Args[1] == "-f":
		w.NFTRules = w.Get(c.Args[2])
	case c.Args[1] == "delete":
		w.NFTRules = ""
	case c.Args[1] == "list" && w.NFTRules == "":
		return fmt.Errorf("nft: %w", fs.ErrNotExist)
	case c.Args[1] == "list":
		_, err := io.WriteString(c.Output, w.NFTRules)
		return err
	}
	return nil
}

// kubeadmJoin changes the disk as kubeadm join and the kubelet that it starts
// would. The power may fail before each file.
func (w *World) kubeadmJoin(ctx context.Context, c machine.Cmd) error {
	w.Joins++
	conf := w.Get(c.Args[3])
	for _, f := range []string{ondisk.KubeletConf, ondisk.KubeletConfig, member.BootstrapRun, ondisk.KubeCA} {
		check := "FileAvailable-" + strings.ReplaceAll(f, "/", "-")
		if w.Has(f) && !strings.Contains(conf, check) { // the Site may ignore the check
			return fmt.Errorf("[ERROR %s]: %s already exists", check, f)
		}
	}
	disc, err := kubeapi.ParseKubeconfig([]byte(w.Get(member.DiscoveryFile)))
	if err != nil {
		return err
	}
	u, err := disc.User()
	if err != nil {
		return err
	}
	if err := w.kubeadmWrites(member.BootstrapConf, "token: "+u.Token); err != nil {
		return err
	}
	fmt.Fprintf(c.Output, "[preflight] Running pre-flight checks\n[kubelet-start] token %s\n", u.Token)
	if w.JoinError != nil {
		if err := w.JoinError(w.Joins); err != nil {
			fmt.Fprintf(c.Output, "error: %v\n", err)
			return errors.New("exit status 1")
		}
	}
	given := kubeletArgs(w.T, conf)
	var args []string
	throughHub := given["kubeconfig"] != ""
	if !throughHub {
		args = append(args, "--container-runtime-endpoint=unix:///run/containerd/containerd.sock")
	}
	for _, k := range slices.Sorted(maps.Keys(given)) {
		args = append(args, "--"+k+"="+given[k])
	}
	flags := "KUBELET_KUBEADM_ARGS=\"" + strings.Join(args, " ") + "\"\n"
	if err := errors.Join(w.kubeadmWrites(ondisk.KubeletConfig, "kind: KubeletConfiguration\n"), w.kubeadmWrites(member.KubeadmFlags, flags)); err != nil {
		return err
	}
	w.Units[ondisk.UnitKubelet], w.KubeletLastActive, w.joinConf, w.Unregistered = "active", w.Now, conf, true
	if throughHub {
		return w.joinThroughHub(ctx, c, conf)
	}
	return w.joinDirectly(disc, conf)
}

// kubeadmUpgrade writes kubelet's settings as this image's kubeadm would: it copies the former
// settings, empties the file, and writes the new ones.
func (w *World) kubeadmUpgrade() error {
	if w.networkError() != nil {
		return errors.New("failed to get config map")
	}
	w.Put(ondisk.KubernetesDir+"/tmp/kubeadm-kubelet-config-2026-11-20-10-00-00/config.yaml", w.Get(ondisk.KubeletConfig))
	if err := w.kubeadmWrites(ondisk.KubeletConfig, ""); err != nil {
		return err
	}
	return w.kubeadmWrites(ondisk.KubeletConfig, UpgradedKubeletConfig)
}

// UpgradedKubeletConfig has the settings that kubeadm of another minor version writes.
const UpgradedKubeletConfig = "kind: KubeletConfiguration\nsyncFrequency: 1m\n"

// kubeadmWrites writes a file without syncing it. It follows a link.
func (w *World) kubeadmWrites(path, data string) error {
	if err := w.Effect("kubeadm writes " + path); err != nil {
		return err
	}
	if t, err := os.Readlink(filepath.Join(w.Root, path)); err == nil {
		path = t
	}
	w.PutUnsynced(path, data)
	return nil
}

// kubeadmEnds removes kubeadm's bootstrap credentials, as kubeadm does when it ends.
func (w *World) kubeadmEnds() error {
	if err := w.Effect("kubeadm ends"); err != nil {
		return err
	}
	return os.Remove(filepath.Join(w.Root, member.BootstrapConf))
}

// joinThroughHub acts as the end of kubeadm join on a node whose kubelet connects through yurthub.
func (w *World) joinThroughHub(ctx context.Context, c machine.Cmd, conf string) error {
	w.HubJoinConf = conf
	if err := w.kubeadmEnds(); err != nil {
		return err
	}
	conn, err := w.dialHub(ctx)
	if err != nil || w.Cluster.hubTrouble(true) {
		fmt.Fprintf(c.Output, "error: error execution phase kubelet-start: error uploading crisocket: %v\n", err)
		return errors.New("exit status 1")
	}
	w.Cluster.Mu.Lock()
	defer w.Cluster.Mu.Unlock()
	w.Cluster.Nodes[nodeNameOf(conf)].Metadata.Annotations = map[string]string{socketAnnotation: ondisk.CRISocket}
	return conn.Close()
}

// joinDirectly acts as a kubelet that gets its certificate and registers its Node.
func (w *World) joinDirectly(disc *kubeapi.Kubeconfig, conf string) error {
	cl, err := disc.Cluster()
	if err != nil {
		return err
	}
	name := nodeNameOf(conf)
	dated := member.KubeletPKI + "/kubelet-client-2026-11-20-10-00-00.pem"
	if err := w.kubeadmWrites(dated, w.Cluster.Client("system:node:"+name, w.ClusterTime().AddDate(1, 0, 0))); err != nil {
		return err
	}
	if err := os.Symlink(dated, filepath.Join(w.Root, member.ClientCert)); err != nil {
		return err
	}
	kc, err := kubeapi.NewKubeconfig(kubeapi.Cluster{Server: cl.Server, CAData: cl.CAData}, kubeapi.User{CertFile: member.ClientCert, KeyFile: member.ClientCert})
	if err != nil {
		return err
	}
	if err := w.kubeadmWrites(ondisk.KubeletConf, string(kc)); err != nil {
		return err
	}
	w.Cluster.Register(name, conf, strings.TrimSpace(w.Get("/etc/machine-id")))
	return w.kubeadmEnds()
}

// kubeletArgs returns kubelet's flags in a JoinConfiguration of either version.
func kubeletArgs(t *testing.T, joinConf string) map[string]string {
	var c struct {
		APIVersion       string `yaml:"apiVersion"`
		NodeRegistration struct {
			KubeletExtraArgs yaml.Node `yaml:"kubeletExtraArgs"`
		} `yaml:"nodeRegistration"`
	}
	if err := yaml.Unmarshal([]byte(joinConf), &c); err != nil {
		t.Fatal(err)
	}
	args := map[string]string{}
	n := &c.NodeRegistration.KubeletExtraArgs
	switch {
	case n.IsZero():
	case c.APIVersion == "kubeadm.k8s.io/v1beta3":
		if err := n.Decode(&args); err != nil {
			t.Fatal(err)
		}
	default:
		var list []struct{ Name, Value string }
		if err := n.Decode(&list); err != nil {
			t.Fatal(err)
		}
		for _, a := range list {
			args[a.Name] = a.Value
		}
	}
	return args
}

const Endpoint = "apiserver.cluster.local:6443"

const SlotDevice = "/dev/vda2"

func (w *World) SlotSite(dev string) string {
	w.T.Helper()
	c, err := slot.Read(w.Slots[dev])
	if err != nil {
		w.T.Fatal(err)
	}
	return string(c.Files[ondisk.SlotSite])
}
