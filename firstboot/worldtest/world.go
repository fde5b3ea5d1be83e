package worldtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/tools/txtar"

	"github.com/edgebake/edgebake/cluster/api"
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

// What the machine and the cluster have, by their own names: a test that compares a
// constant of first boot with itself would prove nothing.
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

// World is a machine and its cluster, both made up: a directory, slots in
// memory, and API servers on loopback. Every effect is counted, and the
// machine can lose its power before any of them.
type World struct {
	T         *testing.T
	Root      string
	sole      bool // its sites name one master alone
	Slots     map[string]*memDevice
	SlotFiles map[string]string // beside the slot's own
	SlotReads []string          // devices of which more than the label was read
	ReadOnly  map[string]bool
	Units     map[string]string
	Started   map[string]time.Time
	stepped   map[string]time.Duration // by which the clock was set since, by unit
	// Loaded is what daemons read when they started last, by unit: they use it,
	// whatever their files are by now.
	Loaded map[string]string
	// Zone are names with their addresses, which DNS tells but for DeadDNS, a server
	// that answers nobody.
	Zone    map[string]string
	DeadDNS string
	Console []string
	Log     bytes.Buffer
	Posted  [][]byte
	Proxies []string // that reports went through
	Now     time.Time
	Wrong   time.Duration // by which the machine's clock is ahead of the cluster's
	// clockAsked counts how often systemd was asked for the boot's clock.
	clockAsked uint64
	deadlines  map[time.Time]time.Time
	randoms    byte
	Cluster    *Cluster
	// Joins counts kubeadm's runs; JoinError, if set, is what it says.
	Joins     int
	JoinError func(n int) error
	Source    netip.Addr
	// Further are addresses of this machine's interfaces, beside Source on eth0.
	Further []machine.InterfaceAddr
	hub     Listener
	Offline bool
	Heard   time.Time // when kubelet was last active
	// Unregistered: kubelet has not registered its Node since it started. It does so
	// once in its life: a Node that is deleted later stays away until it starts again.
	Unregistered bool
	Cabled       bool                // offline, with an address and a route all the same
	Uuids        map[string][16]byte // of file systems, by device
	Used         int64               // bytes of /var, of 4 GiB, besides snapshots of etcd
	// Kubelet is what it says of its version; podConf is the JoinConfiguration
	// of a kubelet that goes through yurthub.
	Kubelet, podConf string
	joinConf         string // of the last join
	// KubeletBroken: behind yurthub it runs, and does not get through.
	KubeletBroken bool
	NoNFT         bool   // it is not installed
	BadArg        string // kubelet does not come up with it
	Refusals      int    // so many times kubelet's health port is not there yet
	CrashLoop     bool   // with BadArg kubelet says that it is well, and ends soon after
	kubeletSays   Listener
	Rules         string // that nft has loaded
	locked        map[string]bool
	DeafKubelet   bool // its unit does not read kubeadm-flags.env
	// Link reports whether the settings in place make a network; nil: they do.
	Link   func() bool
	linkMu sync.Mutex // several connections are tried at once
	Synced bool
	// Answers reports whether a time server has set the clock; nil: synced tells.
	Answers func() bool

	// On a control-plane node: the phases of kubeadm init, connections that are
	// not the cluster's, and what first boot listens on.
	Init    func(machine.Cmd) error
	CtrRun  func(machine.Cmd) error
	Dials   func(ctx context.Context, addr string) (net.Conn, error, bool)
	Listens func(addr string) (net.Listener, error)
	// Refuses is what is wrong by now with a way of those connections to the API
	// servers, if it is one.
	Refuses func(addr string) (err error, ours bool)

	boots int // how often the power came on after the first time

	Mu      sync.Mutex
	Effects int
	Names   []string
	CutAt   int // the effect that does not happen any more; 0: none
	// Unsynced are files that programs wrote and nobody has synced.
	Unsynced map[string]bool
	Cut      bool
	Off      context.CancelFunc
	Before   func(effect string) // what somebody does meanwhile
	// Patience ends a run that waits forever.
	Patience time.Duration
}

// WorldStart is when a world begins.
var WorldStart = time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)

// Truth is the time that the cluster has.
func (w *World) Truth() time.Time { return w.Now.Add(-w.Wrong) }

// ClockSays gives the machine another idea of what time it is.
func (w *World) ClockSays(now time.Time) {
	w.Wrong += now.Sub(w.Now)
	w.Now = now
}

