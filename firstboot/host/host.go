// Package host is the one part of first boot that touches a machine: it makes
// the firstboot.Env of the system this program runs on. It decides nothing.
package host

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	mrand "math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/coreos/go-systemd/v22/dbus"
	"golang.org/x/net/http/httpproxy"
	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/slot"
	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/beneath"
	"github.com/edgebake/edgebake/firstboot/console"
)

// New makes the Env of this machine. The log goes to log, which systemd hands
// to the journal.
func New(log io.Writer) *firstboot.Env {
	dialer := &net.Dialer{Timeout: 10 * time.Second}
	f := Files{Root: "/"}
	return &firstboot.Env{
		Root:        "/",
		Log:         slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{ReplaceAttr: withoutTime})),
		Now:         time.Now,
		Sleep:       Sleep,
		Rand:        mrand.Float64,
		Random:      random,
		WriteFile:   f.WriteFile,
		Stream:      f.Stream,
		Rename:      f.Rename,
		Symlink:     f.Symlink,
		Link:        f.Link,
		Mkdir:       f.Mkdir,
		Remove:      f.Remove,
		RemoveAll:   f.RemoveAll,
		Lock:        f.Lock,
		Sync:        f.Sync,
		Run:         run,
		Unit:        unit,
		UnitState:   unitState,
		UnitSince:   unitSince,
		BootClock:   bootClock,
		SetHostname: func(name string) error { return unix.Sethostname([]byte(name)) },
		SetClock:    setClock,
		ClockSynced: clockSynced,
		Dial:        dialer.DialContext,
		Listen: func(ctx context.Context, addr string) (net.Listener, error) {
			return new(net.ListenConfig).Listen(ctx, "tcp", addr)
		},
		Source: source,
		Resolve: func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		},
		Post: func(ctx context.Context, url, ca string, body []byte, proxy []string) error {
			t := through(proxy)
			if err := trust(t, ca); err != nil {
				return fmt.Errorf("sending to %s: %w", url, err)
			}
			return post(ctx, http.Client{Transport: t}, url, body)
		},
		SetFirmwareVar: func(path string, value []byte) error { return setFirmwareVar(path, value) },
		SlotLabel:      slotLabel,
		ReadSlot:       readSlot,
		SlotFile:       slotFile,
		WriteSlot:      writeSlot,
		ReadClaims:     readClaims,
		WriteClaim:     writeClaim,
		ScrubSlot:      scrubSlot,
		ReportSlot:     reportSlot,
		FSUUID:         fsUUID,
		FSSize:         fsSize,
		Console:        func(line string) { console.Say(console.Active, "/dev", line) },
		Notify: func(state string) {
			// Without systemd there is nobody to tell, which is no error.
			_, _ = daemon.SdNotify(false, state)
		},
	}
}

// withoutTime leaves the time to the journal.
func withoutTime(groups []string, a slog.Attr) slog.Attr {
	if len(groups) == 0 && a.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return a
}

// Sleep waits for d or the end of ctx.
func Sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b) // never fails (Go 1.24)
	return b
}

// Files changes the files below Root so that a power cut leaves the old state
// or the new, and so that nobody who may write there too leads it elsewhere.
type Files struct{ Root string }

func (f Files) root() beneath.Root { return beneath.Root{Dir: f.Root} }

// WriteFile replaces a file at once, and makes missing parents.
func (f Files) WriteFile(path string, data []byte, o firstboot.Owner) error {
	return f.root().WriteFile(path, data, beneath.Owner(o))
}

// Stream is WriteFile for what write gives bit by bit.
func (f Files) Stream(path string, o firstboot.Owner, write func(io.Writer) error) error {
	return f.root().Stream(path, beneath.Owner(o), write)
}

// Rename moves a file or a directory to where nothing is.
func (f Files) Rename(from, to string) error { return f.root().Rename(from, to) }

