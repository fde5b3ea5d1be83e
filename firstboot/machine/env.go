package machine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/firstboot/beneath"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// Env is everything a phase may touch, by subject. Reading goes straight to the
// files below Root; whatever changes the machine, waits, or speaks to others is
// one of the funcs.
type Env struct {
	// Root is where every path begins: "/" on a node.
	Root string
	Log  *slog.Logger

	Clock
	Chance
	Files
	Programs
	Platform
	Network
	Slots
	FileSystems
	Audience

	pass
}

// Clock is the machine's.
type Clock struct {
	Now   func() time.Time
	Sleep func(ctx context.Context, d time.Duration) error
	// SetClock sets it to t.
	SetClock func(t time.Time) error
	// ClockSynced reports whether it follows a time server.
	ClockSynced func(ctx context.Context) (bool, error)
}

// Chance is what nobody can foretell.
type Chance struct {
	// Rand returns a number in [0,1).
	Rand func() float64
	// Random returns n bytes that nobody can guess.
	Random func(n int) []byte
}

// Files changes what is below Root. Paths begin there.
type Files struct {
	// WriteFile replaces a file at once: after a power cut it has the old
	// contents or the new. Missing parents are made.
	WriteFile func(path string, data []byte, o Owner) error
	// Stream is WriteFile for what is too large for memory.
	Stream func(path string, o Owner, write func(io.Writer) error) error
	// Rename moves a file or a directory within a file system, to where nothing
	// is.
	Rename func(from, to string) error
	// Symlink and Link replace what is at path, if it is not a directory.
	Symlink func(target, path string) error
	Link    func(target, path string) error
	Mkdir   func(path string, o Owner) error
	// Remove removes a file, a link or an empty directory. Where nothing is there
	// it succeeds; a directory that is not empty stays.
	Remove func(path string) error
	// RemoveAll removes a path and all below it.
	RemoveAll func(path string) error
	// WriteTree makes a directory where nothing is, and below it the nodes that walk passes
	// to its argument, parents first: with owners, devices, extended attributes and times.
	WriteTree func(ctx context.Context, dir string, blobs tree.Blobs, walk func(func(tree.Node) error) error) error
	// Sync waits until these files and directories, and all else on the file
	// systems that hold them, would outlast a power cut.
	Sync func(paths ...string) error
	// Lock holds a lock that other programs respect too, by flock(2) on a file
	// of root's, until release is called.
	Lock func(ctx context.Context, path string) (release func(), err error)
}

// UnitStart is when a unit was started. The clock may have been set since.
type UnitStart struct {
	Now  time.Time // by the clock of now
	Then time.Time // by the clock of then
}

// Earlier is for comparisons with what was dated in this boot: that was dated by the
// clock of then if it was set since. What may be of an earlier boot is compared with Now:
// a clock that was behind dates this start before what happened long before it.
func (s UnitStart) Earlier() time.Time {
	if s.Then.Before(s.Now) {
		return s.Then
	}
	return s.Now
}

// Programs are run, or started and stopped by systemd.
type Programs struct {
	// Run runs a program to its end.
	Run func(ctx context.Context, c Cmd) error
	// Unit carries out a verb of systemctl and waits for its job: start, stop,
	// restart, reload, enable, disable, daemon-reload (without a unit).
	Unit func(ctx context.Context, verb, unit string) error
	// UnitState is the ActiveState of a unit: active, activating, inactive,
	// failed.
	UnitState func(ctx context.Context, unit string) (string, error)
	// UnitSince is when an active unit was started.
	UnitSince func(ctx context.Context, unit string) (UnitStart, error)
	// BootClock is when the parts of this boot began, FirstBoot being now.
	BootClock func(ctx context.Context) (ondisk.BootClock, error)
}

// Platform is what the kernel and the firmware keep of it.
type Platform struct {
	SetHostname func(name string) error
	// SetFirmwareVar sets a variable of UEFI's, which a disk that is written again
	// does not lose. ErrUnsupported: the machine has no UEFI.
	SetFirmwareVar func(path string, value []byte) error
}

