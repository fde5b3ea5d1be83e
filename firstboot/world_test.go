//go:debug tlsmlkem=0

package firstboot

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"math/big"
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
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/openyurt"
	"github.com/edgebake/edgebake/test/disktest"
)

const (
	testToken  = "abcdef.0123456789abcdef"
	testSecret = "0123456789abcdef"
)

// world is a machine and its cluster, both made up: a directory, slots in
// memory, and API servers on loopback. Every effect is counted, and the
// machine can lose its power before any of them.
type world struct {
	t         *testing.T
	root      string
	sole      bool // its sites name one master alone
	slots     map[string]*memDevice
	slotFiles map[string]string // beside the slot's own
	slotReads []string          // devices of which more than the label was read
	readOnly  map[string]bool
	units     map[string]string
	started   map[string]time.Time
	stepped   map[string]time.Duration // by which the clock was set since, by unit
	// loaded is what daemons read when they started last, by unit: they use it,
	// whatever their files are by now.
	loaded map[string]string
	// zone are names with their addresses, which DNS tells but for deadDNS, a server
	// that answers nobody.
	zone    map[string]string
	deadDNS string
	console []string
	log     bytes.Buffer
	posted  [][]byte
	proxies []string // that reports went through
	now     time.Time
	wrong   time.Duration // by which the machine's clock is ahead of the cluster's
	// clockAsked counts how often systemd was asked for the boot's clock.
	clockAsked uint64
	deadlines  map[time.Time]time.Time
	randoms    byte
	cluster    *fakeCluster
	// joins counts kubeadm's runs; joinError, if set, is what it says.
	joins     int
	joinError func(n int) error
	source    netip.Addr
	hub       listener
	offline   bool
	heard     time.Time // when kubelet was last active
	// unregistered: kubelet has not registered its Node since it started. It does so
	// once in its life: a Node that is deleted later stays away until it starts again.
	unregistered bool
	cabled       bool                // offline, with an address and a route all the same
	uuids        map[string][16]byte // of file systems, by device
	used         int64               // bytes of /var, of 4 GiB, besides snapshots of etcd
	// kubelet is what it says of its version; podConf is the JoinConfiguration
	// of a kubelet that goes through yurthub.
	kubelet, podConf string
	joinConf         string // of the last join
	// kubeletBroken: behind yurthub it runs, and does not get through.
	kubeletBroken bool
	noNFT         bool   // it is not installed
	badArg        string // kubelet does not come up with it
	refusals      int    // so many times kubelet's health port is not there yet
	crashLoop     bool   // with badArg kubelet says that it is well, and ends soon after
	kubeletSays   listener
	rules         string // that nft has loaded
	locked        map[string]bool
	deafKubelet   bool // its unit does not read kubeadm-flags.env
	// link reports whether the settings in place make a network; nil: they do.
	link   func() bool
	linkMu sync.Mutex // several connections are tried at once
	synced bool
	// answers reports whether a time server has set the clock; nil: synced tells.
	answers func() bool

	// On a control-plane node: the phases of kubeadm init, connections that are
	// not the cluster's, and what first boot listens on.
	init    func(machine.Cmd) error
	ctrRun  func(machine.Cmd) error
	dials   func(ctx context.Context, addr string) (net.Conn, error, bool)
	listens func(addr string) (net.Listener, error)
	// refuses is what is wrong by now with a way of those connections to the API
	// servers, if it is one.
	refuses func(addr string) (err error, ours bool)

	boots int // how often the power came on after the first time

	mu      sync.Mutex
	effects int
	names   []string
	cutAt   int // the effect that does not happen any more; 0: none
	// unsynced are files that programs wrote and nobody has synced.
	unsynced map[string]bool
	cut      bool
	off      context.CancelFunc
	before   func(effect string) // what somebody does meanwhile
	// patience ends a run that waits forever.
	patience time.Duration
}

// worldStart is when a world begins.
var worldStart = time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)

// truth is the time that the cluster has.
func (w *world) truth() time.Time { return w.now.Add(-w.wrong) }

// clockSays gives the machine another idea of what time it is.
func (w *world) clockSays(now time.Time) {
	w.wrong += now.Sub(w.now)
	w.now = now
}

var errPower = errors.New("the power is gone")