// lockPatience is how long another program may hold a lock. All that is done
// under one is to read a file and replace it.
const lockPatience = 30 * time.Second

// Lock makes the file, which only root can open, if it is not there, and waits
// for the lock on it. The file stays: removing it would let two programs hold
// locks on two files of the same name.
func (f Files) Lock(ctx context.Context, path string) (release func(), err error) {
	p := filepath.Join(f.Root, path)
	if err := os.Mkdir(filepath.Dir(p), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	l, err := os.OpenFile(p, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, lockPatience)
	defer cancel()
	for {
		err := unix.Flock(int(l.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { l.Close() }, nil
		}
		if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
			if err = Sleep(ctx, 50*time.Millisecond); err == nil {
				continue
			}
		}
		l.Close()
		return nil, fmt.Errorf("locking %s, which another program holds: %w", p, err)
	}
}

// Symlink makes path a link to target, at once.
func (f Files) Symlink(target, path string) error { return f.root().Symlink(target, path) }

// Link makes path another name of target, at once.
func (f Files) Link(target, path string) error { return f.root().Link(target, path) }

// Mkdir makes a directory, or gives it its owner and permissions.
func (f Files) Mkdir(path string, o firstboot.Owner) error {
	return f.root().Mkdir(path, beneath.Owner(o))
}

// Remove removes a file, a link or an empty directory; a directory that is
// not empty stays, and nothing there is as good.
func (f Files) Remove(path string) error { return f.root().Remove(path) }

// RemoveAll removes a path and all below it.
func (f Files) RemoveAll(path string) error { return f.root().RemoveAll(path) }

// Sync has the kernel write out each path, and all of the file system it is
// on: what was renamed or made beside it, by whomever. An error of writing that
// the kernel met earlier is told here.
func (f Files) Sync(paths ...string) error {
	var errs []error
	synced := map[uint64]bool{}
	for _, path := range paths {
		errs = append(errs, syncPath(filepath.Join(f.Root, path), synced))
	}
	return errors.Join(errs...)
}

func syncPath(p string, synced map[uint64]bool) error {
	file, err := os.Open(p)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := file.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return fmt.Errorf("finding the file system of %s: %w", p, err)
	}
	if synced[st.Dev] {
		return nil
	}
	synced[st.Dev] = true
	if err := unix.Syncfs(int(file.Fd())); err != nil {
		return fmt.Errorf("syncing the file system of %s: %w", p, err)
	}
	return nil
}

// run runs a program. It dies with us: systemd kills the unit's processes,
// and a cut-off join is begun again.
func run(ctx context.Context, c firstboot.Cmd) error {
	cmd := exec.CommandContext(ctx, c.Args[0], c.Args[1:]...)
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Stdin = c.Stdin
	cmd.WaitDelay = 5 * time.Second
	var kept bytes.Buffer
	if c.Output != nil {
		cmd.Stdout, cmd.Stderr = c.Output, c.Output
	} else {
		cmd.Stdout, cmd.Stderr = &kept, &kept
	}
	err := cmd.Run()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		err = errors.Join(err, ctx.Err())
	}
	out := strings.TrimSpace(kept.String())
	if len(out) > 1000 {
		out = "…" + out[len(out)-1000:]
	}
	if out != "" {
		return fmt.Errorf("running %s: %w: %s", strings.Join(c.Args, " "), err, out)
	}
	return fmt.Errorf("running %s: %w", strings.Join(c.Args, " "), err)
}