// Network is how to reach others, and to be reached.
type Network struct {
	Dial api.DialFunc
	// Listen takes connections at one of this machine's own addresses.
	Listen func(ctx context.Context, addr string) (net.Listener, error)
	// Source is the node's own address on the way to addr ("host:port").
	Source func(ctx context.Context, addr string) (netip.Addr, error)
	// Addresses are those of this machine's interfaces that are up.
	Addresses func() ([]InterfaceAddr, error)
	// Resolve looks a name up.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, error)
	// Post sends body to an https URL, through the proxy that an environment
	// with these variables names ("HTTPS_PROXY=…", "NO_PROXY=…"). ca, where it is
	// not empty, is the one certificate (PEM) that vouches for who answers.
	Post func(ctx context.Context, url, ca string, body []byte, proxy []string) error
	// Get asks for an http or https URL through the same kind of proxy. The answer has
	// whatever status the server gives it. ErrRedirect: it leads where Get does not go.
	Get func(ctx context.Context, url string, header http.Header, proxy []string) (*http.Response, error)
}

// ErrRedirect is a server that leads a request to where it must not go.
var ErrRedirect = errors.New("the server's redirect is rejected")

// InterfaceAddr is an address of an interface.
type InterfaceAddr struct {
	Interface string
	Addr      netip.Addr
}

// Slots reads and writes the slots of this machine's disk and of sticks, each by
// its device.
type Slots struct {
	// SlotLabel reads the label of a FAT file system, and nothing else of it.
	SlotLabel func(device string) (string, error)
	ReadSlot  func(device string) (*slot.Contents, error)
	// SlotFile copies one file of a device's FAT file system, which may be large.
	SlotFile func(device, name string, w io.Writer) error
	// WriteSlot writes a slot whole: a power cut leaves the old contents or the
	// new ones.
	WriteSlot func(device string, c *slot.Contents) error
	// ReadClaims and WriteClaim are for the notes on a stick.
	ReadClaims func(device string) ([]slot.Claim, error)
	WriteClaim func(device string, c slot.Claim) error
	// ScrubSlot writes a slot whole with site in it and no secret, whether it
	// was readable before or not.
	ScrubSlot  func(device string, info ondisk.SlotInfo, site []byte, secrets []string) error
	ReportSlot func(device string, text, json []byte) error
}

// FileSystems tells of those on this machine's disks.
type FileSystems struct {
	// FSUUID reads the UUID of the ext4 file system on a device.
	FSUUID func(device string) ([16]byte, error)
	// FSSize is the size in bytes of the file system mounted at path, without its
	// own tables.
	FSSize func(path string) (int64, error)
	// FSFree is how many bytes of it are left.
	FSFree func(path string) (int64, error)
	// OpenDevice opens a partition, or a file that it makes: to be read, or to be written
	// too, which fails while the partition is mounted.
	OpenDevice func(path string, write bool) (Device, error)
}

// Device is an open partition, or a file in place of one.
type Device interface {
	io.ReaderAt
	io.WriterAt
	Name() string
	Size() (int64, error)
	// Sync waits until all is stored. What is read then comes from the medium.
	Sync() error
	Close() error
}

// Audience is who is told how it goes, besides the log.
type Audience struct {
	// Console says one line to the person at the machine.
	Console func(line string)
	// Notify tells systemd: "READY=1", "STATUS=…", "WATCHDOG=1".
	Notify func(state string)
}

// pass is what a run sets: see OnWaiting, OnNote and BeginPass.
type pass struct {
	// waiting receives what the running phase waits for.
	waiting func(what string)
	// noting receives each Note.
	noting func(what string)
	// cache has what this pass has looked up; nil: nothing is cached.
	cache *passCache
}

// Owner says whose a file becomes, and with which permissions.
type Owner = beneath.Owner

// owns reports whether a file is its owner's. Only root gives files to others.
func owns(o Owner, st fs.FileInfo) bool {
	sys, ok := st.Sys().(*syscall.Stat_t)
	return os.Geteuid() != 0 || ok && int(sys.Uid) == o.UID && int(sys.Gid) == o.GID
}