func newWorld(t *testing.T, files string, names ...string) *world {
	t.Helper()
	w := &world{
		t: t, root: disktest.Scratch(t), units: map[string]string{}, started: map[string]time.Time{}, loaded: map[string]string{},
		slots: map[string]*memDevice{}, unsynced: map[string]bool{}, deadlines: map[time.Time]time.Time{},
		now: worldStart, source: netip.MustParseAddr("192.0.2.50"),
		cluster: newFakeCluster(t, names...), patience: 6 * time.Minute, kubelet: "Kubernetes v1.36.3\n",
	}
	w.cluster.of(w)
	a, err := txtar.ParseFile(files)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range a.Files {
		name, target, link := strings.Cut(f.Name, " -> ")
		p := filepath.Join(w.root, name)
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

// of makes it the cluster that a machine is in.
func (c *fakeCluster) of(w *world) {
	c.renewed, c.silent, c.now, c.registers = w.kubeletReported, w.kubeletSilent, w.truth, func() { w.kubeletRegisters(c) }
	c.wrong = func(addr string) error {
		if err := w.unreachable(); err != nil {
			return err
		}
		if w.refuses != nil {
			if err, ours := w.refuses(addr); ours {
				return err
			}
		}
		return c.refuses(addr)
	}
}

// unreachable is what is wrong with the network.
func (w *world) unreachable() error {
	if w.offline || !w.linked() {
		return errors.New("network is unreachable")
	}
	return nil
}

// linked reports whether the settings in place make a network.
func (w *world) linked() bool {
	w.linkMu.Lock()
	defer w.linkMu.Unlock()
	return w.link == nil || w.link()
}

// kubeletReported is when kubelet last reached the cluster.
func (w *world) kubeletReported() time.Time {
	flags, _ := os.ReadFile(filepath.Join(w.root, member.KubeadmFlags))
	if w.units[ondisk.UnitKubelet] != "active" || w.kubeletBroken && strings.Contains(string(flags), openyurt.KubeletConf) {
		return time.Time{}
	}
	return w.now
}

// kubeletRegisters is what kubelet does first when it reaches the cluster: through
// ipvscare, and with its own certificate. c.mu is held.
func (w *world) kubeletRegisters(c *fakeCluster) {
	if !w.unregistered || w.kubeletReported().IsZero() || w.unreachable() != nil || c.down[ownEndpoint] || c.elsewhere[ownEndpoint] != nil {
		return
	}
	cert, err := member.KubeletCert(w.env())
	if now := w.truth(); err != nil || now.After(cert.NotAfter) || now.Before(cert.NotBefore) || cert.CheckSignatureFrom(c.ca) != nil {
		return
	}
	name := strings.TrimPrefix(cert.Subject.CommonName, "system:node:")
	c.add(name, w.joinConf, strings.TrimSpace(w.get("/etc/machine-id")))
	w.unregistered = c.nodes[name] == nil
}

// kubeletSilent: after 40 s the cluster takes a Node for lost.
func (w *world) kubeletSilent(machineID string) bool {
	own, _ := os.ReadFile(filepath.Join(w.root, "etc/machine-id"))
	if w.units[ondisk.UnitKubelet] == "active" {
		w.heard = w.now
	}
	return machineID == strings.TrimSpace(string(own)) && w.now.Sub(w.heard) > 40*time.Second
}

// site returns the site of the tests, with lines added or taken away.
func (w *world) site(lines ...string) string {
	return strings.Join(append([]string{
		"apiVersion: edgebake.io/v1alpha1", "kind: Site",
		"masters: [" + w.masters() + "]",
		"caCertHashes: ['" + w.cluster.pin + "']",
		"nodeName: edge-{{.Serial}}",
	}, lines...), "\n") + "\n"
}

const withToken = "credentials: {token: " + testToken + "}"

// stamp puts a site into a slot.
func (w *world) stamp(dev, site string) {
	w.t.Helper()
	var text []byte
	if site != "" {
		text = []byte(site)
	}
	// As a slot is made that cannot be read: the same bytes as Make's, and not
	// 16 MiB for each.
	d := blankDevice(ondisk.SlotSize)
	if err := slot.Scrub(d, ondisk.SlotInfo{Version: 1, Plan: "plan", Stamped: 1767000000}, text); err != nil {
		w.t.Fatal(err)
	}
	w.slots[dev] = d
}

// slotOf makes a slot: the same bytes as slot.Make's, and not 16 MiB for each.
func (w *world) slotOf(c slot.Contents) *memDevice {
	w.t.Helper()
	d := blankDevice(ondisk.SlotSize)
	if err := slot.Rewrite(d, c); err != nil {
		w.t.Fatal(err)
	}
	return d
}

// oneMaster has the site name one master alone, where it is not about them:
// whatever asks a cluster asks all of its masters at once.
func (w *world) oneMaster() {
	w.t.Helper()
	w.stamp(ownDev, strings.Replace(w.slotSite(ownDev), w.masters(), "192.0.2.11:6443", 1))
	w.sole = true
}

func (w *world) masters() string {
	if w.sole {
		return "192.0.2.11:6443"
	}
	return "192.0.2.11:6443, 192.0.2.12:6443, 192.0.2.13:6443"
}

// effect is where the power may go: the n-th one and all after it do nothing.
func (w *world) effect(name string) error {
	if w.before != nil {
		w.before(name)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cut {
		return errPower
	}
	w.effects++
	w.names = append(w.names, name)
	if w.cutAt != 0 && w.effects >= w.cutAt {
		w.cut = true
		w.off()
		return errPower
	}
	return nil
}

// boot runs first boot until it is done, fails for good, or waits too long.
func (w *world) boot() error {
	return w.run(New(w.env()))
}

func (w *world) run(r *run.Runner) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	w.off, w.cut = cancel, false
	left := w.patience
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

// sleep passes time that is made up: a deadline counts from when it is first
// seen.
func (w *world) sleep(ctx context.Context, d time.Duration) error {
	w.now = w.now.Add(d)
	if w.answers != nil {
		w.answers()
	}
	if end, ok := ctx.Deadline(); ok {
		if w.deadlines[end].IsZero() {
			w.deadlines[end] = w.now.Add(time.Until(end) - d)
		}
		if w.now.After(w.deadlines[end]) {
			return context.DeadlineExceeded
		}
	}
	return ctx.Err()
}

// powerOn is the next boot: what was in memory is gone.
func (w *world) powerOn() {
	w.t.Helper()
	if err := os.RemoveAll(filepath.Join(w.root, "run")); err != nil {
		w.t.Fatal(err)
	}
	for u := range w.units {
		w.units[u] = "inactive"
	}
	w.startDaemons()
	if _, err := os.Stat(filepath.Join(w.root, ondisk.IPVSConfig)); err == nil {
		w.units[ondisk.UnitIPVSCare] = w.ipvscare()
	}
	w.rules = ""
	if w.has(hub.PortsUnitFile) && !w.noNFT {
		w.rules = w.get(hub.NFTFile)
	}
	if _, err := os.Stat(filepath.Join(w.root, hub.EnvFile)); err == nil && w.rules != "" {
		w.units[openyurt.Unit] = "active"
		w.hubStarts()
	}
	// As kubelet.service has it.
	if b, err := os.ReadFile(filepath.Join(w.root, ondisk.KubeletConfig)); err == nil && len(b) > 0 && (w.has(site.AppliedFile) || !w.has(ondisk.SiteCopy)) && !(w.has(hub.PortsKubelet) && w.noNFT) {
		w.units[ondisk.UnitKubelet] = "active"
		w.started[ondisk.UnitKubelet] = w.now
		w.unregistered = true
	}
	name, err := os.ReadFile(filepath.Join(w.root, "etc/hostname"))
	if err != nil {
		name = []byte("localhost\n")
	}
	w.put("/proc/sys/kernel/hostname", string(name))
	w.boots++
	w.stepped = nil
	w.put("/proc/sys/kernel/random/boot_id", fmt.Sprintf("boot-%d\n", w.boots))
	w.cutAt, w.effects, w.names, w.console, w.cut = 0, 0, nil, nil, false
	if err := member.RestoreCertificates(w.env()); err != nil { // a unit of its own, before kubelet
		w.t.Fatal(err)
	}
	w.effects, w.names = 0, nil
}

// setClock moves the machine's clock while its units run.
func (w *world) setClock(by time.Duration) {
	if w.stepped == nil {
		w.stepped = map[string]time.Duration{}
	}
	w.clockSays(w.now.Add(by))
	for unit := range w.started {
		w.started[unit] = w.started[unit].Add(by)
		w.stepped[unit] += by
	}
}

// puts is put by a program that does not sync.
func (w *world) puts(path, data string) {
	w.put(path, data)
	if target, err := os.Readlink(filepath.Join(w.root, path)); err == nil && filepath.IsAbs(target) {
		path = target // where it was written to
	}
	if !strings.HasPrefix(path, ondisk.RunDir+"/") {
		w.unsynced[path] = true
	}
}

// ipvscare is the state of its unit: the start is not over as long as it serves nobody.
func (w *world) ipvscare() string {
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	if w.cluster.down[ownEndpoint] {
		return "activating"
	}
	return "active"
}

// lose takes from the disk what was not synced, as delayed allocation does:
// the names are there, and nothing in them.
func (w *world) lose() {
	w.t.Helper()
	for p := range w.unsynced {
		if w.has(p) {
			if err := os.Truncate(filepath.Join(w.root, p), 0); err != nil {
				w.t.Fatal(err)
			}
		}
	}
	clear(w.unsynced)
}

func (w *world) put(path, data string) {
	w.t.Helper()
	p := w.inside(path)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(data), 0o644); err != nil {
		w.t.Fatal(err)
	}
}

// inside follows an absolute link in the machine, not on this host.
func (w *world) inside(path string) string {
	p := filepath.Join(w.root, path)
	if target, err := os.Readlink(p); err == nil && filepath.IsAbs(target) {
		return filepath.Join(w.root, target)
	}
	return p
}

func (w *world) get(path string) string {
	w.t.Helper()
	b, err := os.ReadFile(w.inside(path))
	if err != nil {
		w.t.Fatal(err)
	}
	return string(b)
}

// bytesBelow are those of a directory's files.
func (w *world) bytesBelow(dir string) (n int64) {
	entries, _ := os.ReadDir(filepath.Join(w.root, dir)) // none, where it is missing
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			n += info.Size()
		}
	}
	return n
}

func (w *world) has(path string) bool {
	_, err := os.Lstat(filepath.Join(w.root, path))
	return err == nil
}

