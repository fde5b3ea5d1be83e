package beneath

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/test/desk"
)

const user = 12345

var (
	roots = Owner{Mode: 0o600}
	users = Owner{Mode: 0o600, UID: user, GID: user}
)

// machine is a root with /etc/kubernetes/manifests, which only root may write,
// and /home/u, which another user may write.
type machine struct {
	t *testing.T
	Root
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{t, Root{t.TempDir()}}
	for _, d := range []string{"etc/kubernetes/manifests", "home/u", "run", "var"} {
		if err := os.MkdirAll(m.path(d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	m.put("etc/kubernetes/manifests/pod.yaml", "root's")
	m.put("etc/shadow", "secret")
	// The user who runs the test acts as root; the homes are writable for everybody.
	if err := os.Chmod(m.path("home/u"), 0o777); err != nil {
		t.Fatal(err)
	}
	return m
}

func (m *machine) path(p string) string { return filepath.Join(m.Dir, p) }

func (m *machine) put(p, data string) {
	m.t.Helper()
	if err := os.WriteFile(m.path(p), []byte(data), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) do(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) link(target, p string) {
	m.t.Helper()
	m.do(os.Symlink(target, m.path(p)))
}

func (m *machine) has(p, want string) {
	m.t.Helper()
	if b, err := os.ReadFile(m.path(p)); err != nil || string(b) != want {
		m.t.Errorf("%s has %q, %v; want %q", p, b, err, want)
	}
}

// untouched checks that nothing outside of the homes was changed.
func (m *machine) untouched() {
	m.t.Helper()
	m.has("etc/kubernetes/manifests/pod.yaml", "root's")
	m.has("etc/shadow", "secret")
	for dir, n := range map[string]int{"etc": 2, "etc/kubernetes": 1, "etc/kubernetes/manifests": 1, "home": 1} {
		if list, err := os.ReadDir(m.path(dir)); err != nil || len(list) != n {
			m.t.Errorf("%s has %v, %v", dir, list, err)
		}
	}
	st, err := os.Stat(m.path("etc/shadow"))
	if err != nil || st.Mode().Perm() != 0o600 || st.Sys().(*syscall.Stat_t).Uid != uint32(os.Geteuid()) {
		m.t.Errorf("etc/shadow: %v, %v", st, err)
	}
}

const keys = "/home/u/.ssh/authorized_keys"

// TestWhatAUserPutsInTheWay writes root's keys to a home in which its user has
// put links and other files in the way.
func TestWhatAUserPutsInTheWay(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(m *machine)
	}{
		{"nothing", func(m *machine) {}},
		{".ssh leads to the manifests", func(m *machine) { m.link("/etc/kubernetes/manifests", "home/u/.ssh") }},
		{".ssh leads there without a slash", func(m *machine) { m.link("../../etc/kubernetes/manifests", "home/u/.ssh") }},
		{".ssh leads nowhere", func(m *machine) { m.link("/nowhere", "home/u/.ssh") }},
		{".ssh leads to itself", func(m *machine) { m.link(".ssh", "home/u/.ssh") }},
		{".ssh is a file", func(m *machine) { m.put("home/u/.ssh", "x") }},
		{".ssh is a FIFO", func(m *machine) { m.do(syscall.Mkfifo(m.path("home/u/.ssh"), 0o666)) }},
		{"the keys lead to another file", func(m *machine) {
			m.do(os.Mkdir(m.path("home/u/.ssh"), 0o777))
			m.link("/etc/shadow", "home/u/.ssh/authorized_keys")
		}},
		{"the keys are another name of another file", func(m *machine) {
			m.do(os.Mkdir(m.path("home/u/.ssh"), 0o777))
			m.do(os.Link(m.path("etc/shadow"), m.path("home/u/.ssh/authorized_keys")))
		}},
		{"the keys are a directory", func(m *machine) { m.do(os.MkdirAll(m.path("home/u/.ssh/authorized_keys/full"), 0o777)) }},
		{"the keys are a FIFO", func(m *machine) {
			m.do(os.Mkdir(m.path("home/u/.ssh"), 0o777))
			m.do(syscall.Mkfifo(m.path("home/u/.ssh/authorized_keys"), 0o666))
		}},
		{"the old name of what is being written leads to another file", func(m *machine) {
			m.do(os.Mkdir(m.path("home/u/.ssh"), 0o777))
			m.link("/etc/shadow", "home/u/.ssh/.authorized_keys.edgebake-new")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMachine(t)
			c.prepare(m)
			if _, _, err := m.ReadFile(keys); err == nil && !strings.Contains(c.name, "another name") {
				t.Error("the other user's keys were read")
			}
			m.do(m.Mkdir("/home/u/.ssh", Owner{Mode: 0o700, UID: os.Geteuid()}))
			m.do(m.WriteFile(keys, []byte("key"), roots))
			m.has(keys, "key")
			for _, p := range []string{"/home/u/.ssh", keys} {
				if i, err := m.Lstat(p); err != nil || i.Link != "" || !i.Theirs || i.Mode().IsRegular() && i.Sys().(*syscall.Stat_t).Nlink > 1 {
					t.Errorf("%s: %+v, %v", p, i, err)
				}
			}
			m.untouched()
			m.do(m.Symlink("/x", keys))
			m.do(m.Link("/etc/shadow", "/home/u/hard"))
			m.do(os.Remove(m.path("home/u/hard")))
			m.do(m.Remove(keys))
			m.untouched()
		})
	}
}

// TestRename checks that Rename moves a whole directory, and only to a path where nothing exists.
func TestRename(t *testing.T) {
	m := newMachine(t)
	m.do(os.MkdirAll(m.path("/var/from/a"), 0o755))
	m.put("/var/from/a/b", "data")
	m.do(m.Rename("/var/from/a", "/var/made/to"))
	m.has("/var/made/to/b", "data")
	m.do(os.MkdirAll(m.path("/var/from/a"), 0o755))
	m.put("/var/from/a/b", "newer")
	if err := m.Rename("/var/from/a", "/var/made/to"); err == nil {
		t.Error("the existing file was replaced")
	}
	m.has("/var/made/to/b", "data")
	if err := m.Rename("/var/from/none", "/var/made/other"); err == nil {
		t.Error("moving a missing file succeeded")
	}
}

// TestStream checks that Stream writes the whole file, or leaves the former one.
func TestStream(t *testing.T) {
	m := newMachine(t)
	m.put("/var/file", "former")
	if err := m.Stream("/var/file", Owner{Mode: 0o600}, func(w io.Writer) error {
		_, err := io.WriteString(w, "half")
		return errors.Join(err, io.ErrUnexpectedEOF)
	}); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
	m.has("/var/file", "former")
	m.do(m.Stream("/var/file", Owner{Mode: 0o600}, func(w io.Writer) error {
		_, err := io.WriteString(w, "whole")
		return err
	}))
	m.has("/var/file", "whole")
}

// TestNothingIsRemovedElsewhere checks that removing a path, or changing its owner, never follows a
// link to other files.
func TestNothingIsRemovedElsewhere(t *testing.T) {
	m := newMachine(t)
	m.link("/etc/kubernetes/manifests", "home/u/.config")
	m.do(m.Remove("/home/u/.config/pod.yaml"))
	m.do(m.RemoveAll("/home/u/.config/pod.yaml"))
	m.untouched()
	if _, _, err := m.ReadFile("/home/u/.config/pod.yaml"); !errors.Is(err, ErrLink) {
		t.Errorf("reading: %v", err)
	}
	if _, err := m.Lstat("/home/u/.config/pod.yaml"); !errors.Is(err, ErrLink) {
		t.Errorf("looking: %v", err)
	}
	if m.IsDir("/home/u/.config") {
		t.Error("another user's link was treated as a directory")
	}
	m.do(m.RemoveAll("/home/u/.config")) // the link itself
	m.untouched()
	m.do(os.MkdirAll(m.path("home/u/a/b"), 0o755))
	m.link("/etc", "home/u/a/b/etc")
	m.do(m.RemoveAll("/home/u/a"))
	m.untouched()
}

// TestRootsLinksAreFollowed checks that links in root's directories are followed, because a system
// may have such links.
func TestRootsLinksAreFollowed(t *testing.T) {
	m := newMachine(t)
	m.link("/run", "var/run")
	m.link("../etc", "var/config")
	m.link("loop", "loop")
	m.link("/home", "var/home")
	m.do(m.WriteFile("/var/run/a/b", []byte("1"), roots))
	m.has("run/a/b", "1")
	m.do(m.WriteFile("/var/config/../run/c", []byte("2"), roots)) // resolved like a shell's cd, not like the kernel
	m.has("run/c", "2")
	if b, _, err := m.ReadFile("/var/config/shadow"); err != nil || string(b) != "secret" {
		t.Errorf("%q, %v", b, err)
	}
	if !m.IsDir("/var/run") || !m.IsDir("/") || m.IsDir("/etc/shadow") || m.IsDir("/none") {
		t.Error("directories and other files are confused")
	}
	if err := m.WriteFile("/loop/x", nil, roots); !errors.Is(err, unix.ELOOP) {
		t.Errorf("a loop: %v", err)
	}
	// Root's link leads to another user's directory, where links are not followed.
	m.link("/etc", "home/u/etc")
	if _, _, err := m.ReadFile("/var/home/u/etc/shadow"); !errors.Is(err, ErrLink) {
		t.Errorf("got %v", err)
	}
	// Where only root can write, a file in the way is an error and is not replaced.
	if err := m.WriteFile("/etc/kubernetes", nil, roots); err == nil {
		t.Error("a directory was replaced")
	}
	if err := m.WriteFile("/etc/shadow/x", nil, roots); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("got %v", err)
	}
	if err := m.Mkdir("/var/run", roots); err == nil {
		t.Error("a link became a directory")
	}
	m.untouched()
}

// TestAUserWhoIsQuick replaces .ssh with a link, and back, while root writes.
func TestAUserWhoIsQuick(t *testing.T) {
	m := newMachine(t)
	stop := make(chan bool)
	var wg sync.WaitGroup
	wg.Go(func() {
		ssh, other := m.path("home/u/.ssh"), m.path("home/u/other")
		os.Symlink("/etc/kubernetes/manifests", other)
		os.Symlink(m.path("etc/kubernetes/manifests"), other+"2")
		for {
			select {
			case <-stop:
				return
			default:
				unix.Renameat2(unix.AT_FDCWD, ssh, unix.AT_FDCWD, other, unix.RENAME_EXCHANGE)
				unix.Renameat2(unix.AT_FDCWD, ssh, unix.AT_FDCWD, other+"2", unix.RENAME_EXCHANGE)
			}
		}
	})
	wrote := 0
	for end := time.Now().Add(time.Second); time.Now().Before(end); {
		m.Mkdir("/home/u/.ssh", Owner{Mode: 0o777, UID: os.Geteuid()})
		if m.WriteFile(keys, []byte("key"), roots) == nil {
			wrote++
		}
		m.ReadFile(keys)
		m.Remove(keys)
		m.RemoveAll("/home/u/.ssh/pod.yaml")
	}
	close(stop)
	wg.Wait()
	m.untouched()
	if wrote == 0 {
		t.Error("the file was never written at its own path: the test tried nothing")
	}
}

// TestSomebodyElsesDirectoryIsNotGivenAway checks a directory of root that a user has moved into
// their own home. It must not get that user as its owner.
func TestSomebodyElsesDirectoryIsNotGivenAway(t *testing.T) {
	desk.NeedRoot(t, "it gives files to others")
	m := newMachine(t)
	m.do(os.Chmod(m.path("home/u"), 0o755))
	m.do(os.Chown(m.path("home/u"), user, user))
	m.do(os.Mkdir(m.path("home/u/.ssh"), 0o700)) // root's, renamed
	m.put("home/u/.ssh/backup", "root's")
	m.do(m.Mkdir("/home/u/.ssh", Owner{Mode: 0o700, UID: user, GID: user}))
	i, err := m.Lstat("/home/u/.ssh")
	if err != nil || i.Sys().(*syscall.Stat_t).Uid != user || i.Mode().Perm() != 0o700 {
		t.Errorf("%+v, %v", i, err)
	}
	if list, err := os.ReadDir(m.path("home/u/.ssh")); err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
	moved, err := filepath.Glob(m.path("home/u/.ssh.moved-*/backup"))
	if err != nil || len(moved) != 1 {
		t.Errorf("%v, %v", moved, err)
	}
	m.do(m.WriteFile(keys, []byte("key"), users))
	if i, err := m.Lstat(keys); err != nil || i.Sys().(*syscall.Stat_t).Uid != user || i.Mode().Perm() != 0o600 {
		t.Errorf("%+v, %v", i, err)
	}
	// In root's directory, a home gets its user as its owner, and is not moved aside.
	m.do(os.Chown(m.path("home/u"), user+1, user+1))
	m.do(m.Mkdir("/home/u", Owner{Mode: 0o700, UID: user, GID: user}))
	if i, err := m.Lstat("/home/u"); err != nil || i.Sys().(*syscall.Stat_t).Uid != user {
		t.Errorf("%+v, %v", i, err)
	}
}

// TestWhatAPowerCutLeaves checks that the next write removes the temporary file that a power cut
// left.
func TestWhatAPowerCutLeaves(t *testing.T) {
	m := newMachine(t)
	m.put("etc/.a.edgebake-new", "half")
	m.do(os.Mkdir(m.path("etc/.d.edgebake-new"), 0o700))
	left := "home/u/.a.edgebake-" + strings.Repeat("0a", 16)
	m.put(left, "half")
	m.put("home/u/.a.edgebake-mine", "the user's")
	m.do(m.WriteFile("/etc/a", []byte("1"), roots))
	m.do(m.Mkdir("/etc/d", Owner{Mode: 0o755}))
	m.do(m.WriteFile("/home/u/a", []byte("1"), roots))
	for dir, n := range map[string]int{"etc": 4, "home/u": 2} {
		if list, err := os.ReadDir(m.path(dir)); err != nil || len(list) != n {
			t.Errorf("%s has %v, %v", dir, list, err)
		}
	}
	m.has("home/u/.a.edgebake-mine", "the user's")
	long := "/home/u/" + strings.Repeat("n", 255)
	m.do(m.WriteFile(long, []byte("1"), roots))
	m.do(m.Mkdir("/etc/"+strings.Repeat("d", 255), Owner{Mode: 0o755}))
	m.has(long, "1")
}

func TestReadFile(t *testing.T) {
	m := newMachine(t)
	m.do(os.Truncate(m.path("etc/shadow"), MaxFile+1))
	if _, _, err := m.ReadFile("/etc/shadow"); err == nil {
		t.Error("a file without end was read")
	}
	m.put("etc/empty", "")
	if b, st, err := m.ReadFile("/etc/empty"); err != nil || len(b) != 0 || st.Mode().Perm() != 0o600 {
		t.Errorf("%q, %v, %v", b, st, err)
	}
	if _, _, err := m.ReadFile("/etc"); err == nil {
		t.Error("a directory was read")
	}
	for _, p := range []string{"/none", "/none/at/all"} {
		if _, _, err := m.ReadFile(p); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", p, err)
		}
	}
	if b, _, err := m.ReadFile("/proc/../etc/kubernetes/manifests/pod.yaml"); err != nil || string(b) != "root's" {
		t.Errorf("%q, %v", b, err)
	}
}