var errPower = errors.New("the power is gone")

func New(t *testing.T, files string, names ...string) *World {
	t.Helper()
	w := &World{
		T: t, Root: disktest.Scratch(t), Units: map[string]string{}, Started: map[string]time.Time{}, Loaded: map[string]string{},
		Slots: map[string]*memDevice{}, Unsynced: map[string]bool{}, deadlines: map[time.Time]time.Time{},
		Now: WorldStart, Source: netip.MustParseAddr("192.0.2.50"),
		Cluster: NewCluster(t, names...), Patience: 6 * time.Minute, Kubelet: "Kubernetes v1.36.3\n",
	}
	w.Cluster.Of(w)
	a, err := txtar.ParseFile(files)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range a.Files {
		name, target, link := strings.Cut(f.Name, " -> ")
		p := filepath.Join(w.Root, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
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

// unreachable is what is wrong with the network.
func (w *World) unreachable() error {
	if w.Offline || !w.linked() {
		return errors.New("network is unreachable")
	}
	return nil
}

// linked reports whether the settings in place make a network.
func (w *World) linked() bool {
	w.linkMu.Lock()
	defer w.linkMu.Unlock()
	return w.Link == nil || w.Link()
}

// kubeletReported is when kubelet last reached the cluster.
func (w *World) kubeletReported() time.Time {
	flags, _ := os.ReadFile(filepath.Join(w.Root, member.KubeadmFlags))
	if w.Units[ondisk.UnitKubelet] != "active" || w.KubeletBroken && strings.Contains(string(flags), openyurt.KubeletConf) {
		return time.Time{}
	}
	return w.Now
}

// kubeletRegisters is what kubelet does first when it reaches the cluster: through
// ipvscare, and with its own certificate. c.mu is held.
func (w *World) kubeletRegisters(c *Cluster) {
	if !w.Unregistered || w.kubeletReported().IsZero() || w.unreachable() != nil || c.Down[OwnEndpoint] || c.Elsewhere[OwnEndpoint] != nil {
		return
	}
	cert, err := member.KubeletCert(w.Env())
	if now := w.Truth(); err != nil || now.After(cert.NotAfter) || now.Before(cert.NotBefore) || cert.CheckSignatureFrom(c.Ca) != nil {
		return
	}
	name := strings.TrimPrefix(cert.Subject.CommonName, "system:node:")
	c.add(name, w.joinConf, strings.TrimSpace(w.Get("/etc/machine-id")))
	w.Unregistered = c.Nodes[name] == nil
}

// kubeletSilent: after 40 s the cluster takes a Node for lost.
func (w *World) kubeletSilent(machineID string) bool {
	own, _ := os.ReadFile(filepath.Join(w.Root, "etc/machine-id"))
	if w.Units[ondisk.UnitKubelet] == "active" {
		w.Heard = w.Now
	}
	return machineID == strings.TrimSpace(string(own)) && w.Now.Sub(w.Heard) > 40*time.Second
}

// Site returns the site of the tests, with lines added or taken away.
func (w *World) Site(lines ...string) string {
	return strings.Join(append([]string{
		"apiVersion: edgebake.io/v1alpha1", "kind: Site",
		"masters: [" + w.Masters() + "]",
		"caCertHashes: ['" + w.Cluster.Pin + "']",
		"nodeName: edge-{{.Serial}}",
	}, lines...), "\n") + "\n"
}

const WithToken = "credentials: {token: " + TestToken + "}"

// Stamp puts a site into a slot.
func (w *World) Stamp(dev, site string) {
	w.T.Helper()
	var text []byte
	if site != "" {
		text = []byte(site)
	}
	// As a slot is made that cannot be read: the same bytes as Make's, and not
	// 16 MiB for each.
	d := blankDevice(ondisk.SlotSize)
	if err := slot.Scrub(d, ondisk.SlotInfo{Version: 1, Plan: "plan", Stamped: 1767000000}, text); err != nil {
		w.T.Fatal(err)
	}
	w.Slots[dev] = d
}

// SlotOf makes a slot: the same bytes as slot.Make's, and not 16 MiB for each.
func (w *World) SlotOf(c slot.Contents) *memDevice {
	w.T.Helper()
	d := blankDevice(ondisk.SlotSize)
	if err := slot.Rewrite(d, c); err != nil {
		w.T.Fatal(err)
	}
	return d
}

// OneMaster has the site name one master alone, where it is not about them:
// whatever asks a cluster asks all of its masters at once.
func (w *World) OneMaster() {
	w.T.Helper()
	w.Stamp(OwnDev, strings.Replace(w.SlotSite(OwnDev), w.Masters(), "192.0.2.11:6443", 1))
	w.sole = true
}

func (w *World) Masters() string {
	if w.sole {
		return "192.0.2.11:6443"
	}
	return "192.0.2.11:6443, 192.0.2.12:6443, 192.0.2.13:6443"
}

// Effect is where the power may go: the n-th one and all after it do nothing.
func (w *World) Effect(name string) error {
	if w.Before != nil {
		w.Before(name)
	}
	w.Mu.Lock()
	defer w.Mu.Unlock()
	if w.Cut {
		return errPower
	}
	w.Effects++
	w.Names = append(w.Names, name)
	if w.CutAt != 0 && w.Effects >= w.CutAt {
		w.Cut = true
		w.Off()
		return errPower
	}
	return nil
}

func (w *World) Run(r *run.Runner) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	w.Off, w.Cut = cancel, false
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

// Sleep passes time that is made up: a deadline counts from when it is first
// seen.
func (w *World) Sleep(ctx context.Context, d time.Duration) error {
	w.Now = w.Now.Add(d)
	if w.Answers != nil {
		w.Answers()
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

// PowerOn is the next boot: what was in memory is gone.
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
	w.Rules = ""
	if w.Has(portsUnitFile) && !w.NoNFT {
		w.Rules = w.Get(hubNFT)
	}
	if _, err := os.Stat(filepath.Join(w.Root, ondisk.YurthubEnv)); err == nil && w.Rules != "" {
		w.Units[openyurt.Unit] = "active"
		w.hubStarts()
	}
	// As kubelet.service has it.
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
	w.stepped = nil
	w.Put("/proc/sys/kernel/random/boot_id", fmt.Sprintf("boot-%d\n", w.boots))
	w.CutAt, w.Effects, w.Names, w.Console, w.Cut = 0, 0, nil, nil, false
	if err := member.RestoreCertificates(w.Env()); err != nil { // a unit of its own, before kubelet
		w.T.Fatal(err)
	}
	w.Effects, w.Names = 0, nil
}

// SetClock moves the machine's clock while its units run.
func (w *World) SetClock(by time.Duration) {
	if w.stepped == nil {
		w.stepped = map[string]time.Duration{}
	}
	w.ClockSays(w.Now.Add(by))
	for unit := range w.Started {
		w.Started[unit] = w.Started[unit].Add(by)
		w.stepped[unit] += by
	}
}

// Puts is put by a program that does not sync.
func (w *World) Puts(path, data string) {
	w.Put(path, data)
	if target, err := os.Readlink(filepath.Join(w.Root, path)); err == nil && filepath.IsAbs(target) {
		path = target // where it was written to
	}
	if !strings.HasPrefix(path, ondisk.RunDir+"/") {
		w.Unsynced[path] = true
	}
}

// ipvscare is the state of its unit: the start is not over as long as it serves nobody.
func (w *World) ipvscare() string {
	w.Cluster.Mu.Lock()
	defer w.Cluster.Mu.Unlock()
	if w.Cluster.Down[OwnEndpoint] {
		return "activating"
	}
	return "active"
}

// Lose takes from the disk what was not synced, as delayed allocation does:
// the names are there, and nothing in them.
func (w *World) Lose() {
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
	p := w.Inside(path)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		w.T.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(data), 0o644); err != nil {
		w.T.Fatal(err)
	}
}

// Inside follows an absolute link in the machine, not on this host.
func (w *World) Inside(path string) string {
	p := filepath.Join(w.Root, path)
	if target, err := os.Readlink(p); err == nil && filepath.IsAbs(target) {
		return filepath.Join(w.Root, target)
	}
	return p
}

func (w *World) Get(path string) string {
	w.T.Helper()
	b, err := os.ReadFile(w.Inside(path))
	if err != nil {
		w.T.Fatal(err)
	}
	return string(b)
}

// BytesBelow are those of a directory's files.
func (w *World) BytesBelow(dir string) (n int64) {
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

func (w *World) Said(words string) bool {
	return slices.ContainsFunc(w.Console, func(l string) bool { return strings.Contains(l, words) })
}

func (w *World) Env() *machine.Env {
	e := &machine.Env{
		Root: w.Root,
		Log:  slog.New(slog.NewTextHandler(&w.Log, nil)),
		Clock: machine.Clock{
			Now: func() time.Time { return w.Now },
			Sleep: func(ctx context.Context, d time.Duration) error {
				return w.Sleep(ctx, d)
			},
			SetClock: func(t time.Time) error {
				if err := w.Effect("clock"); err != nil {
					return err
				}
				w.ClockSays(t)
				return nil
			},
			ClockSynced: func(context.Context) (bool, error) {
				if w.Answers != nil {
					return w.Answers(), nil
				}
				return w.Synced, nil
			},
		},
		Chance: machine.Chance{
			Rand: func() float64 { return 0 },
			Random: func(n int) []byte {
				w.randoms++
				return bytes.Repeat([]byte{w.randoms}, n)
			},
		},
		Files: machine.Files{
			WriteFile: func(p string, b []byte, o machine.Owner) error {
				if p == "/etc/hosts" && !w.locked[ondisk.HostsLock] {
					w.T.Errorf("%s is written without %s", p, ondisk.HostsLock)
				}
				if err := w.Effect("write " + p); err != nil {
					return err
				}
				full := filepath.Join(w.Root, p)
				if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
					return err
				}
				if err := os.RemoveAll(full); err != nil { // never through a link
					return err
				}
				delete(w.Unsynced, p)
				err := makeFile(full, b, uint32(o.Mode.Perm()))
				if err == nil && os.Geteuid() == 0 {
					err = os.Chown(full, o.UID, o.GID)
				}
				return err
			},
			Stream: func(p string, o machine.Owner, write func(io.Writer) error) error {
				if err := w.Effect("stream " + p); err != nil {
					return err
				}
				full := filepath.Join(w.Root, p)
				if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
					return err
				}
				f, err := os.Create(full)
				if err != nil {
					return err
				}
				if err := errors.Join(write(f), f.Close()); err != nil {
					return errors.Join(err, os.Remove(full))
				}
				return os.Chmod(full, o.Mode)
			},
			Rename: func(from, to string) error {
				if err := w.Effect("rename " + from); err != nil {
					return err
				}
				full := filepath.Join(w.Root, to)
				return errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.Rename(filepath.Join(w.Root, from), full))
			},
			Symlink: func(target, p string) error {
				if err := w.Effect("symlink " + p); err != nil {
					return err
				}
				full := filepath.Join(w.Root, p)
				return errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.RemoveAll(full), os.Symlink(target, full))
			},
			Link: func(target, p string) error {
				if err := w.Effect("link " + p); err != nil {
					return err
				}
				full := filepath.Join(w.Root, p)
				delete(w.Unsynced, p)
				if w.Unsynced[target] {
					w.Unsynced[p] = true
				}
				return errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.RemoveAll(full), os.Link(filepath.Join(w.Root, target), full))
			},
			Mkdir: func(p string, o machine.Owner) error {
				if err := w.Effect("mkdir " + p); err != nil {
					return err
				}
				full := filepath.Join(w.Root, p)
				return errors.Join(os.MkdirAll(full, 0o755), os.Chmod(full, o.Mode))
			},
			Remove: func(p string) error {
				if !w.Has(p) {
					return nil
				}
				if err := w.Effect("remove " + p); err != nil {
					return err
				}
				err := os.Remove(filepath.Join(w.Root, p))
				if errors.Is(err, fs.ErrExist) {
					return nil // a directory that is not empty stays
				}
				return err
			},
			RemoveAll: func(p string) error {
				if !w.Has(p) {
					return nil
				}
				if err := w.Effect("remove all of " + p); err != nil {
					return err
				}
				return os.RemoveAll(filepath.Join(w.Root, p))
			},
			Sync: func(paths ...string) error {
				if err := w.Effect("sync"); err != nil {
					return err
				}
				for _, p := range paths {
					if _, err := os.Stat(filepath.Join(w.Root, p)); err != nil && p != "/var" && p != "/etc" {
						return err
					}
				}
				clear(w.Unsynced) // with the file system that all are on
				return nil
			},
			Lock: func(_ context.Context, path string) (func(), error) {
				if w.locked[path] {
					return nil, fmt.Errorf("%s is locked already", path)
				}
				if w.locked == nil {
					w.locked = map[string]bool{}
				}
				w.locked[path] = true
				return func() { delete(w.locked, path) }, nil
			},
		},
		Programs: machine.Programs{
			Run: w.Exec,
			Unit: func(_ context.Context, verb, unit string) error {
				if err := w.Effect(strings.TrimSpace(verb + " " + unit)); err != nil {
					return err
				}
				if daemon(unit) {
					return w.turnDaemon(verb, unit)
				}
				switch verb {
				case "start", "restart":
					if unit == ondisk.UnitKubelet && (verb == "restart" || w.Units[unit] != "active") {
						w.Unregistered = true
					}
					if unit == ondisk.UnitKubelet && w.Has(portsKubelet) {
						if w.NoNFT {
							return errors.New("the control process exited with error code")
						}
						w.Rules = w.Get(hubNFT)
					}
					w.Units[unit] = "active"
					w.Started[unit] = w.Now
					delete(w.stepped, unit)
					if unit == ondisk.UnitIPVSCare {
						if w.Units[unit] = w.ipvscare(); w.Units[unit] != "active" {
							return errors.New("its start timed out")
						}
					}
					if unit == openyurt.Unit {
						w.hubStarts()
					}
				case "stop":
					w.Units[unit] = "inactive"
				}
				return nil
			},
			UnitState: func(_ context.Context, unit string) (string, error) {
				if s, ok := w.Units[unit]; ok {
					return s, nil
				}
				return "inactive", nil
			},
			UnitSince: func(_ context.Context, unit string) (machine.UnitStart, error) {
				if unit == ondisk.UnitKubelet && w.CrashLoop && strings.Contains(w.Get(member.KubeadmFlags), w.BadArg) {
					at := w.Now.Add(-9 * time.Second)
					return machine.UnitStart{Now: at, Then: at}, nil
				}
				return machine.UnitStart{Now: w.Started[unit], Then: w.Started[unit].Add(-w.stepped[unit])}, nil
			},
			BootClock: func(context.Context) (ondisk.BootClock, error) {
				w.clockAsked++
				c := ondisk.BootClock{Userspace: 6_100_000, FirstBoot: 1_000_000 * w.clockAsked}
				if w.clockAsked > 1 {
					c.Finish = 24_000_000
				}
				return c, nil
			},
		},
		Platform: machine.Platform{
			SetHostname: func(name string) error {
				if err := w.Effect("hostname " + name); err != nil {
					return err
				}
				w.Put("/proc/sys/kernel/hostname", name+"\n")
				return nil
			},
			SetFirmwareVar: func(path string, value []byte) error {
				if !w.Has(filepath.Dir(path)) {
					return errors.ErrUnsupported
				}
				if err := w.Effect("firmware"); err != nil {
					return err
				}
				w.Put(path, "\a\x00\x00\x00"+string(value))
				return nil
			},
		},
		Network: machine.Network{
			Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
				if addr == kubeletHealth {
					return w.dialKubelet(ctx)
				}
				if addr == openyurt.Health {
					return w.dialHub(ctx)
				}
				if err := w.unreachable(); err != nil {
					return nil, err
				}
				if w.Dials != nil {
					if conn, err, ours := w.Dials(ctx, addr); ours {
						return conn, err
					}
				}
				if host, port, err := net.SplitHostPort(addr); err == nil && w.Zone[host] != "" {
					ip, err := w.lookup(host)
					if err != nil {
						return nil, err
					}
					addr = net.JoinHostPort(ip.String(), port)
				}
				return w.Cluster.Dial(ctx, addr)
			},
			Listen: func(_ context.Context, addr string) (net.Listener, error) { return w.Listens(addr) },
			Source: func(context.Context, string) (netip.Addr, error) {
				if w.Offline && !w.Cabled || !w.linked() {
					return netip.Addr{}, errors.New("network is unreachable")
				}
				return w.Source, nil
			},
			Addresses: func() ([]machine.InterfaceAddr, error) {
				return append([]machine.InterfaceAddr{{Interface: "lo", Addr: netip.MustParseAddr("127.0.0.1")}, {Interface: "eth0", Addr: w.Source}}, w.Further...), nil
			},
			Resolve: func(_ context.Context, host string) ([]netip.Addr, error) {
				a, err := w.lookup(host)
				return []netip.Addr{a}, err
			},
			Post: func(_ context.Context, url, _ string, body []byte, proxy []string) error {
				w.Mu.Lock()
				w.Proxies = append(w.Proxies, proxy...)
				w.Posted = append(w.Posted, body)
				w.Mu.Unlock()
				return nil
			},
			Get: func(ctx context.Context, url string, header http.Header, _ []string) (*http.Response, error) {
				req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
				if err != nil {
					return nil, err
				}
				req.Header = header
				return http.DefaultTransport.RoundTrip(req)
			},
		},
		Slots: machine.Slots{
			SlotLabel: func(dev string) (string, error) {
				d, ok := w.Slots[dev]
				if !ok {
					return "", fs.ErrNotExist
				}
				return slot.Label(d)
			},
			ReadSlot: func(dev string) (*slot.Contents, error) {
				w.SlotReads = append(w.SlotReads, dev)
				d, ok := w.Slots[dev]
				if !ok {
					return nil, fs.ErrNotExist
				}
				return slot.Read(d)
			},
			SlotFile: func(dev, name string, to io.Writer) error {
				text, ok := w.SlotFiles[dev+"/"+name]
				if !ok {
					return fs.ErrNotExist
				}
				_, err := io.WriteString(to, text)
				return err
			},
			WriteSlot: func(dev string, c *slot.Contents) error {
				if err := w.Effect("blank " + dev); err != nil {
					return err
				}
				return slot.Rewrite(&cutDevice{memDevice: w.Slots[dev], effect: func() error { return w.Effect("write slot " + dev) }}, *c)
			},
			ReadClaims: func(dev string) ([]slot.Claim, error) {
				d, ok := w.Slots[dev]
				if !ok {
					return nil, fs.ErrNotExist
				}
				return slot.ReadClaims(d)
			},
			WriteClaim: func(dev string, c slot.Claim) error {
				d, ok := w.Slots[dev]
				if !ok {
					return fs.ErrNotExist
				}
				if w.ReadOnly[dev] {
					return syscall.EROFS
				}
				return slot.WriteClaim(&cutDevice{memDevice: d, effect: func() error { return w.Effect("claim " + dev) }}, c)
			},
			ScrubSlot: func(dev string, info ondisk.SlotInfo, site []byte, secrets []string) error {
				return w.writeSlot(dev, func(d *memDevice) error { return slot.Scrub(d, info, site, secrets...) })
			},
			ReportSlot: func(dev string, text, json []byte) error {
				if err := w.Effect("report " + dev); err != nil {
					return err
				}
				d, ok := w.Slots[dev]
				if !ok {
					return fmt.Errorf("there is no slot %s", dev)
				}
				return slot.WriteReport(d, slot.Report{Text: text, JSON: json})
			},
		},
		FileSystems: machine.FileSystems{
			FSUUID: func(dev string) ([16]byte, error) {
				if u, ok := w.Uuids[dev]; ok {
					return u, nil
				}
				return [16]byte{}, errors.New("no device")
			},
			FSSize: func(string) (int64, error) { return 4 << 30, nil },
			FSFree: func(string) (int64, error) { return 4<<30 - w.Used - w.BytesBelow(member.SnapshotDir), nil },
			OpenDevice: func(string, bool) (machine.Device, error) {
				return nil, errors.New("this machine's partitions are names only")
			},
		},
		Audience: machine.Audience{
			Console: func(line string) { w.Console = append(w.Console, line) },
			Notify:  func(string) {},
		},
	}
	return e
}

