package machine

import (
	"cmp"
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

	"github.com/edgebake/edgebake/firstboot/beneath"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// Env has everything that a phase may use, grouped by subject. It reads files below Root directly.
// All changes, waits and communication go through the funcs.
type Env struct {
	// Root is the directory at which all paths start: "/" on a node.
	Root string
	Log  *slog.Logger

	Clock
	Randomness
	Files
	Programs
	Platform
	Network
	Slots
	FileSystems
	Output

	// Pass is set by the runner. If it is nil, nothing is cached.
	Pass *Pass
}

// Clock is the machine's clock.
type Clock struct {
	Now   func() time.Time
	Sleep func(ctx context.Context, d time.Duration) error
	// SetClock sets the clock to t.
	SetClock func(t time.Time) error
	// ClockSynced reports whether the clock follows a time server.
	ClockSynced func(ctx context.Context) (bool, error)
}

// Randomness is a source of random numbers.
type Randomness struct {
	// Rand returns a number in [0,1).
	Rand func() float64
	// Random returns n unpredictable bytes.
	Random func(n int) []byte
}

// Files changes files below Root, at which all paths start.
type Files struct {
	// WriteFile replaces a file atomically, even if the power fails, and makes missing directories.
	WriteFile func(path string, data []byte, o Owner) error
	// Stream is like WriteFile, for contents that are too large for memory.
	Stream func(path string, o Owner, write func(io.Writer) error) error
	// Rename moves a file or a directory within a file system. It fails if to exists.
	Rename func(from, to string) error
	// Symlink and Link replace the file at path atomically, unless it is a directory.
	Symlink func(target, path string) error
	Link    func(target, path string) error
	Mkdir   func(path string, o Owner) error
	// Remove removes a file, a link or an empty directory. It is no error if the directory is not
	// empty or the path is missing.
	Remove func(path string) error
	// RemoveAll removes path and everything below it.
	RemoveAll func(path string) error
	// WriteTree makes dir, which must not exist, and below it the nodes that walk yields, with
	// their owners, devices, extended attributes and times. walk yields parents first.
	WriteTree func(ctx context.Context, dir string, blobs tree.Blobs, walk func(func(tree.Node) error) error) error
	// Sync syncs these files and directories, and the whole file systems that contain them.
	Sync func(paths ...string) error
	// Lock holds a flock(2) lock on a file owned by root until unlock is called. Other programs
	// lock the same file.
	Lock func(ctx context.Context, path string) (unlock func(), err error)
}

// UnitStart is the time at which a unit was started. The clock may have been set since.
type UnitStart struct {
	Now  time.Time // what the clock would have shown, if it had been set as it is now
	Then time.Time // what the clock showed
}

// Earlier returns the earlier of Now and Then, to compare with times of this boot. Compare times of
// earlier boots with Now: if the clock was behind at the start, Then may be before them.
func (s UnitStart) Earlier() time.Time {
	if s.Then.Before(s.Now) {
		return s.Then
	}
	return s.Now
}

// Programs runs programs, and controls systemd's units.
type Programs struct {
	// Run runs a program, and waits until it ends.
	Run func(ctx context.Context, c Cmd) error
	// Unit applies a systemctl verb to a unit and waits for its job: start, stop, restart,
	// try-restart, reload, enable, disable, daemon-reload (without a unit).
	Unit func(ctx context.Context, verb, unit string) error
	// UnitState returns the ActiveState of a unit: active, activating, inactive, failed.
	UnitState func(ctx context.Context, unit string) (string, error)
	// UnitSince returns when an active unit was started.
	UnitSince func(ctx context.Context, unit string) (UnitStart, error)
	// BootClock returns when the stages of this boot started. The result's FirstBoot is the current
	// time.
	BootClock func(ctx context.Context) (ondisk.BootClock, error)
}

// Platform changes settings of the kernel and the firmware.
type Platform struct {
	SetHostname func(name string) error
	// SetFirmwareVar sets a UEFI variable, which is kept when the disk is rewritten. Without UEFI
	// it returns ErrUnsupported.
	SetFirmwareVar func(path string, value []byte) error
}

// Network connects to other machines, and accepts their connections.
type Network struct {
	Dial kubeapi.DialFunc
	// ProbeTimeout limits the connection to one API server; 0: 4 seconds.
	ProbeTimeout time.Duration
	// Sessions keeps TLS sessions with API servers; nil: none is kept.
	Sessions *kubeapi.Sessions
	// Listen accepts connections at one of this machine's own addresses.
	Listen func(ctx context.Context, addr string) (net.Listener, error)
	// Source returns the address from which the node sends packets to addr ("host:port").
	Source func(ctx context.Context, addr string) (netip.Addr, error)
	// Addresses returns the addresses of this machine's interfaces that are up.
	Addresses func() ([]InterfaceAddr, error)
	// Resolve looks up the addresses of a name.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, error)
	// Post sends body to an https URL, through the proxy in these environment variables
	// ("HTTPS_PROXY=…", "NO_PROXY=…"). If ca (PEM) is not empty, it is the only trusted CA.
	Post func(ctx context.Context, url, ca string, body []byte, proxy []string) error
	// Get requests an http or https URL; proxy is as in Post. The response may have any status. If
	// a redirect is rejected, the error is ErrRedirect.
	Get func(ctx context.Context, url string, header http.Header, proxy []string) (*http.Response, error)
	// GetRemote is Get for an untrusted URL. If the URL or a redirect leads to a loopback or
	// link-local address, the error is ErrLocal.
	GetRemote func(ctx context.Context, url string, header http.Header, proxy []string) (*http.Response, error)
}

// ErrLocked means that another program holds a lock for longer than Lock waits.
var ErrLocked = errors.New("another program holds the lock")

// ErrRedirect means that a redirect from the server was rejected.
var ErrRedirect = errors.New("the server's redirect is rejected")

// ErrLocal means that a request would lead to a loopback or link-local address.
var ErrLocal = errors.New("loopback and link-local addresses are rejected")

// InterfaceAddr is an address of an interface.
type InterfaceAddr struct {
	Interface string
	Addr      netip.Addr
}

// Slots reads and writes slots on this machine's disk and on sticks. Each func gets the slot's
// device.
type Slots struct {
	// SlotLabel reads no more than the label of a FAT file system.
	SlotLabel func(device string) (string, error)
	ReadSlot  func(device string) (*slot.Contents, error)
	// SlotFile copies a file, which may be large, from a device's FAT file system to w.
	SlotFile func(device, name string, w io.Writer) error
	// WriteSlot replaces a slot atomically, even if the power fails.
	WriteSlot func(device string, c *slot.Contents) error
	// ReadClaims and WriteClaim read and write the claims on a stick.
	ReadClaims func(device string) ([]slot.Claim, error)
	WriteClaim func(device string, c slot.Claim) error
	// ScrubSlot rewrites a slot, even an unreadable one: with site, and without secrets.
	ScrubSlot  func(device string, info ondisk.SlotInfo, site []byte, secrets []string) error
	ReportSlot func(device string, text, json []byte) error
}

// FileSystems gives access to the file systems on this machine's disks.
type FileSystems struct {
	// FSUUID reads the UUID of the ext4 file system on a device.
	FSUUID func(device string) ([16]byte, error)
	// FSSize returns the size in bytes of the file system mounted at path,
	// without the file system's metadata.
	FSSize func(path string) (int64, error)
	// FSFree returns the free bytes of the file system mounted at path.
	FSFree func(path string) (int64, error)
	// OpenDevice opens a partition or a file. For writing, it creates a missing file, and fails if
	// the partition is mounted.
	OpenDevice func(path string, write bool) (Device, error)
}

// Device is an open partition, or a regular file that is used like one.
type Device interface {
	io.ReaderAt
	io.WriterAt
	Name() string
	Size() (int64, error)
	// Sync waits until everything is written. Later reads read from the medium.
	Sync() error
	Close() error
}

// Output prints messages that are not in the log.
type Output struct {
	// Console prints a line on the machine's consoles.
	Console func(line string)
	// Notify notifies systemd: "READY=1", "STATUS=…", "WATCHDOG=1".
	Notify func(state string)
	// OnWaiting receives texts that describe the running phase's wait, and OnNote each Note.
	// Whoever runs phases sets them; they may be nil.
	OnWaiting, OnNote func(what string)
}

// Owner is the owner and the permissions of a file.
type Owner = beneath.Owner

// owns reports whether a file has this owner. It always returns true unless first boot runs as
// root, because only root can change owners.
func owns(o Owner, st fs.FileInfo) bool {
	sys, ok := st.Sys().(*syscall.Stat_t)
	return os.Geteuid() != 0 || ok && int(sys.Uid) == o.UID && int(sys.Gid) == o.GID
}

// Mode returns the Owner of a file that root owns, with the permissions m.
func Mode(m fs.FileMode) Owner { return Owner{Mode: m} }

// Cmd is a program to run.
type Cmd struct {
	Args []string
	Env  []string // in addition to the inherited ones
	// Output receives stdout and stderr. If it is nil, the error contains their last lines.
	Output io.Writer
	Stdin  io.Reader
}

// Waiting describes the running phase's wait on the status line, in the state and in the report.
// Repeating a text costs nothing.
func (e *Env) Waiting(format string, args ...any) {
	if e.OnWaiting != nil {
		e.OnWaiting(fmt.Sprintf(format, args...))
	}
}

// Note reports a problem that does not stop the node. The text is in the report, and is printed once
// on the console.
func (e *Env) Note(format string, args ...any) {
	if e.OnNote != nil {
		e.OnNote(fmt.Sprintf(format, args...))
	}
}

func (e *Env) Path(p string) string { return filepath.Join(e.Root, p) }

func (e *Env) Read(path string) ([]byte, error) { return os.ReadFile(e.Path(path)) }

// ReadIfExists returns the contents of a file, or nil if it is missing. The error of an unreadable
// file names it.
func (e *Env) ReadIfExists(path string) ([]byte, error) {
	b, err := e.Read(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, err // without the part that was read
	}
	return b, nil
}

// Contents is ReadIfExists where an unreadable file may count as missing. It reports the error.
func (e *Env) Contents(path string) []byte {
	b, err := e.ReadIfExists(path)
	switch {
	case err == nil:
	case strings.HasPrefix(path, "/sys/") || strings.HasPrefix(path, "/proc/"):
		// The kernel returns an error for attributes that a device does not have.
	case e.OnNote != nil:
		e.Note("%s: the file is treated as missing. To fix: check the disk (`journalctl -k`)", OneLine(err))
	case e.Log != nil:
		e.Log.Warn("a file cannot be read, and is treated as missing", "error", err)
	}
	return b
}

// Text returns Contents without surrounding white space. It is meant for short files, such as the
// kernel's.
func (e *Env) Text(path string) string { return strings.TrimSpace(string(e.Contents(path))) }

func (e *Env) Exists(path string) bool {
	_, err := os.Lstat(e.Path(path))
	return err == nil
}

// Write replaces path unless its contents, permissions and owner are right already. It reports
// whether it replaced the file.
func (e *Env) Write(path string, data []byte, o Owner) (bool, error) {
	if old, err := e.Read(path); err == nil && string(old) == string(data) {
		if st, err := os.Lstat(e.Path(path)); err == nil && st.Mode().IsRegular() && st.Mode().Perm() == o.Mode.Perm() && owns(o, st) {
			return false, nil
		}
	}
	if err := e.WriteFile(path, data, o); err != nil {
		return false, err
	}
	return true, nil
}

// Poll calls try every interval until it returns true or an error, or until ctx ends.
func (e *Env) Poll(ctx context.Context, interval time.Duration, try func() (bool, error)) error {
	return e.poll(ctx, func() time.Duration { return interval }, try)
}

func (e *Env) poll(ctx context.Context, pause func() time.Duration, try func() (bool, error)) error {
	for {
		ok, err := try()
		if err != nil || ok {
			return err
		}
		if err := e.Sleep(ctx, pause()); err != nil {
			return err
		}
	}
}

// Wait defines how often and how long Retry tries.
type Wait struct {
	Every time.Duration
	// For is the time after which Retry gives up; 0 means that it gives up only when its context
	// ends.
	For time.Duration
	// Gently makes the pauses grow to an eighth of the time waited so far, up to mostGently,
	// because a thousand machines may wait for the same API server.
	Gently bool
}

// mostGently is the longest pause of a Wait with Gently.
const mostGently = 10 * time.Second

// Retry calls try until it succeeds or the wait is over. Then it returns the last error of try,
// which explains more than a timeout.
func (e *Env) Retry(ctx context.Context, w Wait, try func() error) error {
	began := e.Now()
	pause := func() time.Duration {
		if !w.Gently {
			return w.Every
		}
		return min(max(w.Every, e.Now().Sub(began)/8), mostGently)
	}
	var last error
	err := e.poll(ctx, pause, func() (bool, error) {
		err := try()
		if err != nil && last != nil && ctx.Err() != nil {
			return false, last // ctx interrupted try, so its error explains nothing
		}
		last = err
		return last == nil || w.For > 0 && e.Now().After(began.Add(w.For)), nil
	})
	return cmp.Or(last, err)
}

// steady is how long a daemon must have been active to count as working: a crashing daemon is
// active between its restarts, and kubelet before it has started everything that can fail.
const steady = 30 * time.Second

// SteadyUnit returns an error unless the unit has been active for at least steady.
func (e *Env) SteadyUnit(ctx context.Context, unit string) error {
	state, err := e.UnitState(ctx, unit)
	if err != nil {
		return err
	}
	if state != "active" {
		return fmt.Errorf("%s is %s", unit, state)
	}
	since, err := e.UnitSince(ctx, unit)
	if err == nil && e.Now().Sub(since.Now) < steady {
		err = fmt.Errorf("%s has run for less than %s", unit, steady)
	}
	return err
}

// JobTimeout is how long to wait for the job of one unit. systemd continues the job after that.
const JobTimeout = 15 * time.Second

// BoundedUnit is like Unit, but waits at most for patience, because the unit may wait too, for
// example for a missing card or for a server.
func (e *Env) BoundedUnit(ctx context.Context, patience time.Duration, verb, unit string) error {
	bounded, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := e.Unit(bounded, verb, unit)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return fmt.Errorf("%s has not finished after %s, and continues in the background", verb, patience)
	}
	return err
}
