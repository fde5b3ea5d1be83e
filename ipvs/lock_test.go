package ipvs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ipvs/files"
	"github.com/edgebake/edgebake/test/desk"
)

func TestSecondDaemonIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	s := testServer(t, 202)
	s.Masters = []Master{w.masters[0].master()}
	w.start(s)
	before := w.kernel.text()
	second := NewDaemon(Options{Servers: []Server{s}, RunDir: w.run, Kernel: w.kernel, Log: w.log})
	err := second.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("(process %d) already maintains %s", os.Getpid(), s.VIP)) {
		t.Errorf("got %v", err)
	}
	if w.kernel.text() != before {
		t.Error("the second daemon changed the rules")
	}
	all, err := ReadStatus(w.run)
	if err != nil || len(all) != 1 || all[0].PID != os.Getpid() {
		t.Errorf("status: %+v, %v", all, err)
	}
	err = Clean(t.Context(), w.kernel, Leftovers{Servers: []Server{s}, RunDir: w.run}, w.log)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d maintains %s: stop it first", os.Getpid(), s.VIP)) {
		t.Errorf("clean under a running daemon: %v", err)
	}
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	if pid, locked := lockedBy(w.run, s.VIP); locked {
		t.Errorf("process %d still has the lock", pid)
	}
	if _, err := ReadStatus(w.run); err == nil || !strings.Contains(err.Error(), "ipvscare is not running") {
		t.Errorf("status without a daemon: %v", err)
	}
	w.start(s) // the next process can start at once
}

// TestLockHeldByOthers checks that neither an unprivileged process nor one in the same network namespace,
// even as root, can prevent ipvscare from starting.
func TestLockHeldByOthers(t *testing.T) {
	desk.NeedRoot(t, "it changes its user ID")
	w := newWorld(t, 1)
	s := testServer(t, 204)
	s.Masters = []Master{w.masters[0].master()}
	// An earlier release used this abstract name as the lock. Any process can listen on it.
	if ln, err := net.Listen("unix", "@ipvscare/"+s.VIP.String()); err == nil {
		defer ln.Close()
	}
	// Files that a killed process left behind.
	if err := os.MkdirAll(w.run, 0o700); err != nil {
		t.Fatal(err)
	}
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: socketPath(w.run, s.VIP), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()
	w.start(s)
	if err := w.stop(); err != nil {
		t.Fatal(err)
	}
	// A container that mounts /run may see only this directory.
	for dir := w.run; dir != os.TempDir(); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("flock", "-n", lockPath(w.run, s.VIP), "sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "Permission denied") {
		t.Errorf("another process got the lock: %v %s", err, out)
	}
	w.start(s)
}

// TestRunDir checks that a directory that other users can write to is rejected.
func TestRunDir(t *testing.T) {
	top := t.TempDir()
	dir := filepath.Join(top, "run")
	if err := files.UseRunDir(dir); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v %v", st.Mode(), err)
	}
	if err := os.Chmod(dir, 0o1777); err != nil {
		t.Fatal(err)
	}
	if err := files.UseRunDir(dir); err == nil || !strings.Contains(err.Error(), "can be written to by others") {
		t.Errorf("a directory that all users may write to: %v", err)
	}
	link := filepath.Join(top, "link")
	if err := os.Symlink("/etc", link); err != nil {
		t.Fatal(err)
	}
	if err := files.UseRunDir(link); err == nil || !strings.Contains(err.Error(), "is not a directory") {
		t.Errorf("a link: %v", err)
	}
	if os.Geteuid() == 0 {
		if err := errors.Join(os.Chmod(dir, 0o755), os.Chown(dir, 65534, 65534)); err != nil {
			t.Fatal(err)
		}
		if err := files.UseRunDir(dir); err == nil || !strings.Contains(err.Error(), "belongs to user 65534") {
			t.Errorf("another user's directory: %v", err)
		}
	}
}

func TestLockFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	unlock, err := files.Lock(t.Context(), path, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := files.Lock(t.Context(), path, 20*time.Millisecond); !errors.Is(err, files.ErrHeld) {
		t.Errorf("a second time: %v", err)
	}
	go func(unlock func()) { time.Sleep(50 * time.Millisecond); unlock() }(unlock)
	if unlock, err = files.Lock(t.Context(), path, 10*time.Second); err != nil {
		t.Errorf("after unlocking it: %v", err)
	} else {
		unlock()
	}
	if err := os.Symlink("/etc/passwd", path+"2"); err != nil {
		t.Fatal(err)
	}
	if _, err := files.Lock(t.Context(), path+"2", 0); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("through a link: %v", err)
	}
}