// cutDevice is a device whose power may go before each write. A run of zeros is
// one, however many writes it takes.
type cutDevice struct {
	*memDevice
	effect func() error
	zeroTo int64 // where zeros end that were written last; 0: none were
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

// writeSlot is two effects: the power may go between the zeroed first sector
// and the rest.
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

// hubStarts is yurthub writing what it keeps between its starts, and again what
// power that went has left empty.
func (w *World) hubStarts() {
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

// dialHub reaches yurthub's health port while its unit runs.
func (w *World) dialHub(ctx context.Context) (net.Conn, error) {
	// A static pod runs while kubelet does.
	if w.Units[openyurt.Unit] != "active" && !(w.Has(openyurt.Manifest) && w.Units[ondisk.UnitKubelet] == "active") {
		return nil, errors.New("connection refused")
	}
	if w.Has(openyurt.Manifest) && !w.Has(openyurt.Identity) && !w.enrolHub() {
		return nil, errors.New("connection refused") // nothing listens without certificates
	}
	if w.hub.backlog == nil {
		w.hub = Serve(w.T, &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
			if w.Cluster.hubTrouble(w.Has(openyurt.Manifest)) {
				http.Error(rw, "error: caches not synced", http.StatusInternalServerError)
				return
			}
			fmt.Fprint(rw, "OK")
		})})
	}
	return w.hub.Dial(ctx, openyurt.Health)
}