func (w *world) state() *ondisk.State {
	w.t.Helper()
	s, err := run.LoadState(w.root)
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

func (w *world) said(words string) bool {
	return slices.ContainsFunc(w.console, func(l string) bool { return strings.Contains(l, words) })
}

func (w *world) env() *machine.Env {
	e := &machine.Env{
		Root: w.root,
		Log:  slog.New(slog.NewTextHandler(&w.log, nil)),
		Clock: machine.Clock{
			Now: func() time.Time { return w.now },
			Sleep: func(ctx context.Context, d time.Duration) error {
				return w.sleep(ctx, d)
			},
			SetClock: func(t time.Time) error {
				if err := w.effect("clock"); err != nil {
					return err
				}
				w.clockSays(t)
				return nil
			},
			ClockSynced: func(context.Context) (bool, error) {
				if w.answers != nil {
					return w.answers(), nil
				}
				return w.synced, nil
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
					w.t.Errorf("%s is written without %s", p, ondisk.HostsLock)
				}
				if err := w.effect("write " + p); err != nil {
					return err
				}
				full := filepath.Join(w.root, p)
				if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
					return err
				}
				if err := os.RemoveAll(full); err != nil { // never through a link
					return err
				}
				delete(w.unsynced, p)
				err := makeFile(full, b, uint32(o.Mode.Perm()))
				if err == nil && os.Geteuid() == 0 {
					err = os.Chown(full, o.UID, o.GID)
				}
				return err
			},
			Stream: func(p string, o machine.Owner, write func(io.Writer) error) error {
				if err := w.effect("stream " + p); err != nil {
					return err
				}
				full := filepath.Join(w.root, p)
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
				if err := w.effect("rename " + from); err != nil {
					return err
				}
				full := filepath.Join(w.root, to)
				return errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.Rename(filepath.Join(w.root, from), full))
			},
			Symlink: func(target, p string) error {
				if err := w.effect("symlink " + p); err != nil {
					return err
				}
				full := filepath.Join(w.root, p)
				return errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.RemoveAll(full), os.Symlink(target, full))
			},
			Link: func(target, p string) error {
				if err := w.effect("link " + p); err != nil {
					return err
				}
				full := filepath.Join(w.root, p)
				delete(w.unsynced, p)
				if w.unsynced[target] {
					w.unsynced[p] = true
				}
				return errors.Join(os.MkdirAll(filepath.Dir(full), 0o755), os.RemoveAll(full), os.Link(filepath.Join(w.root, target), full))
			},
			Mkdir: func(p string, o machine.Owner) error {
				if err := w.effect("mkdir " + p); err != nil {
					return err
				}
				full := filepath.Join(w.root, p)
				return errors.Join(os.MkdirAll(full, 0o755), os.Chmod(full, o.Mode))
			},
			Remove: func(p string) error {
				if !w.has(p) {
					return nil
				}
				if err := w.effect("remove " + p); err != nil {
					return err
				}
				err := os.Remove(filepath.Join(w.root, p))
				if errors.Is(err, fs.ErrExist) {
					return nil // a directory that is not empty stays
				}
				return err
			},
			RemoveAll: func(p string) error {
				if !w.has(p) {
					return nil
				}
				if err := w.effect("remove all of " + p); err != nil {
					return err
				}
				return os.RemoveAll(filepath.Join(w.root, p))
			},
			Sync: func(paths ...string) error {
				if err := w.effect("sync"); err != nil {
					return err
				}
				for _, p := range paths {
					if _, err := os.Stat(filepath.Join(w.root, p)); err != nil && p != "/var" && p != "/etc" {
						return err
					}
				}
				clear(w.unsynced) // with the file system that all are on
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
			Run: w.exec,
			Unit: func(_ context.Context, verb, unit string) error {
				if err := w.effect(strings.TrimSpace(verb + " " + unit)); err != nil {
					return err
				}
				if daemon(unit) {
					return w.turnDaemon(verb, unit)
				}
				switch verb {
				case "start", "restart":
					if unit == ondisk.UnitKubelet && (verb == "restart" || w.units[unit] != "active") {
						w.unregistered = true
					}
					if unit == ondisk.UnitKubelet && w.has(hub.PortsKubelet) {
						if w.noNFT {
							return errors.New("the control process exited with error code")
						}
						w.rules = w.get(hub.NFTFile)
					}
					w.units[unit] = "active"
					w.started[unit] = w.now
					delete(w.stepped, unit)
					if unit == ondisk.UnitIPVSCare {
						if w.units[unit] = w.ipvscare(); w.units[unit] != "active" {
							return errors.New("its start timed out")
						}
					}
					if unit == openyurt.Unit {
						w.hubStarts()
					}
				case "stop":
					w.units[unit] = "inactive"
				}
				return nil
			},
			UnitState: func(_ context.Context, unit string) (string, error) {
				if s, ok := w.units[unit]; ok {
					return s, nil
				}
				return "inactive", nil
			},
			UnitSince: func(_ context.Context, unit string) (machine.UnitStart, error) {
				if unit == ondisk.UnitKubelet && w.crashLoop && strings.Contains(w.get(member.KubeadmFlags), w.badArg) {
					at := w.now.Add(-9 * time.Second)
					return machine.UnitStart{Now: at, Then: at}, nil
				}
				return machine.UnitStart{Now: w.started[unit], Then: w.started[unit].Add(-w.stepped[unit])}, nil
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
				if err := w.effect("hostname " + name); err != nil {
					return err
				}
				w.put("/proc/sys/kernel/hostname", name+"\n")
				return nil
			},
			SetFirmwareVar: func(path string, value []byte) error {
				if !w.has(filepath.Dir(path)) {
					return errors.ErrUnsupported
				}
				if err := w.effect("firmware"); err != nil {
					return err
				}
				w.put(path, "\a\x00\x00\x00"+string(value))
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
				if w.dials != nil {
					if conn, err, ours := w.dials(ctx, addr); ours {
						return conn, err
					}
				}
				if host, port, err := net.SplitHostPort(addr); err == nil && w.zone[host] != "" {
					ip, err := w.lookup(host)
					if err != nil {
						return nil, err
					}
					addr = net.JoinHostPort(ip.String(), port)
				}
				return w.cluster.dial(ctx, addr)
			},
			Listen: func(_ context.Context, addr string) (net.Listener, error) { return w.listens(addr) },
			Source: func(context.Context, string) (netip.Addr, error) {
				if w.offline && !w.cabled || !w.linked() {
					return netip.Addr{}, errors.New("network is unreachable")
				}
				return w.source, nil
			},
			Resolve: func(_ context.Context, host string) ([]netip.Addr, error) {
				a, err := w.lookup(host)
				return []netip.Addr{a}, err
			},
			Post: func(_ context.Context, url, _ string, body []byte, proxy []string) error {
				w.mu.Lock()
				w.proxies = append(w.proxies, proxy...)
				w.posted = append(w.posted, body)
				w.mu.Unlock()
				return nil
			},
		},
		Slots: machine.Slots{
			SlotLabel: func(dev string) (string, error) {
				d, ok := w.slots[dev]
				if !ok {
					return "", fs.ErrNotExist
				}
				return slot.Label(d)
			},
			ReadSlot: func(dev string) (*slot.Contents, error) {
				w.slotReads = append(w.slotReads, dev)
				d, ok := w.slots[dev]
				if !ok {
					return nil, fs.ErrNotExist
				}
				return slot.Read(d)
			},
			SlotFile: func(dev, name string, to io.Writer) error {
				text, ok := w.slotFiles[dev+"/"+name]
				if !ok {
					return fs.ErrNotExist
				}
				_, err := io.WriteString(to, text)
				return err
			},
			WriteSlot: func(dev string, c *slot.Contents) error {
				if err := w.effect("blank " + dev); err != nil {
					return err
				}
				return slot.Rewrite(&cutDevice{memDevice: w.slots[dev], effect: func() error { return w.effect("write slot " + dev) }}, *c)
			},
			ReadClaims: func(dev string) ([]slot.Claim, error) {
				d, ok := w.slots[dev]
				if !ok {
					return nil, fs.ErrNotExist
				}
				return slot.ReadClaims(d)
			},
			WriteClaim: func(dev string, c slot.Claim) error {
				d, ok := w.slots[dev]
				if !ok {
					return fs.ErrNotExist
				}
				if w.readOnly[dev] {
					return syscall.EROFS
				}
				return slot.WriteClaim(&cutDevice{memDevice: d, effect: func() error { return w.effect("claim " + dev) }}, c)
			},
			ScrubSlot: func(dev string, info ondisk.SlotInfo, site []byte, secrets []string) error {
				return w.writeSlot(dev, func(d *memDevice) error { return slot.Scrub(d, info, site, secrets...) })
			},
			ReportSlot: func(dev string, text, json []byte) error {
				if err := w.effect("report " + dev); err != nil {
					return err
				}
				d, ok := w.slots[dev]
				if !ok {
					return fmt.Errorf("there is no slot %s", dev)
				}
				return slot.WriteReport(d, slot.Report{Text: text, JSON: json})
			},
		},
		FileSystems: machine.FileSystems{
			FSUUID: func(dev string) ([16]byte, error) {
				if u, ok := w.uuids[dev]; ok {
					return u, nil
				}
				return [16]byte{}, errors.New("no device")
			},
			FSSize: func(string) (int64, error) { return 4 << 30, nil },
			FSFree: func(string) (int64, error) { return 4<<30 - w.used - w.bytesBelow(member.SnapshotDir), nil },
		},
		Audience: machine.Audience{
			Console: func(line string) { w.console = append(w.console, line) },
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
func (w *world) writeSlot(dev string, write func(*memDevice) error) error {
	if err := w.effect("blank " + dev); err != nil {
		return err
	}
	before := w.slots[dev].clone()
	if _, err := w.slots[dev].WriteAt(make([]byte, 512), 0); err != nil {
		return err
	}
	if err := w.effect("write slot " + dev); err != nil {
		return err
	}
	w.slots[dev] = before
	return write(before)
}

// hubStarts is yurthub writing what it keeps between its starts, and again what
// power that went has left empty.
func (w *world) hubStarts() {
	write := func(path, text string) {
		if !w.has(path) || w.get(path) == "" {
			w.put(path, text)
		}
	}
	for _, p := range openyurt.Identities() {
		if filepath.Ext(p) == ".conf" {
			write(p, "kind: Config\n")
		} else if !w.has(p) || w.has(p+"/kept") {
			write(p+"/kept", "by yurthub\n")
		}
	}
}

// dialHub reaches yurthub's health port while its unit runs.
func (w *world) dialHub(ctx context.Context) (net.Conn, error) {
	// A static pod runs while kubelet does.
	if w.units[openyurt.Unit] != "active" && !(w.has(openyurt.Manifest) && w.units[ondisk.UnitKubelet] == "active") {
		return nil, errors.New("connection refused")
	}
	if w.has(openyurt.Manifest) && !w.has(openyurt.Identity) && !w.enrolHub() {
		return nil, errors.New("connection refused") // nothing listens without certificates
	}
	if w.hub.backlog == nil {
		w.hub = serve(w.t, &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
			if w.cluster.hubTrouble(w.has(openyurt.Manifest)) {
				http.Error(rw, "error: caches not synced", http.StatusInternalServerError)
				return
			}
			fmt.Fprint(rw, "OK")
		})})
	}
	return w.hub.dial(ctx, openyurt.Health)
}