// unit carries out a verb on a unit and waits for its job.
func unit(ctx context.Context, verb, name string) error {
	conn, err := dbus.NewSystemdConnectionContext(ctx)
	if err != nil {
		return fmt.Errorf("talking to systemd: %w", err)
	}
	defer conn.Close()
	done := make(chan string, 1)
	switch verb {
	case "daemon-reload":
		return conn.ReloadContext(ctx)
	case "enable":
		_, _, err = conn.EnableUnitFilesContext(ctx, []string{name}, false, true)
		return err
	case "disable":
		_, err = conn.DisableUnitFilesContext(ctx, []string{name}, false)
		return err
	case "start":
		_, err = conn.StartUnitContext(ctx, name, "replace", done)
	case "restart":
		_, err = conn.RestartUnitContext(ctx, name, "replace", done)
	case "try-restart":
		_, err = conn.TryRestartUnitContext(ctx, name, "replace", done)
	case "reload":
		_, err = conn.ReloadUnitContext(ctx, name, "replace", done)
	case "stop":
		if _, err = conn.StopUnitContext(ctx, name, "replace", done); unknownUnit(err) {
			return nil // what is not there does not run
		}
	default:
		return fmt.Errorf("BUG: unknown verb %q for unit %s", verb, name)
	}
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case result := <-done:
		if result != "done" && result != "skipped" {
			return fmt.Errorf("its job ended with %q; see `journalctl -u %s`", result, name)
		}
		return nil
	}
}

func unknownUnit(err error) bool {
	return err != nil && strings.Contains(err.Error(), "not loaded")
}

func unitState(ctx context.Context, name string) (string, error) {
	conn, err := dbus.NewSystemdConnectionContext(ctx)
	if err != nil {
		return "", fmt.Errorf("talking to systemd: %w", err)
	}
	defer conn.Close()
	units, err := conn.ListUnitsByNamesContext(ctx, []string{name})
	if err != nil {
		return "", fmt.Errorf("asking for the state of %s: %w", name, err)
	}
	i := slices.IndexFunc(units, func(u dbus.UnitStatus) bool { return u.Name == name })
	if i < 0 {
		return "inactive", nil
	}
	return units[i].ActiveState, nil
}

// unitSince goes by the clock that nobody sets, and translates.
func unitSince(ctx context.Context, name string) (time.Time, error) {
	conn, err := dbus.NewSystemdConnectionContext(ctx)
	if err != nil {
		return time.Time{}, fmt.Errorf("talking to systemd: %w", err)
	}
	defer conn.Close()
	p, err := conn.GetUnitPropertyContext(ctx, name, "ActiveEnterTimestampMonotonic")
	if err != nil {
		return time.Time{}, fmt.Errorf("asking when %s was started: %w", name, err)
	}
	usec, ok := p.Value.Value().(uint64)
	if !ok {
		return time.Time{}, fmt.Errorf("asking when %s was started: the answer is %s", name, p.Value)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return time.Time{}, fmt.Errorf("reading the clock: %w", err)
	}
	return time.Now().Add(time.Duration(usec)*time.Microsecond - time.Duration(now.Nano())), nil
}

func setClock(t time.Time) error {
	tv := unix.NsecToTimeval(t.UnixNano())
	return unix.Settimeofday(&tv)
}

// clockSynced asks the kernel, which every time client tells.
func clockSynced(context.Context) (bool, error) {
	var tx unix.Timex
	state, err := unix.Adjtimex(&tx)
	if err != nil {
		return false, fmt.Errorf("reading the state of the clock: %w", err)
	}
	return state != unix.TIME_ERROR, nil
}

// source is the address that the kernel would take on the way to addr;
// nothing is sent.
func source(ctx context.Context, addr string) (netip.Addr, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "udp", addr)
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	ap, err := netip.ParseAddrPort(conn.LocalAddr().String())
	if err != nil {
		return netip.Addr{}, err
	}
	return ap.Addr().Unmap().WithZone(""), nil
}

// errPlain refuses to send what a machine says of itself in the clear.
var errPlain = errors.New("only https is used")