const kubeletHealth = "127.0.0.1:10248"

// dialKubelet reaches kubelet's health port while it runs with arguments that
// it takes.
func (w *World) dialKubelet(ctx context.Context) (net.Conn, error) {
	bad := w.BadArg != "" && strings.Contains(w.Get(member.KubeadmFlags), w.BadArg)
	bad = bad && !w.CrashLoop
	if w.Refusals > 0 {
		w.Refusals--
		bad = true
	}
	if w.Units[ondisk.UnitKubelet] != "active" || bad {
		return nil, errors.New("connection refused")
	}
	if w.kubeletSays.backlog == nil {
		w.kubeletSays = Serve(w.T, &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprint(rw, "ok") })})
	}
	return w.kubeletSays.Dial(ctx, kubeletHealth)
}

// enrolHub is yurthub as a static pod asking for its identity with the token,
// and the kubelet behind it that registers its Node then.
func (w *World) enrolHub() bool {
	if w.Cluster.ClientCSR != "" {
		return false
	}
	boot, err := api.ParseKubeconfig([]byte(w.Get(member.HubBootstrap)))
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
	name := nodeNameOf(w.podConf)
	pem := openyurt.Root + "/pki/yurthub-current.pem"
	w.Puts(pem, w.Cluster.Client("system:node:"+name, w.Truth().AddDate(1, 0, 0)))
	kc, err := api.NewKubeconfig(api.Cluster{Server: cl.Server, CAData: cl.CAData}, api.User{CertFile: pem, KeyFile: pem})
	if err != nil {
		w.T.Fatal(err)
	}
	w.Puts(openyurt.Identity, string(kc))
	w.Cluster.Register(name, w.podConf, strings.TrimSpace(w.Get("/etc/machine-id")))
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

// Exec plays the programs.
func (w *World) Exec(ctx context.Context, c machine.Cmd) error {
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
		_, err := io.WriteString(c.Output, w.Kubelet)
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
		if strings.Contains(w.Get(member.KubeadmFlags), openyurt.KubeletConf) && !w.DeafKubelet {
			conf = openyurt.KubeletConf
		}
		w.Put("/proc/700/cmdline", "/usr/bin/kubelet\x00--kubeconfig="+ondisk.KubeletConf+"\x00--kubeconfig="+conf+"\x00")
		_, err := io.WriteString(c.Output, "700\n")
		return err
	case strings.HasPrefix(name, "ip link delete "):
		return os.Remove(filepath.Join(w.Root, "/sys/class/net", c.Args[3])) // fails where something is below it
	case strings.HasPrefix(name, "nft ") && w.NoNFT:
		return errors.New(`exec: "nft": executable file not found in $PATH`)
	case strings.HasPrefix(name, "nft -f "):
		w.Rules = w.Get(c.Args[2])
	case strings.HasPrefix(name, "nft delete table "):
		w.Rules = ""
	case strings.HasPrefix(name, "nft list table "):
		if w.Rules == "" {
			return fmt.Errorf("nft: %w", fs.ErrNotExist)
		}
		_, err := io.WriteString(c.Output, w.Rules)
		return err
	case strings.HasPrefix(name, "kubeadm join"):
		return w.kubeadm(ctx, c)
	case strings.HasPrefix(name, "ctr --namespace k8s.io run "):
		return w.CtrRun(c)
	case strings.HasPrefix(name, "kubeadm init phase "):
		return w.Init(c)
	}
	return nil
}

