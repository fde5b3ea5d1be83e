package device

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/desk"
)

// loop makes a loop device from a new file that is full of old data.
func loop(t *testing.T, size int64, args ...string) (dev, file string) {
	t.Helper()
	return loopOf(t, bytes.Repeat([]byte("old data"), int(size/8)), args...)
}

// loopOf makes a loop device with this content.
func loopOf(t *testing.T, content []byte, args ...string) (dev, file string) {
	t.Helper()
	desk.NeedRoot(t, "it makes loop devices")
	desk.NeedProgram(t, "losetup", "mount")
	file = filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", append(args, "--find", "--show", file)...).CombinedOutput()
	if err != nil {
		desk.Lacks(t, "losetup: %v: %s", err, out)
	}
	dev = strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command("losetup", "--detach", dev).Run() })
	return dev, file
}

// TestRealDevices runs lsblk on real devices: an unused one, a mounted one, a read-only one, and
// one with a signature of LVM. Without udev, as in a container, wipefs examines them.
func TestRealDevices(t *testing.T) {
	desk.NeedProgram(t, "lsblk", "util-linux")
	free, _ := loop(t, 16<<20, "--sector-size", "4096")
	locked, _ := loop(t, 16<<20, "--read-only")
	mounted, _ := loop(t, 16<<20)
	if out, err := exec.Command("mkfs.ext4", "-q", "-L", "STICK", mounted).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	at := t.TempDir()
	if out, err := exec.Command("mount", mounted, at).CombinedOutput(); err != nil {
		desk.Lacks(t, "mount: %v: %s", err, out)
	}
	t.Cleanup(func() { exec.Command("umount", at).Run() })
	member, _ := loopOf(t, append([]byte("HM\x01\x00"), make([]byte, 16<<20-4)...)) // signature of LVM1
	_ = exec.Command("udevadm", "settle", "--timeout=10").Run()                     // waits for udev, if it runs
	devices, err := List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for dev, want := range map[string]string{free: "", locked: "read-only", mounted: "is mounted at " + at, member: "is part of LVM"} {
		d, err := devices.Find(dev)
		if err != nil {
			t.Fatal(err)
		}
		if all := strings.Join(d.Refusals, "\n"); !strings.Contains(all, want) || want == "" && all != "" || d.Size != 16<<20 {
			t.Errorf("%s: %+v, want %q", dev, d, want)
		}
	}
	if d, _ := devices.Find(free); d.Sector != 4096 {
		t.Errorf("sectors of %d", d.Sector)
	}
	if _, err := Open(mounted); !errors.Is(err, ErrBusy) {
		t.Errorf("a mounted device was opened: %v", err)
	}
	if _, err := Open(locked); err == nil {
		t.Error("a read-only device was opened")
	}
	// Any disks may be present on the machine that runs the test.
	t.Logf("%d disks", len(devices.Disks()))
}

// TestZeroByHand zeroes a device that cannot zero ranges itself and may return old content for
// discarded blocks.
func TestZeroByHand(t *testing.T) {
	dev, _ := loop(t, 16<<20)
	d, err := Open(dev)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	d.zeroes = false
	if err := d.Zero(4096, 9<<20); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 10<<20)
	if _, err := d.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	rest := b[4096+9<<20:]
	if b[0] != 'o' || rest[0] != 'o' || len(bytes.Trim(b[4096:][:9<<20], "\x00")) > 0 {
		t.Error("the range is not zero, or bytes outside of it were changed")
	}
	// Read at odd offsets and lengths, as for a partition table.
	for _, x := range []struct{ off, n int }{{1, 3}, {511, 2}, {4095, 4098}, {0, 512}} {
		got := make([]byte, x.n)
		if _, err := d.ReadAt(got, int64(x.off)); err != nil || !bytes.Equal(got, b[x.off:][:x.n]) {
			t.Errorf("%d bytes at %d: %v", x.n, x.off, err)
		}
	}
	if n, err := d.ReadAt(make([]byte, 100), 16<<20-50); n != 50 || err == nil {
		t.Errorf("across the end: %d %v", n, err)
	}
}