// through is a transport by way of the proxy that these environment variables
// name. It ends with its connection: reports are few.
func through(env []string) *http.Transport {
	conf := httpproxy.Config{}
	for _, v := range env {
		switch name, value, _ := strings.Cut(v, "="); name {
		case "HTTP_PROXY":
			conf.HTTPProxy = value
		case "HTTPS_PROXY":
			conf.HTTPSProxy = value
		case "NO_PROXY":
			conf.NoProxy = value
		}
	}
	proxy := conf.ProxyFunc()
	return &http.Transport{
		Proxy:             func(r *http.Request) (*url.URL, error) { return proxy(r.URL) },
		ForceAttemptHTTP2: true, DisableKeepAlives: true,
	}
}

// trust has the transport take no authority but that one.
func trust(t *http.Transport, ca string) error {
	if ca == "" {
		return nil
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(ca)) {
		return errors.New("report.caCert is no certificate")
	}
	t.TLSClientConfig = &tls.Config{RootCAs: roots}
	return nil
}

func post(ctx context.Context, c http.Client, url string, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if req.URL.Scheme != "https" {
		return fmt.Errorf("sending to %s: %w", url, errPlain)
	}
	req.Header.Set("Content-Type", "application/json")
	c.Timeout = 10 * time.Second
	c.CheckRedirect = func(req *http.Request, via []*http.Request) error {
		if req.URL.Scheme != "https" {
			return errPlain
		}
		if len(via) >= 10 {
			return errors.New("it leads from one address to the next")
		}
		return nil
	}
	res, err := c.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode/100 != 2 {
		return fmt.Errorf("sending to %s: it answered %s", url, res.Status)
	}
	return nil
}

func slotLabel(device string) (string, error) {
	f, err := os.Open(device)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return slot.Label(f)
}

func readSlot(device string) (*slot.Contents, error) {
	f, err := os.Open(device)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return slot.Read(f)
}

func slotFile(device, name string, w io.Writer) error {
	f, err := os.Open(device)
	if err != nil {
		return err
	}
	defer f.Close()
	return slot.CopyFile(f, name, w)
}

func onSlot(device string, do func(f *os.File) error) error {
	f, err := os.OpenFile(device, os.O_RDWR|os.O_SYNC, 0)
	if err != nil {
		return err
	}
	return errors.Join(do(f), f.Close())
}

// sectorSize is the size of a device's logical sectors. A file has none, and
// gets the usual.
func sectorSize(f *os.File) int64 {
	n, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKSSZGET)
	if err != nil {
		return 512
	}
	return int64(n)
}

func writeSlot(device string, c *slot.Contents) error {
	return onSlot(device, func(f *os.File) error {
		own := *c
		own.Info.SectorSize = sectorSize(f)
		img, err := slot.Make(own)
		if err != nil {
			return err
		}
		return slot.Replace(f, img)
	})
}

func readClaims(device string) ([]slot.Claim, error) {
	f, err := os.Open(device)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return slot.ReadClaims(f)
}

func writeClaim(device string, c slot.Claim) error {
	return onSlot(device, func(f *os.File) error { return slot.WriteClaim(f, c) })
}

func scrubSlot(device string, info ondisk.SlotInfo, site []byte, secrets []string) error {
	return onSlot(device, func(f *os.File) error {
		info.SectorSize = sectorSize(f)
		return slot.Scrub(f, info, site, secrets...)
	})
}

func reportSlot(device string, text, json []byte) error {
	return onSlot(device, func(f *os.File) error {
		return slot.WriteReport(f, slot.Report{Text: text, JSON: json})
	})
}

// fsUUID reads s_uuid of an ext4 superblock (offset 0x68 of the block at
// 1024), if there is one (magic 0xEF53 at 0x38).
func fsUUID(device string) (u [16]byte, err error) {
	f, err := os.Open(device)
	if err != nil {
		return u, err
	}
	defer f.Close()
	sb := make([]byte, 1024)
	if _, err := f.ReadAt(sb, 1024); err != nil {
		return u, fmt.Errorf("reading the superblock of %s: %w", device, err)
	}
	if sb[0x38] != 0x53 || sb[0x39] != 0xef {
		return u, fmt.Errorf("reading the superblock of %s: not an ext4 file system", device)
	}
	copy(u[:], sb[0x68:])
	return u, nil
}

