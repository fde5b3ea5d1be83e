package worldtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/openyurt"
)

// Env returns the machine as first boot sees it.
func (w *World) Env() *machine.Env {
	return &machine.Env{
		Root:        w.Root,
		Log:         slog.New(slog.NewTextHandler(&w.Log, nil)),
		Clock:       w.clock(),
		Randomness:  w.randomness(),
		Files:       w.files(),
		Programs:    w.programs(),
		Platform:    w.platform(),
		Network:     w.network(),
		Slots:       w.slots(),
		FileSystems: w.fileSystems(),
		Output:      w.output(),
	}
}

// clock returns the simulated clock.
func (w *World) clock() machine.Clock {
	return machine.Clock{
		Now:   func() time.Time { return w.Now },
		Sleep: w.Sleep,
		SetClock: func(t time.Time) error {
			if err := w.Effect("clock"); err != nil {
				return err
			}
			w.SetClock(t)
			return nil
		},
		ClockSynced: func(context.Context) (bool, error) {
			if w.TimeServerAnswers != nil {
				return w.TimeServerAnswers(), nil
			}
			return w.ClockSynced, nil
		},
	}
}

// randomness returns fixed numbers, so that tests are repeatable.
func (w *World) randomness() machine.Randomness {
	return machine.Randomness{
		Rand: func() float64 { return 0 },
		Random: func(n int) []byte {
			w.Randoms++
			return bytes.Repeat([]byte{w.Randoms}, n)
		},
	}
}

// files returns access to the files below Root. Each change is an effect.
func (w *World) files() machine.Files {
	return machine.Files{
		WriteFile: w.writeFile, Stream: w.stream, Rename: w.rename, Symlink: w.symlink, Link: w.link, Mkdir: w.mkdir,
		Remove: w.remove, RemoveAll: w.removeAll, Sync: w.sync, Lock: w.lock,
	}
}

// change counts the effect what on p, creates p's directory, and returns p's path on the host.
func (w *World) change(what, p string) (full string, err error) {
	if err := w.Effect(what); err != nil {
		return "", err
	}
	full = filepath.Join(w.Root, p)
	return full, os.MkdirAll(filepath.Dir(full), 0o755)
}

func (w *World) writeFile(p string, b []byte, o machine.Owner) error {
	if p == "/etc/hosts" && !w.locks[ondisk.HostsLock] {
		w.T.Errorf("%s is written without %s", p, ondisk.HostsLock)
	}
	full, err := w.change("write "+p, p)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(full); err != nil { // never through a link
		return err
	}
	delete(w.Unsynced, p)
	err = makeFile(full, b, uint32(o.Mode.Perm()))
	if err == nil && os.Geteuid() == 0 {
		err = os.Chown(full, o.UID, o.GID)
	}
	return err
}

func (w *World) stream(p string, o machine.Owner, write func(io.Writer) error) error {
	full, err := w.change("stream "+p, p)
	if err != nil {
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
}

func (w *World) rename(from, to string) error {
	full, err := w.change("rename "+from, to)
	if err != nil {
		return err
	}
	return os.Rename(filepath.Join(w.Root, from), full)
}

func (w *World) symlink(target, p string) error {
	full, err := w.change("symlink "+p, p)
	if err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(full), os.Symlink(target, full))
}

func (w *World) link(target, p string) error {
	full, err := w.change("link "+p, p)
	if err != nil {
		return err
	}
	delete(w.Unsynced, p)
	if w.Unsynced[target] {
		w.Unsynced[p] = true
	}
	return errors.Join(os.RemoveAll(full), os.Link(filepath.Join(w.Root, target), full))
}

func (w *World) mkdir(p string, o machine.Owner) error {
	full, err := w.change("mkdir "+p, p)
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(full, 0o755), os.Chmod(full, o.Mode))
}

func (w *World) remove(p string) error {
	if !w.Has(p) {
		return nil
	}
	full, err := w.change("remove "+p, p)
	if err != nil {
		return err
	}
	if err := os.Remove(full); !errors.Is(err, fs.ErrExist) { // a directory that is not empty stays
		return err
	}
	return nil
}

func (w *World) removeAll(p string) error {
	if !w.Has(p) {
		return nil
	}
	full, err := w.change("remove all of "+p, p)
	if err != nil {
		return err
	}
	return os.RemoveAll(full)
}

func (w *World) sync(paths ...string) error {
	if err := w.Effect("sync"); err != nil {
		return err
	}
	for _, p := range paths {
		if _, err := os.Stat(filepath.Join(w.Root, p)); err != nil && p != "/var" && p != "/etc" {
			return err
		}
	}
	clear(w.Unsynced) // all are on one file system
	return nil
}

func (w *World) lock(_ context.Context, path string) (func(), error) {
	if w.locks[path] {
		return nil, fmt.Errorf("%s: %w", path, machine.ErrLocked)
	}
	if w.locks == nil {
		w.locks = map[string]bool{}
	}
	w.locks[path] = true
	return func() { delete(w.locks, path) }, nil
}