const kubeletHealth = "127.0.0.1:10248"

// dialKubelet reaches kubelet's health port while it runs with arguments that
// it takes.
func (w *world) dialKubelet(ctx context.Context) (net.Conn, error) {
	bad := w.badArg != "" && strings.Contains(w.get(member.KubeadmFlags), w.badArg)
	bad = bad && !w.crashLoop
	if w.refusals > 0 {
		w.refusals--
		bad = true
	}
	if w.units[ondisk.UnitKubelet] != "active" || bad {
		return nil, errors.New("connection refused")
	}
	if w.kubeletSays.backlog == nil {
		w.kubeletSays = serve(w.t, &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprint(rw, "ok") })})
	}
	return w.kubeletSays.dial(ctx, kubeletHealth)
}

// enrolHub is yurthub as a static pod asking for its identity with the token,
// and the kubelet behind it that registers its Node then.
func (w *world) enrolHub() bool {
	if w.cluster.clientCSR != "" {
		return false
	}
	boot, err := api.ParseKubeconfig([]byte(w.get(member.HubBootstrap)))
	if err != nil {
		w.t.Fatal(err)
	}
	u, err := boot.User()
	if err != nil || u.Token != testToken {
		w.t.Fatalf("yurthub's token is %q, %v", u.Token, err)
	}
	cl, err := boot.Cluster()
	if err != nil {
		w.t.Fatal(err)
	}
	name := nodeNameOf(w.podConf)
	pem := openyurt.Root + "/pki/yurthub-current.pem"
	w.puts(pem, w.cluster.client("system:node:"+name, w.truth().AddDate(1, 0, 0)))
	kc, err := api.NewKubeconfig(api.Cluster{Server: cl.Server, CAData: cl.CAData}, api.User{CertFile: pem, KeyFile: pem})
	if err != nil {
		w.t.Fatal(err)
	}
	w.puts(openyurt.Identity, string(kc))
	w.cluster.register(name, w.podConf, strings.TrimSpace(w.get("/etc/machine-id")))
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

// exec plays the programs.
func (w *world) exec(ctx context.Context, c machine.Cmd) error {
	name := strings.Join(c.Args, " ")
	if err := w.effect("run " + name); err != nil {
		return err
	}
	switch {
	case name == "ipvscare clean":
		if !w.has(ondisk.IPVSConfig) {
			break
		}
		if err := json.Unmarshal([]byte(w.get(ondisk.IPVSConfig)), new(ondisk.IPVS)); err != nil {
			return fmt.Errorf("reading %s: %w", ondisk.IPVSConfig, err)
		}
	case name == "kubelet --version":
		_, err := io.WriteString(c.Output, w.kubelet)
		return err
	case name == openyurt.Program+" --version":
		said := w.get(openyurt.Program)
		if said == "for another processor" {
			return errors.New("exec format error")
		}
		_, err := io.WriteString(c.Output, said)
		return err
	case strings.HasPrefix(name, "systemctl show --property MainPID"):
		conf := ondisk.KubeletConf
		if strings.Contains(w.get(member.KubeadmFlags), openyurt.KubeletConf) && !w.deafKubelet {
			conf = openyurt.KubeletConf
		}
		w.put("/proc/700/cmdline", "/usr/bin/kubelet\x00--kubeconfig="+ondisk.KubeletConf+"\x00--kubeconfig="+conf+"\x00")
		_, err := io.WriteString(c.Output, "700\n")
		return err
	case strings.HasPrefix(name, "ip link delete "):
		return os.Remove(filepath.Join(w.root, "/sys/class/net", c.Args[3])) // fails where something is below it
	case strings.HasPrefix(name, "nft ") && w.noNFT:
		return errors.New(`exec: "nft": executable file not found in $PATH`)
	case strings.HasPrefix(name, "nft -f "):
		w.rules = w.get(c.Args[2])
	case strings.HasPrefix(name, "nft delete table "):
		w.rules = ""
	case strings.HasPrefix(name, "nft list table "):
		if w.rules == "" {
			return errors.New("No such file or directory")
		}
		_, err := io.WriteString(c.Output, w.rules)
		return err
	case strings.HasPrefix(name, "kubeadm join"):
		return w.kubeadm(ctx, c)
	case strings.HasPrefix(name, "ctr --namespace k8s.io run "):
		return w.ctrRun(c)
	case strings.HasPrefix(name, "kubeadm init phase "):
		return w.init(c)
	}
	return nil
}

// kubeadm does what kubeadm join and the kubelet it starts do to the disk,
// with the power going at any of their files.
func (w *world) kubeadm(ctx context.Context, c machine.Cmd) error {
	w.joins++
	conf := w.get(c.Args[3])
	for _, f := range []string{ondisk.KubeletConf, ondisk.KubeletConfig, member.BootstrapRun, ondisk.KubeCA} {
		ignored := strings.Contains(conf, "FileAvailable-"+strings.ReplaceAll(f, "/", "-"))
		if w.has(f) && !ignored {
			return fmt.Errorf("[ERROR FileAvailable-%s]: %s already exists", strings.ReplaceAll(f, "/", "-"), f)
		}
	}
	disc, err := api.ParseKubeconfig([]byte(w.get(member.DiscoveryFile)))
	if err != nil {
		return err
	}
	u, err := disc.User()
	if err != nil {
		return err
	}
	write := func(p, data string) error {
		if err := w.effect("kubeadm writes " + p); err != nil {
			return err
		}
		if t, err := os.Readlink(filepath.Join(w.root, p)); err == nil {
			p = t
		}
		w.puts(p, data)
		return nil
	}
	name := nodeNameOf(conf)
	if err := write(member.BootstrapConf, "token: "+u.Token); err != nil {
		return err
	}
	fmt.Fprintf(c.Output, "[preflight] Running pre-flight checks\n[kubelet-start] token %s\n", u.Token)
	if w.joinError != nil {
		if err := w.joinError(w.joins); err != nil {
			fmt.Fprintf(c.Output, "error: %v\n", err)
			return errors.New("exit status 1")
		}
	}
	args := "--container-runtime-endpoint=unix:///run/containerd/containerd.sock"
	given := kubeletArgs(w.t, conf)
	through := given["kubeconfig"] != ""
	if through {
		args = ""
		for _, k := range slices.Sorted(maps.Keys(given)) {
			args += " --" + k + "=" + given[k]
		}
		args = strings.TrimSpace(args)
	}
	if err := errors.Join(write(ondisk.KubeletConfig, "kind: KubeletConfiguration\n"), write(member.KubeadmFlags, "KUBELET_KUBEADM_ARGS=\""+args+"\"\n")); err != nil {
		return err
	}
	w.units[ondisk.UnitKubelet], w.heard, w.joinConf, w.unregistered = "active", w.now, conf, true
	if through {
		w.podConf = conf
		if err := w.effect("kubeadm ends"); err != nil {
			return err
		}
		if err := os.Remove(filepath.Join(w.root, member.BootstrapConf)); err != nil {
			return err
		}
		// Through yurthub.
		conn, err := w.dialHub(ctx)
		if err != nil || w.cluster.hubTrouble(true) {
			fmt.Fprintf(c.Output, "error: error execution phase kubelet-start: error uploading crisocket: %v\n", err)
			return errors.New("exit status 1")
		}
		w.cluster.mu.Lock()
		defer w.cluster.mu.Unlock()
		w.cluster.nodes[name].Metadata.Annotations = map[string]string{hub.SocketAnnotation: ondisk.CRISocket}
		return conn.Close()
	}
	cl, err := disc.Cluster()
	if err != nil {
		return err
	}
	dated := member.KubeletPKI + "/kubelet-client-2026-11-20-10-00-00.pem"
	if err := write(dated, w.cluster.client("system:node:"+name, w.truth().AddDate(1, 0, 0))); err != nil {
		return err
	}
	if err := os.Symlink(dated, filepath.Join(w.root, member.ClientCert)); err != nil {
		return err
	}
	kc, err := api.NewKubeconfig(api.Cluster{Server: cl.Server, CAData: cl.CAData}, api.User{CertFile: member.ClientCert, KeyFile: member.ClientCert})
	if err != nil {
		return err
	}
	if err := write(ondisk.KubeletConf, string(kc)); err != nil {
		return err
	}
	w.cluster.register(name, conf, strings.TrimSpace(w.get("/etc/machine-id")))
	if err := w.effect("kubeadm ends"); err != nil {
		return err
	}
	return os.Remove(filepath.Join(w.root, member.BootstrapConf))
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

// fakeCluster is a CA and API servers that all answer alike.
type fakeCluster struct {
	t      *testing.T
	ca     *x509.Certificate
	key    crypto.Signer
	pem    []byte
	pin    string
	names  []string // in its API servers' certificate
	tls    *tls.Config
	server listener
	issued *sync.Map        // certificates of clients; clones share it
	now    func() time.Time // its clock

	mu   sync.Mutex
	down map[string]bool
	// elsewhere are addresses of this network that belong to other clusters.
	elsewhere map[string]*fakeCluster
	unsigned  bool
	revoked   bool
	// ready, if set, is the status of /readyz, e.g. while it starts.
	ready int
	// serviceCIDRs and serviceSubnet are its service ranges, by object and as
	// kubeadm noted them; services are Services by address.
	serviceCIDRs  []string
	serviceSubnet string
	services      map[string]string
	noSelector    bool // it knows no field selector for addresses
	// knownOnly: it answers nobody who does not say who he is, as an
	// AuthenticationConfiguration for the health paths alone has it.
	knownOnly bool
	nodes     map[string]*api.Node
	notReady  bool
	// csr is the state of yurthub's request: Approved, Denied or pending; or
	// those of several, the oldest first, with ", " between.
	csr string
	// clientCSR is that of the one it makes with the token; "": approved.
	clientCSR string
	// revive: a Node that was there turns Ready with its kubelet.
	revive bool
	noRBAC bool
	// noPool: there is no NodePool; poolType is its type, "": Edge.
	noPool   bool
	poolType string
	// refusesNode: a webhook lets nobody make a Node.
	refusesNode bool
	// labelsKept: a webhook lets nobody change a Node's labels.
	labelsKept bool
	pools      string // version of NodePools that is served
	noWebhook  bool   // that turns NodePools from one version into another
	requests   []string
	// noService: nodes may not read Services, as where their authorizer is off.
	noService bool
	// births counts how often it was born again with its keys.
	births int
	// beside are further CAs that cluster-info has, PEM.
	beside []byte
	// made counts the Nodes of each name that were registered.
	made map[string]int
	// changed: cluster-info has another kubeconfig, and still the former one's signature.
	changed bool
	// unpublished: there is no cluster-info yet.
	unpublished bool
	objects     []string // that were created
	// applied are the paths of objects that were applied; marked says that
	// somebody has noted that all are. webhookDown refuses one of them.
	applied     []string
	marked      bool
	webhookDown bool
	// marker is what is noted of each of them; noNotes refuses more of that.
	marker     map[string]string
	markerMode string
	noNotes    bool
	// configs are what kubeadm has uploaded, annotations those of kubeadm-config.
	configs, annotations map[string]string
	summary              string // what kubelet of m2 says of its machine
	// created are the paths of objects that are there or were created.
	created []string
	// dns are the paths of CoreDNS' objects that are there, deleted those that were.
	dns, deleted []string
	rules        []string // in kube-public, that were created
	// lease is when kubelet last renewed the lease of its Node.
	lease func() string
	// renewed is when kubelet last reported.
	renewed func() time.Time
	// silent reports whether that machine's kubelet has been off for a while.
	silent func(machineID string) bool
	// twin is the machine that the Node shows now, if another one reports as it too.
	twin func(own string) string
	// registers has kubelet of this machine register its Node, if it is to. mu is held.
	registers func()
	// wrong is what is wrong by now with the way from the machine to that address.
	wrong func(addr string) error
}

// newFakeCluster makes one whose certificate has kubernetes and names.
func newFakeCluster(t *testing.T, names ...string) *fakeCluster {
	ca, key := newCA(t, "kubernetes")
	return newFakeClusterOf(t, ca, key, names...)
}

// newFakeClusterOf makes one with that CA.
func newFakeClusterOf(t *testing.T, ca *x509.Certificate, key crypto.Signer, names ...string) *fakeCluster {
	c := &fakeCluster{t: t, issued: new(sync.Map), down: map[string]bool{}, nodes: map[string]*api.Node{}, pools: "v1beta2", ca: ca, key: key,
		names: append([]string{"kubernetes", "192.0.2.11", "192.0.2.12"}, names...), now: func() time.Time { return worldStart }}
	c.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.ca.Raw})
	c.pin = api.Pin(c.ca)
	pool := x509.NewCertPool()
	pool.AddCert(c.ca)
	c.tls = &tls.Config{ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: pool}
	c.serve(t)
	return c
}