// kubeadm does what kubeadm join and the kubelet it starts do to the disk,
// with the power going at any of their files.
func (w *World) kubeadm(ctx context.Context, c machine.Cmd) error {
	w.Joins++
	conf := w.Get(c.Args[3])
	for _, f := range []string{ondisk.KubeletConf, ondisk.KubeletConfig, member.BootstrapRun, ondisk.KubeCA} {
		ignored := strings.Contains(conf, "FileAvailable-"+strings.ReplaceAll(f, "/", "-"))
		if w.Has(f) && !ignored {
			return fmt.Errorf("[ERROR FileAvailable-%s]: %s already exists", strings.ReplaceAll(f, "/", "-"), f)
		}
	}
	disc, err := api.ParseKubeconfig([]byte(w.Get(member.DiscoveryFile)))
	if err != nil {
		return err
	}
	u, err := disc.User()
	if err != nil {
		return err
	}
	write := func(p, data string) error {
		if err := w.Effect("kubeadm writes " + p); err != nil {
			return err
		}
		if t, err := os.Readlink(filepath.Join(w.Root, p)); err == nil {
			p = t
		}
		w.Puts(p, data)
		return nil
	}
	name := nodeNameOf(conf)
	if err := write(member.BootstrapConf, "token: "+u.Token); err != nil {
		return err
	}
	fmt.Fprintf(c.Output, "[preflight] Running pre-flight checks\n[kubelet-start] token %s\n", u.Token)
	if w.JoinError != nil {
		if err := w.JoinError(w.Joins); err != nil {
			fmt.Fprintf(c.Output, "error: %v\n", err)
			return errors.New("exit status 1")
		}
	}
	args := "--container-runtime-endpoint=unix:///run/containerd/containerd.sock"
	given := kubeletArgs(w.T, conf)
	through := given["kubeconfig"] != ""
	if through {
		args = ""
	}
	for _, k := range slices.Sorted(maps.Keys(given)) {
		args += " --" + k + "=" + given[k]
	}
	args = strings.TrimSpace(args)
	if err := errors.Join(write(ondisk.KubeletConfig, "kind: KubeletConfiguration\n"), write(member.KubeadmFlags, "KUBELET_KUBEADM_ARGS=\""+args+"\"\n")); err != nil {
		return err
	}
	w.Units[ondisk.UnitKubelet], w.Heard, w.joinConf, w.Unregistered = "active", w.Now, conf, true
	if through {
		w.podConf = conf
		if err := w.Effect("kubeadm ends"); err != nil {
			return err
		}
		if err := os.Remove(filepath.Join(w.Root, member.BootstrapConf)); err != nil {
			return err
		}
		// Through yurthub.
		conn, err := w.dialHub(ctx)
		if err != nil || w.Cluster.hubTrouble(true) {
			fmt.Fprintf(c.Output, "error: error execution phase kubelet-start: error uploading crisocket: %v\n", err)
			return errors.New("exit status 1")
		}
		w.Cluster.Mu.Lock()
		defer w.Cluster.Mu.Unlock()
		w.Cluster.Nodes[name].Metadata.Annotations = map[string]string{socketAnnotation: ondisk.CRISocket}
		return conn.Close()
	}
	cl, err := disc.Cluster()
	if err != nil {
		return err
	}
	dated := member.KubeletPKI + "/kubelet-client-2026-11-20-10-00-00.pem"
	if err := write(dated, w.Cluster.Client("system:node:"+name, w.Truth().AddDate(1, 0, 0))); err != nil {
		return err
	}
	if err := os.Symlink(dated, filepath.Join(w.Root, member.ClientCert)); err != nil {
		return err
	}
	kc, err := api.NewKubeconfig(api.Cluster{Server: cl.Server, CAData: cl.CAData}, api.User{CertFile: member.ClientCert, KeyFile: member.ClientCert})
	if err != nil {
		return err
	}
	if err := write(ondisk.KubeletConf, string(kc)); err != nil {
		return err
	}
	w.Cluster.Register(name, conf, strings.TrimSpace(w.Get("/etc/machine-id")))
	if err := w.Effect("kubeadm ends"); err != nil {
		return err
	}
	return os.Remove(filepath.Join(w.Root, member.BootstrapConf))
}

// kubeletArgs are the flags of kubelet in a JoinConfiguration of either
// version.
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

const OwnEndpoint = "apiserver.cluster.local:6443"

const OwnDev = "/dev/vda2"

func (w *World) SlotSite(dev string) string {
	w.T.Helper()
	c, err := slot.Read(w.Slots[dev])
	if err != nil {
		w.T.Fatal(err)
	}
	return string(c.Files[ondisk.SlotSite])
}