// Mode is a file of root's.
func Mode(m fs.FileMode) Owner { return Owner{Mode: m} }

// Cmd is a program to run.
type Cmd struct {
	Args []string
	Env  []string // beside the usual ones
	// Output receives what it prints, both streams; nil: the log.
	Output io.Writer
	Stdin  io.Reader
}

// OnWaiting has f called with what the running phase waits for; nil: nothing is.
func (e *Env) OnWaiting(f func(what string)) { e.waiting = f }

// OnNote has f called with each note.
func (e *Env) OnNote(f func(what string)) { e.noting = f }

// Waiting says what the running phase waits for: on the status line, in the
// state and in the report. Saying the same again is free.
func (e *Env) Waiting(format string, args ...any) {
	if e.waiting != nil {
		e.waiting(fmt.Sprintf(format, args...))
	}
}

// Note tells, in the report and once on the console, what of the Site is not in
// place although the node continues.
func (e *Env) Note(format string, args ...any) {
	if e.noting != nil {
		e.noting(fmt.Sprintf(format, args...))
	}
}

func (e *Env) Path(p string) string { return filepath.Join(e.Root, p) }

func (e *Env) Read(path string) ([]byte, error) { return os.ReadFile(e.Path(path)) }

// Contents is a file's contents, nil where there is none. One that is there
// and cannot be read counts as missing, and is logged.
func (e *Env) Contents(path string) []byte {
	b, err := e.Read(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && e.Log != nil {
		e.Log.Debug("a file counts as missing", "error", err)
	}
	return b
}

// Text is contents without the white space around them, as most files of the
// kernel's are read.
func (e *Env) Text(path string) string { return strings.TrimSpace(string(e.Contents(path))) }

func (e *Env) Exists(path string) bool {
	_, err := os.Lstat(e.Path(path))
	return err == nil
}

// Write replaces path unless it is already what it should be, and reports
// whether it did.
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

// Poll calls try every interval until it is true, ctx ends, or it fails.
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

// Retry tries every interval until it goes well or ctx ends. The error is what was
// wrong last: it says more than that the time is up.
func (e *Env) Retry(ctx context.Context, interval time.Duration, try func() error) error {
	return e.RetryFor(ctx, math.MaxInt64, interval, try)
}

// RetryFor is retry that ends when patience is over, too.
func (e *Env) RetryFor(ctx context.Context, patience, interval time.Duration, try func() error) error {
	return e.retry(ctx, patience, func() time.Duration { return interval }, try)
}

// mostGently is the longest pause of RetryGently.
const mostGently = 10 * time.Second

// RetryGently is Retry with pauses of an eighth of the time waited so far, but at least
// interval and at most mostGently: a thousand machines may wait for the same API server.
func (e *Env) RetryGently(ctx context.Context, interval time.Duration, try func() error) error {
	began := e.Now()
	pause := func() time.Duration { return min(max(interval, e.Now().Sub(began)/8), mostGently) }
	return e.retry(ctx, math.MaxInt64, pause, try)
}

func (e *Env) retry(ctx context.Context, patience time.Duration, pause func() time.Duration, try func() error) error {
	end := e.Now().Add(patience)
	var last error
	err := e.poll(ctx, pause, func() (bool, error) {
		err := try()
		if err != nil && last != nil && ctx.Err() != nil {
			return false, last // ctx cut the try off, whose error tells nothing else
		}
		last = err
		return last == nil || e.Now().After(end), nil
	})
	return cmp.Or(last, err)
}

// JobPatience is how long one unit is waited for, jobsPatience all units of an
// Apply. systemd continues a job that nobody waits for.
const JobPatience = 15 * time.Second

// BoundedUnit is Unit that waits for the job for a limited time: a unit may wait
// for a card that is missing, or for a server.
func (e *Env) BoundedUnit(ctx context.Context, patience time.Duration, verb, unit string) error {
	bounded, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err := e.Unit(bounded, verb, unit)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return fmt.Errorf("%s has not finished after %s, and continues in the background", verb, patience)
	}
	return err
}