func (c *fakeCluster) serve(t *testing.T) {
	conf := c.tls.Clone()
	shown(conf, func() time.Time { return c.now() }, func(from, until time.Time) tls.Certificate {
		return issueFor(c.t, c.ca, c.key, "kube-apiserver", c.names, from, until)
	})
	c.server = serve(t, &http.Server{
		Handler: c, TLSConfig: conf, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){}, // HTTP/1 will do
	})
}

// shown gives a server a certificate of a year by its own clock, renewed when half of
// it is over.
func shown(conf *tls.Config, now func() time.Time, issue func(from, until time.Time) tls.Certificate) {
	var mu sync.Mutex
	var cert tls.Certificate
	conf.Time = now
	conf.SessionTicketsDisabled = true // they are made when nobody waits for the server
	conf.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		mu.Lock()
		defer mu.Unlock()
		if now := now(); cert.Leaf == nil || now.AddDate(0, 6, 0).After(cert.Leaf.NotAfter) {
			cert = issue(now.Add(-backdate), now.AddDate(1, 0, 0))
		}
		c := cert
		return &c, nil
	}
}

// issueFor makes a certificate with which servers and clients of these names prove
// themselves.
func issueFor(t *testing.T, ca *x509.Certificate, key crypto.Signer, cn string, names []string, from, until time.Time) tls.Certificate {
	tmpl := &x509.Certificate{
		Subject: pkix.Name{CommonName: cn}, NotBefore: from, NotAfter: until,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			tmpl.IPAddresses = append(tmpl.IPAddresses, ip)
		} else {
			tmpl.DNSNames = append(tmpl.DNSNames, name)
		}
	}
	return issue(t, ca, key, tmpl)
}