// TestReadsTheMedium checks that ReadAt returns the content of the medium, not of the page cache.
func TestReadsTheMedium(t *testing.T) {
	dev, file := loop(t, 16<<20)
	cache, err := os.Open(dev)
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	b := make([]byte, 4096)
	if _, err := cache.ReadAt(b, 0); err != nil { // fills the page cache
		t.Fatal(err)
	}
	d, err := Open(dev)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("changed below"), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := cache.ReadAt(b, 0); err != nil || !strings.HasPrefix(string(b), "old data") {
		t.Fatalf("the page cache lost the written data: %q, %v", b[:13], err)
	}
	if _, err := d.ReadAt(b, 0); err != nil || !strings.HasPrefix(string(b), "changed below") {
		t.Errorf("read %q, %v", b[:13], err)
	}
}

// TestOpenChanged replaces the file at a path between the check and the opening.
func TestOpenChanged(t *testing.T) {
	file := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		path   string
		isFile bool
	}{{"/dev/null", true}, {file, false}} {
		d, err := open(tc.path, tc.isFile)
		if !errors.Is(err, ErrChanged) {
			t.Errorf("%s: %v", tc.path, err)
		}
		if d != nil {
			d.Close()
		}
	}
	d, err := open(file, true)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if !d.IsFile() {
		t.Error("IsFile is false for a file")
	}
}

func TestOpenOther(t *testing.T) {
	dir := t.TempDir()
	for path, want := range map[string]string{
		dir: "directory", filepath.Join(dir, "none"): "edgebake devices", "/dev/null": "neither a block device nor a file",
	} {
		if _, err := Open(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// TestFileAmongDevices checks that a file in /dev is rejected. A program makes such a file if it
// writes to a missing disk. The file is in memory, so an image in it would be lost.
func TestFileAmongDevices(t *testing.T) {
	if _, err := IsFile("/dev/edgebake-none"); !errors.Is(err, fs.ErrNotExist) || strings.Contains(err.Error(), "truncate") {
		t.Errorf("%v", err)
	}
	desk.NeedRoot(t, "it makes a file in /dev")
	f, err := os.CreateTemp("/dev", "edgebake-*")
	if err != nil {
		desk.Lacks(t, "a writable /dev: %v", err)
	}
	defer os.Remove(f.Name())
	f.Close()
	if is, err := IsFile(f.Name()); is || err == nil || !strings.Contains(err.Error(), "rm "+f.Name()) {
		t.Errorf("%v, %v", is, err)
	}
	g, err := os.CreateTemp("/dev/shm", "edgebake-*")
	if err != nil {
		desk.Lacks(t, "a /dev/shm: %v", err)
	}
	defer os.Remove(g.Name())
	g.Close()
	if is, err := IsFile(g.Name()); !is || err != nil {
		t.Errorf("%v, %v", is, err)
	}
}

// TestUsers checks that the error names a program that writes to a disk without opening it
// exclusively, but not a program that only reads it.
func TestUsers(t *testing.T) {
	dev, _ := loop(t, 16<<20)
	if err := Users("/proc", dev); err != nil {
		t.Errorf("Users of an unused disk: %v", err)
	}
	for how, writes := range map[string]bool{"<": false, "<>": true, ">": true} {
		cmd := exec.Command("sh", "-c", "exec 3"+how+`"$0"; echo; exec sleep 60`, dev)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		out.Read(make([]byte, 1))
		err = Users("/proc", dev)
		if writes != (err != nil) || err != nil && !strings.Contains(err.Error(), fmt.Sprintf("(process %d): stop that program first", cmd.Process.Pid)) {
			t.Errorf("%s: %v", how, err)
		}
		cmd.Process.Kill()
		cmd.Wait()
	}
}