// TestHostsLock checks that programs that use ondisk.HostsLock never lose each other's lines.
func TestHostsLock(t *testing.T) {
	dir := t.TempDir()
	file, lock := filepath.Join(dir, "hosts"), filepath.Join(dir, "hosts.lock")
	const many = 30
	var wg sync.WaitGroup
	wg.Go(func() { // acts like firstboot, with a pause between reading and writing
		for i := range many {
			unlock, err := files.Lock(t.Context(), lock, files.HostsTimeout)
			if err != nil {
				t.Error(err)
				return
			}
			old, _ := os.ReadFile(file)
			time.Sleep(time.Millisecond)
			if err := files.Replace(file, fmt.Appendf(old, "10.1.0.%d theirs\n", i), 0o644); err != nil {
				t.Error(err)
			}
			unlock()
		}
	})
	for i := range many {
		if _, err := files.KeepHosts(t.Context(), file, dir, files.LineFor(fmt.Sprintf("name%d", i), testVIP.Addr())); err != nil {
			t.Error(err)
		}
	}
	wg.Wait()
	b, _ := os.ReadFile(file)
	if theirs, ours := strings.Count(string(b), "theirs"), strings.Count(string(b), files.HostsMark); theirs != many || ours != many {
		t.Errorf("%d lines of theirs and %d of ours, want %d of each:\n%s", theirs, ours, many, b)
	}
	entries, _ := os.ReadDir(dir)
	if names := slices.Collect(func(yield func(string) bool) {
		for _, e := range entries {
			yield(e.Name())
		}
	}); !slices.Equal(names, []string{"hosts", "hosts.lock"}) {
		t.Errorf("left behind: %v", names)
	}
}

// TestHostsReplacedUnderAMount checks that a container that mounts the file itself sees the old one
// after a replacement, and reports that.
func TestHostsReplacedUnderAMount(t *testing.T) {
	desk.NeedRoot(t, "it mounts")
	dir := t.TempDir()
	script := `set -e; cd "$1"; echo 127.0.0.1 localhost >hosts; touch inside; mount --bind hosts inside; echo new >new; mv new hosts; stat -c %h inside`
	out, err := exec.Command("unshare", "-m", "sh", "-c", script, "sh", dir).CombinedOutput()
	if err != nil {
		desk.Lacks(t, "mounting here: %v: %s", err, out)
	}
	if strings.TrimSpace(string(out)) != "0" {
		t.Errorf("the replaced file has %s links, want 0: KeepHosts cannot detect the replacement", out)
	}
	f, err := os.Create(filepath.Join(dir, "gone")) // another way to unlink the file
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	_, err = files.KeepHosts(t.Context(), fmt.Sprintf("/proc/self/fd/%d", f.Fd()), "", files.LineFor("a.b", testVIP.Addr()))
	if err == nil || !strings.Contains(err.Error(), "mount its directory instead") {
		t.Errorf("got %v", err)
	}
}

// TestRejectedReloadUnlocks checks that the locks of a rejected configuration are free for the next
// one, and that its new virtual servers leave no notes: Clean, and the next start, would remove
// these virtual servers from the kernel, although another program may have made them.
func TestRejectedReloadUnlocks(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	if err := files.UseRunDir(dir); err != nil {
		t.Fatal(err)
	}
	d := NewDaemon(Options{RunDir: dir})
	one, two := Server{VIP: netip.MustParseAddrPort("192.0.2.1:6443")}, Server{VIP: netip.MustParseAddrPort("192.0.2.2:6443")}
	// The file for the second virtual server cannot be written, because a directory has its name.
	if err := os.MkdirAll(filepath.Join(dir, two.VIP.String(), "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := d.replace(t.Context(), []Server{one, two}); err == nil {
		t.Fatal("the second virtual server could not be recorded")
	}
	if notes := readNotes(dir); len(notes) > 0 {
		t.Errorf("noted: %v", notes)
	}
	for _, s := range []Server{one, two} {
		unlock, err := d.claim(t.Context(), s.VIP)
		if err != nil {
			t.Fatal(err)
		}
		unlock()
	}
	// The note of a virtual server whose removal was interrupted stays.
	if err := os.WriteFile(notePath(dir, one.VIP), []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.replace(t.Context(), []Server{one, two}); err == nil {
		t.Fatal("the second virtual server could not be recorded")
	}
	if notes := readNotes(dir); !slices.Equal(notes[one.VIP], []string{"old"}) {
		t.Errorf("noted: %v", notes)
	}
}