// backdate is how long before it is made a certificate of kubeadm or of the
// controller manager begins.
const backdate = 5 * time.Minute

// newCA makes one of Ed25519, as issue makes keys: half of what machines that are
// booted by the thousand do is handshakes, and these are the cheapest.
func newCA(t *testing.T, name string) (*x509.Certificate, crypto.Signer) {
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: worldStart.Add(-time.Hour), NotAfter: worldStart.AddDate(10, 0, 0),
		KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, public, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}

// issue makes a certificate; who asks says for which time.
func issue(t *testing.T, ca *x509.Certificate, caKey crypto.Signer, tmpl *x509.Certificate) tls.Certificate {
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if tmpl.NotBefore.IsZero() || tmpl.NotAfter.IsZero() {
		t.Fatalf("%s is valid from %s to %s", tmpl.Subject, tmpl.NotBefore, tmpl.NotAfter)
	}
	tmpl.SerialNumber = big.NewInt(2)
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca, public, caKey)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

// client makes kubelet's certificate and key, PEM in one file.
func (c *fakeCluster) client(cn string, until time.Time) string {
	from := c.now().Add(-backdate)
	if until.Before(from) { // it has expired
		from = until.AddDate(-1, 0, 0)
	}
	return c.clientFrom(cn, from, until)
}

// clientFrom issues the same to who asks again: what a machine does is the same
// each time, to the byte.
func (c *fakeCluster) clientFrom(cn string, from, until time.Time) string {
	pair, _ := c.issued.LoadOrStore(fmt.Sprint(cn, from, until), sync.OnceValue(func() string { return c.newPair(cn, from, until) }))
	return pair.(func() string)()
}

func (c *fakeCluster) newPair(cn string, from, until time.Time) string {
	return pairPEM(c.t, issue(c.t, c.ca, c.key, &x509.Certificate{
		Subject:     pkix.Name{CommonName: cn, Organization: []string{"system:nodes"}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, NotBefore: from, NotAfter: until,
	}))
}

// pairPEM is a certificate and its key, in one text.
func pairPEM(t *testing.T, cert tls.Certificate) string {
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]})) +
		string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}))
}