// programs returns access to fake programs and units.
func (w *World) programs() machine.Programs {
	return machine.Programs{
		Run:  w.RunProgram,
		Unit: w.systemctl,
		UnitState: func(_ context.Context, unit string) (string, error) {
			if s, ok := w.Units[unit]; ok {
				return s, nil
			}
			return "inactive", nil
		},
		UnitSince: func(_ context.Context, unit string) (machine.UnitStart, error) {
			if unit == ondisk.UnitKubelet && w.CrashLoop && strings.Contains(w.Get(member.KubeadmFlags), w.RejectedKubeletArg) {
				at := w.Now.Add(-9 * time.Second)
				return machine.UnitStart{Now: at, Then: at}, nil
			}
			return machine.UnitStart{Now: w.Started[unit], Then: w.Started[unit].Add(-w.clockSteps[unit])}, nil
		},
		BootClock: func(context.Context) (ondisk.BootClock, error) {
			w.clockAsked++
			c := ondisk.BootClock{Userspace: 6_100_000, FirstBoot: 1_000_000 * w.clockAsked}
			if w.clockAsked > 1 {
				c.Finish = 24_000_000
			}
			return c, nil
		},
	}
}

// platform returns access to the host name and the firmware.
func (w *World) platform() machine.Platform {
	return machine.Platform{
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
	}
}

// network returns access to the cluster, and to the health ports of this machine.
func (w *World) network() machine.Network {
	return machine.Network{
		Dial:         w.dial,
		ProbeTimeout: time.Minute, // a busy computer must not fail a test
		Listen:       func(_ context.Context, addr string) (net.Listener, error) { return w.Listen(addr) },
		Source: func(context.Context, string) (netip.Addr, error) {
			if w.Offline && !w.HasRoute || !w.networkWorks() {
				return netip.Addr{}, errors.New("network is unreachable")
			}
			return w.NodeAddr, nil
		},
		Addresses: func() ([]machine.InterfaceAddr, error) {
			return append([]machine.InterfaceAddr{{Interface: "lo", Addr: netip.MustParseAddr("127.0.0.1")}, {Interface: "eth0", Addr: w.NodeAddr}}, w.ExtraAddrs...), nil
		},
		Resolve: func(_ context.Context, host string) ([]netip.Addr, error) {
			a, err := w.resolve(host)
			return []netip.Addr{a}, err
		},
		Post: func(_ context.Context, url, _ string, body []byte, proxy []string) error {
			w.Mu.Lock()
			w.ReportProxies = append(w.ReportProxies, proxy...)
			w.Reports = append(w.Reports, body)
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
	}
}

// slots returns access to the slots in memory.
func (w *World) slots() machine.Slots {
	return machine.Slots{
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
	}
}

// fileSystems returns file systems with sizes and UUIDs, but no contents.
func (w *World) fileSystems() machine.FileSystems {
	return machine.FileSystems{
		FSUUID: func(dev string) ([16]byte, error) {
			if u, ok := w.FSUUIDs[dev]; ok {
				return u, nil
			}
			return [16]byte{}, errors.New("no device")
		},
		FSSize: func(string) (int64, error) { return 4 << 30, nil },
		FSFree: func(string) (int64, error) { return 4<<30 - w.VarUsed - w.DirSize(member.SnapshotDir), nil },
		OpenDevice: func(string, bool) (machine.Device, error) {
			return nil, errors.New("this fake machine has no contents of partitions")
		},
	}
}

// output returns an Output that collects the console lines.
func (w *World) output() machine.Output {
	return machine.Output{
		Console: func(line string) { w.Console = append(w.Console, line) },
		Notify:  func(string) {},
	}
}

// systemctl starts or stops a unit.
func (w *World) systemctl(_ context.Context, verb, unit string) error {
	if err := w.Effect(strings.TrimSpace(verb + " " + unit)); err != nil {
		return err
	}
	if daemon(unit) {
		return w.controlDaemon(verb, unit)
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
			w.NFTRules = w.Get(hubNFT)
		}
		w.Units[unit] = "active"
		w.Started[unit] = w.Now
		delete(w.clockSteps, unit)
		if unit == ondisk.UnitIPVSCare {
			if w.Units[unit] = w.ipvscare(); w.Units[unit] != "active" {
				return errors.New("its start timed out")
			}
		}
		if unit == openyurt.Unit {
			w.startHub()
		}
	case "stop":
		w.Units[unit] = "inactive"
	}
	return nil
}

// dial connects to a health port of this machine or to the network.
func (w *World) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if addr == kubeletHealth {
		return w.dialKubelet(ctx)
	}
	if addr == openyurt.Health {
		return w.dialHub(ctx)
	}
	if err := w.networkError(); err != nil {
		return nil, err
	}
	if w.DialOther != nil {
		if conn, err, ours := w.DialOther(ctx, addr); ours {
			return conn, err
		}
	}
	if host, port, err := net.SplitHostPort(addr); err == nil && w.DNSRecords[host] != "" {
		ip, err := w.resolve(host)
		if err != nil {
			return nil, err
		}
		addr = net.JoinHostPort(ip.String(), port)
	}
	return w.Cluster.Dial(ctx, addr)
}