func fsSize(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, err
	}
	return int64(st.Blocks) * st.Bsize, nil
}

// Boot tells how long this machine has been up, and where that time went as
// far as the kernel and systemd know: "up for 24.1 s (kernel 4.0, initrd 2.1,
// system 18.0)".
func Boot(ctx context.Context) string {
	b, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return ""
	}
	up, _, _ := strings.Cut(string(b), " ")
	total, err := strconv.ParseFloat(up, 64)
	if err != nil {
		return ""
	}
	c, err := bootClock(ctx)
	if err != nil {
		return boot(total, 0, 0)
	}
	return boot(total, float64(c.InitRD)/1e6, float64(c.Userspace)/1e6)
}

// boot splits the seconds since the kernel started: until it ran the initrd,
// and until systemd was started; 0 where one is not known.
func boot(total, initrd, system float64) string {
	if initrd <= 0 || system < initrd || total < system {
		return fmt.Sprintf("up for %.1f s", total)
	}
	return fmt.Sprintf("up for %.1f s (kernel %.1f, initrd %.1f, system %.1f)", total, initrd, system-initrd, total-system)
}

// kernelReady is the second in which the kernel ran its first program; 0
// where its log no longer tells.
func kernelReady(kmsg string) float64 {
	// Without Go's poller, which would wait for the kernel's next word.
	fd, err := unix.Open(kmsg, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	record := make([]byte, 8192)
	for {
		n, err := unix.Read(fd, record)
		switch {
		case errors.Is(err, unix.EPIPE):
			// The kernel wrote over the one that was next.
		case err != nil || n == 0:
			return 0
		default:
			if at := initRecord(string(record[:n])); at > 0 {
				return at
			}
		}
	}
}

// initRecord reads the time off the record that tells of the first program:
// "6,339,5140900,-;Run /init as init process".
func initRecord(record string) float64 {
	head, text, _ := strings.Cut(record, ";")
	fields := strings.Split(head, ",")
	if len(fields) < 3 || !strings.HasPrefix(text, "Run /") || !strings.Contains(text, " as init process") {
		return 0
	}
	us, err := strconv.ParseFloat(fields[2], 64)
	if err != nil {
		return 0
	}
	return us / 1e6
}

// bootClock asks systemd when the parts of this boot began. It does not know of
// an initrd that has no systemd: then the kernel's log tells.
func bootClock(ctx context.Context) (ondisk.BootClock, error) {
	var c ondisk.BootClock
	conn, err := dbus.NewSystemdConnectionContext(ctx)
	if err != nil {
		return c, err
	}
	defer conn.Close()
	if err := readClock(conn.GetManagerProperty, &c); err != nil {
		return c, err
	}
	if c.InitRD == 0 {
		c.InitRD = uint64(kernelReady("/dev/kmsg") * 1e6)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return c, err
	}
	c.FirstBoot = uint64(now.Nano() / 1000)
	return c, nil
}

// readClock reads the manager's properties, which are printed like "@t 5140900".
func readClock(property func(string) (string, error), c *ondisk.BootClock) error {
	for name, to := range map[string]*uint64{
		"FirmwareTimestampMonotonic":  &c.Firmware,
		"LoaderTimestampMonotonic":    &c.Loader,
		"KernelTimestamp":             &c.Kernel,
		"InitRDTimestampMonotonic":    &c.InitRD,
		"UserspaceTimestampMonotonic": &c.Userspace,
		"FinishTimestampMonotonic":    &c.Finish,
	} {
		v, err := property(name)
		if err != nil {
			return fmt.Errorf("asking systemd for %s: %w", name, err)
		}
		if *to, err = strconv.ParseUint(strings.TrimPrefix(v, "@t "), 10, 64); err != nil {
			return fmt.Errorf("asking systemd for %s: it says %q", name, v)
		}
	}
	return nil
}