// request makes a certificate request.
func (c *fakeCluster) request(cn string, names ...string) []byte {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: cn}, DNSNames: names}, c.key)
	if err != nil {
		c.t.Error(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

func (c *fakeCluster) dial(ctx context.Context, addr string) (net.Conn, error) {
	c.mu.Lock()
	other := c.elsewhere[addr]
	c.mu.Unlock()
	if other != nil {
		return other.dial(ctx, addr)
	}
	if err := c.refuses(addr); err != nil {
		return nil, err
	}
	return c.server.dial(ctx, addr)
}

// refuses is what is wrong with an address that is not elsewhere.
func (c *fakeCluster) refuses(addr string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.elsewhere[addr] != nil {
		return errors.New("connection reset by peer") // it was not, when it was reached
	}
	if c.down[addr] {
		return errors.New("connection refused")
	}
	if !strings.HasPrefix(addr, "192.0.2.") && !strings.HasPrefix(addr, "apiserver.cluster.local:") {
		return fmt.Errorf("no route to %s", addr)
	}
	return nil
}

// register is kubelet's first POST.
func (c *fakeCluster) register(name, joinConf, machineID string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.add(name, joinConf, machineID)
}

// add is register. c.mu is held.
func (c *fakeCluster) add(name, joinConf, machineID string) {
	if n := c.nodes[name]; n != nil {
		if c.revive {
			n.Status.Conditions[0].Status = "True"
			n.Status.NodeInfo.MachineID = machineID // kubelet's first report
		}
		return // it keeps its labels
	}
	if c.refusesNode {
		return
	}
	n := &api.Node{}
	n.Metadata.Name, n.Metadata.UID = name, fmt.Sprint("node-", c.births)
	if c.made == nil {
		c.made = map[string]int{}
	}
	if c.made[n.Metadata.UID+name]++; c.made[n.Metadata.UID+name] > 1 {
		n.Metadata.UID += fmt.Sprint("-", c.made[n.Metadata.UID+name])
	}
	n.Status.NodeInfo.MachineID = machineID
	n.Metadata.Labels = map[string]string{}
	for pair := range strings.SplitSeq(kubeletArgs(c.t, joinConf)["node-labels"], ",") {
		if k, v, ok := strings.Cut(pair, "="); ok {
			n.Metadata.Labels[k] = v
		}
	}
	n.Status.Conditions = []api.Condition{{Type: "Ready", Status: "True"}}
	c.nodes[name] = n
}

// hubTrouble reports whether yurthub lacks something of the cluster.
func (c *fakeCluster) hubTrouble(before17 bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	pools := "v1beta2"
	if before17 {
		pools = "v1beta1"
	}
	return c.noRBAC || c.pools != pools || c.noWebhook || strings.HasSuffix(c.csr, "pending") || strings.HasSuffix(c.csr, "Denied")
}

func (c *fakeCluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if c.wrong != nil {
		keptAlive(r, c.wrong)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests = append(c.requests, r.URL.Path)
	answer := func(v any) {
		if err := json.NewEncoder(w).Encode(v); err != nil {
			c.t.Error(err)
		}
	}
	auth := r.Header.Get("Authorization")
	if auth != "" && (auth != "Bearer "+testToken || c.revoked) {
		http.Error(w, `{"message":"Unauthorized"}`, http.StatusUnauthorized)
		return
	}
	if c.knownOnly && auth == "" && len(r.TLS.PeerCertificates) == 0 {
		http.Error(w, `{"message":"Unauthorized"}`, http.StatusUnauthorized)
		return
	}
	switch {
	case r.URL.Path == "/readyz" && c.ready != 0:
		http.Error(w, "[-]informer-sync failed", c.ready)
	case r.URL.Path == "/readyz":
		answer("ok")
	case r.URL.Path == "/api/v1":
		answer(map[string]any{"resources": []any{map[string]any{"name": "secrets", "kind": "Secret", "namespaced": true},
			map[string]any{"name": "configmaps", "kind": "ConfigMap", "namespaced": true}, map[string]any{"name": "namespaces", "kind": "Namespace"},
			map[string]any{"name": "namespaces/status", "kind": "Namespace"}}})
	case r.Header.Get("Content-Type") == "application/apply-patch+yaml":
		switch {
		case r.Method != http.MethodPatch || r.URL.RawQuery != "force=true&fieldManager=edgebake":
			c.t.Errorf("applied by %s %s", r.Method, r.URL)
		case strings.HasPrefix(r.URL.Path, "/api/v1/namespaces/shop/") && !slices.Contains(c.applied, "/api/v1/namespaces/shop"):
			http.Error(w, `{"message":"namespaces \"shop\" not found"}`, http.StatusNotFound)
		case strings.HasSuffix(r.URL.Path, "/late") && c.webhookDown:
			http.Error(w, `{"message":"failed calling webhook"}`, http.StatusInternalServerError)
		default:
			c.applied = append(c.applied, r.URL.Path)
			answer(map[string]any{})
		}
	case r.Method == http.MethodPost && (r.URL.Path == "/api/v1/namespaces" || r.URL.Path == "/api/v1/namespaces/default/configmaps" || r.URL.Path == "/api/v1/namespaces/shop/configmaps"):
		var made struct{ Metadata struct{ Name string } }
		if err := json.NewDecoder(r.Body).Decode(&made); err != nil {
			c.t.Error(err)
		}
		path := r.URL.Path + "/" + made.Metadata.Name
		if slices.Contains(c.created, path) {
			http.Error(w, `{"message":"already exists"}`, http.StatusConflict)
			return
		}
		c.created = append(c.created, path)
		w.WriteHeader(http.StatusCreated)
		answer(map[string]any{})
	case slices.Contains(c.dns, r.URL.Path) && r.Method == http.MethodDelete:
		c.deleted = append(c.deleted, r.URL.Path)
		c.dns = slices.DeleteFunc(c.dns, func(p string) bool { return p == r.URL.Path })
		answer(map[string]any{})
	case slices.Contains(c.dns, r.URL.Path):
		answer(map[string]any{})
	case r.URL.Path == controlplane.AppliedMarkerPath && c.marker == nil && !c.marked:
		http.NotFound(w, r)
	case r.URL.Path == controlplane.AppliedMarkerPath && r.Method == http.MethodPatch:
		var patch struct {
			Metadata struct{ Labels map[string]*string }
			Data     map[string]string
		}
		if err := json.NewDecoder(r.Body).Decode(&patch); err != nil {
			c.t.Error(err)
		}
		if c.noNotes {
			http.Error(w, `{"message":"failed calling webhook of ConfigMaps"}`, http.StatusInternalServerError)
			return
		}
		maps.Copy(c.marker, patch.Data)
		if to, ok := patch.Metadata.Labels[controlplane.ApplyingLabel]; ok && to == nil {
			c.marked = true
		}
		answer(map[string]any{})
	case r.URL.Path == controlplane.AppliedMarkerPath && r.Method == http.MethodGet:
		labels := map[string]string{}
		if !c.marked {
			labels[controlplane.ApplyingLabel] = cmp.Or(c.markerMode, "true")
		}
		answer(map[string]any{"metadata": map[string]any{"labels": labels}, "data": c.marker})
	case r.URL.Path == "/api/v1/namespaces/kube-system/configmaps" && r.Method == http.MethodPost:
		var made struct {
			Metadata struct{ Labels map[string]string }
			Data     map[string]string
		}
		if err := json.NewDecoder(r.Body).Decode(&made); err != nil || made.Metadata.Labels[controlplane.ApplyingLabel] == "" {
			c.t.Errorf("the marker says at once that all is applied (%v)", err)
		}
		if c.marker != nil || c.marked {
			http.Error(w, `{"message":"already exists"}`, http.StatusConflict)
			return
		}
		c.marker, c.markerMode = made.Data, made.Metadata.Labels[controlplane.ApplyingLabel]
		w.WriteHeader(http.StatusCreated)
		answer(map[string]any{})
	case r.URL.Path == "/api/v1/namespaces/kube-system/secrets" && r.Method == http.MethodPost:
		b, err := io.ReadAll(r.Body)
		if err != nil {
			c.t.Error(err)
		}
		if slices.Contains(c.objects, string(b)) {
			http.Error(w, `{"message":"already exists"}`, http.StatusConflict)
			return
		}
		c.objects = append(c.objects, string(b))
		w.WriteHeader(http.StatusCreated)
		answer(map[string]any{})
	case r.URL.Path == "/apis/rbac.authorization.k8s.io/v1":
		answer(map[string]any{"resources": []any{map[string]any{"name": "roles", "kind": "Role", "namespaced": true}, map[string]any{"name": "rolebindings", "kind": "RoleBinding", "namespaced": true}}})
	case strings.HasPrefix(r.URL.Path, "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-public/role") && r.Method == http.MethodPost:
		if slices.Contains(c.rules, r.URL.Path) {
			http.Error(w, `{"message":"already exists"}`, http.StatusConflict)
			return
		}
		c.rules = append(c.rules, r.URL.Path)
		w.WriteHeader(http.StatusCreated)
		answer(map[string]any{})
	case r.URL.Path == "/api/v1/namespaces/kube-public/configmaps/cluster-info" && c.unpublished:
		http.NotFound(w, r)
	case r.URL.Path == "/api/v1/namespaces/kube-public/configmaps/cluster-info" && r.Method == http.MethodPatch:
		var patch struct{ Data map[string]*string }
		if err := json.NewDecoder(r.Body).Decode(&patch); err != nil {
			c.t.Error(err)
		}
		if signature, changed := patch.Data["jws-kubeconfig-abcdef"]; !changed || signature != nil {
			c.t.Error("the signature of the former kubeconfig stays")
		}
		c.pem = trustedBy(c.t, *patch.Data["kubeconfig"])
		answer(map[string]any{})
	case r.URL.Path == "/api/v1/namespaces/kube-public/configmaps/cluster-info":
		kc := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters:\n- name: \"\"\n  cluster:\n    server: https://192.0.2.11:6443\n    certificate-authority-data: %s\n", base64.StdEncoding.EncodeToString(slices.Concat(c.beside, c.pem)))
		data := map[string]string{"kubeconfig": kc}
		if !c.unsigned && !c.revoked {
			text := kc
			if c.changed {
				text = "the former one"
			}
			data["jws-kubeconfig-abcdef"] = sign(text, "abcdef", testSecret)
		}
		answer(map[string]any{"metadata": map[string]string{"uid": fmt.Sprint("info-", c.births)}, "data": data})
	case r.URL.Path == "/api/v1/namespaces/default/services/kubernetes" && !c.noService:
		answer(map[string]any{"metadata": map[string]string{"uid": fmt.Sprint("service-", c.births)}})
	case r.URL.Path == "/apis/networking.k8s.io/v1/servicecidrs" && c.serviceCIDRs != nil:
		answer(map[string]any{"items": []any{map[string]any{"spec": map[string]any{"cidrs": c.serviceCIDRs}}}})
	case r.URL.Path == "/apis/networking.k8s.io/v1/servicecidrs":
		http.Error(w, `{"message":"forbidden"}`, http.StatusForbidden)
	case r.URL.Path == "/api/v1/nodes/m2/proxy/stats/summary" && c.summary != "":
		answer(json.RawMessage(c.summary))
	case r.URL.Path == controlplane.ProxyConfigMap && c.configs["config.conf"] != "":
		answer(map[string]any{"data": map[string]string{"config.conf": c.configs["config.conf"]}})
	case (r.URL.Path == controlplane.KubeadmConfigMap || r.URL.Path == controlplane.KubeletConfigMap) && c.configs != nil:
		if r.Method == http.MethodPatch {
			var patch struct {
				Metadata struct{ Annotations map[string]*string }
			}
			if err := json.NewDecoder(r.Body).Decode(&patch); err != nil || r.URL.Path != controlplane.KubeadmConfigMap {
				c.t.Errorf("%s is changed (%v)", r.URL.Path, err)
			}
			if c.noNotes && patch.Metadata.Annotations[controlplane.DocumentsKey] != nil {
				http.Error(w, `{"message":"etcd is busy"}`, http.StatusServiceUnavailable)
				return
			}
			for key, value := range patch.Metadata.Annotations {
				if delete(c.annotations, key); value != nil {
					c.annotations[key] = *value
				}
			}
		}
		if r.URL.Path == controlplane.KubeletConfigMap {
			answer(map[string]any{"data": map[string]string{"kubelet": c.configs["kubelet"]}})
			return
		}
		answer(map[string]any{"metadata": map[string]any{"annotations": c.annotations}, "data": map[string]string{"ClusterConfiguration": c.configs["ClusterConfiguration"]}})
	case r.URL.Path == "/api/v1/namespaces/kube-system/configmaps/kubeadm-config" && c.serviceSubnet != "":
		answer(map[string]any{"data": map[string]string{"ClusterConfiguration": "kind: ClusterConfiguration\nnetworking:\n  serviceSubnet: " + c.serviceSubnet + "\n"}})
	case r.URL.Path == "/api/v1/services":
		selector, selected := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "spec.clusterIP=")
		if selected && c.noSelector {
			http.Error(w, `{"message":"field label not supported: spec.clusterIP"}`, http.StatusBadRequest)
			return
		}
		var items []any
		for _, ips := range slices.Sorted(maps.Keys(c.services)) {
			all := strings.Split(ips, ",")
			if selected && all[0] != selector {
				continue
			}
			items = append(items, map[string]any{
				"metadata": map[string]any{"namespace": "shop", "name": c.services[ips]},
				"spec":     map[string]any{"clusterIP": all[0], "clusterIPs": all},
			})
		}
		if r.URL.Query().Get("continue") == "" && !selected { // the first page holds none of them
			answer(map[string]any{"metadata": map[string]any{"continue": "a+b"}, "items": []any{}})
			return
		}
		answer(map[string]any{"items": items})
	case r.URL.Path == "/version":
		answer(map[string]string{"gitVersion": "v1.36.3"})
	case strings.HasPrefix(r.URL.Path, "/apis/certificates.k8s.io/"):
		signer := strings.TrimPrefix(r.URL.Query().Get("fieldSelector"), "spec.signerName=")
		name, user, state, request := "csr-hub01", "system:node:edge-sn0042", c.csr, c.request("system:node:edge-sn0042", "kubernetes", "kubernetes.default")
		if signer == "kubernetes.io/kube-apiserver-client" {
			name, user, state, request = "csr-hub00", "system:bootstrap:abcdef", c.clientCSR, c.request("system:node:edge-sn0042")
		}
		var items []any
		for i, state := range strings.Split(state, ", ") {
			if i > 0 {
				name += "-again"
			}
			item := map[string]any{
				"metadata": map[string]any{"name": name, "creationTimestamp": fmt.Sprintf("2026-11-20T10:00:%02dZ", i)},
				"spec":     map[string]any{"username": user, "signerName": signer, "request": request},
			}
			if state != "" && state != "pending" {
				item["status"] = map[string]any{"conditions": []any{map[string]any{"type": state, "message": "said by the approver"}}}
			}
			items = append(items, item)
		}
		// Kubelet's own is none of yurthub's, and the last page is not the first.
		own := map[string]any{
			"metadata": map[string]any{"name": "csr-kubelet", "creationTimestamp": "2026-11-20T11:00:00Z"},
			"spec":     map[string]any{"username": user, "signerName": signer, "request": c.request("system:node:edge-sn0042-other", "edge-sn0042")},
		}
		if r.URL.Query().Get("continue") == "" {
			answer(map[string]any{"metadata": map[string]any{"continue": "more"}, "items": []any{own}})
			return
		}
		answer(map[string]any{"items": items})
	case strings.HasSuffix(r.URL.Path, "/configmaps"), strings.HasSuffix(r.URL.Path, "/nodepools"):
		if c.noRBAC {
			http.Error(w, `{"message":"forbidden"}`, http.StatusForbidden)
			return
		}
		if strings.HasSuffix(r.URL.Path, "/nodepools") && r.URL.Path != "/apis/apps.openyurt.io/"+c.pools+"/nodepools" {
			http.NotFound(w, r)
			return
		}
		if c.noWebhook && strings.HasSuffix(r.URL.Path, "/nodepools") {
			http.Error(w, `{"message":"conversion webhook for apps.openyurt.io/v1beta1, Kind=NodePool failed"}`, http.StatusInternalServerError)
			return
		}
		if strings.HasSuffix(r.URL.Path, "/nodepools") && !c.noPool {
			answer(map[string]any{"items": []any{map[string]any{"spec": map[string]any{"type": cmp.Or(c.poolType, "Edge")}}}})
			return
		}
		answer(map[string]any{})
	case strings.HasPrefix(r.URL.Path, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/"):
		renewed := "2026-11-20T09:00:00.000000Z"
		if c.lease != nil {
			renewed = c.lease()
		}
		answer(map[string]any{"spec": map[string]any{"renewTime": renewed}})
	case strings.HasPrefix(r.URL.Path, "/api/v1/nodes/"):
		if c.registers != nil {
			c.registers()
		}
		n := c.nodes[strings.TrimPrefix(r.URL.Path, "/api/v1/nodes/")]
		if n == nil {
			http.Error(w, `{"message":"not found"}`, http.StatusNotFound)
			return
		}
		if r.Method == http.MethodPatch && c.labelsKept {
			http.Error(w, `{"message":"admission webhook denied the request"}`, http.StatusForbidden)
			return
		}
		if r.Method == http.MethodPatch {
			var p struct {
				Metadata struct {
					Labels      map[string]*string `json:"labels"`
					Annotations map[string]string  `json:"annotations"`
				} `json:"metadata"`
			}
			if err := json.NewDecoder(r.Body).Decode(&p); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			if len(p.Metadata.Annotations) > 0 {
				n.Metadata.Annotations = p.Metadata.Annotations
			}
			for k, v := range p.Metadata.Labels {
				if v == nil {
					delete(n.Metadata.Labels, k)
				} else {
					n.Metadata.Labels[k] = *v
				}
			}
		}
		copied := *n
		if c.twin != nil {
			copied.Status.NodeInfo.MachineID = c.twin(copied.Status.NodeInfo.MachineID)
		}
		copied.Status.Conditions = slices.Clone(n.Status.Conditions)
		for i := range copied.Status.Conditions {
			copied.Status.Conditions[i].LastHeartbeatTime = c.renewed()
		}
		if c.silent(n.Status.NodeInfo.MachineID) && len(copied.Status.Conditions) > 0 {
			copied.Status.Conditions[0] = api.Condition{Type: "Ready", Status: "Unknown", Reason: "NodeStatusUnknown", Message: "Kubelet stopped posting node status."}
		}
		if c.notReady {
			copied.Status.Conditions = []api.Condition{{Type: "Ready", Status: "False", Reason: "KubeletNotReady", Message: "cni plugin not initialized"}}
		}
		answer(&copied)
	default:
		http.NotFound(w, r)
	}
}

func sign(payload, id, secret string) string {
	header := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"HS256","kid":"` + id + `"}`))
	m := hmac.New(sha256.New, []byte(secret))
	m.Write([]byte(header + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))))
	return header + ".." + base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}
