package disk

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/disktest"
)

// TestFullAndReadOnlyDisks runs itself again in a namespace, in which it can mount a small file
// system and a read-only one.
func TestFullAndReadOnlyDisks(t *testing.T) {
	disktest.Mounted(t, `mount -t tmpfs -o size=44m none "$0"; mkdir "$0/small" "$0/ro"; mount -t tmpfs -o ro none "$0/ro"`, fullAndReadOnly)
}

func fullAndReadOnly(t *testing.T, dir string) {
	small := filepath.Join(dir, "small")
	s, blobs := sample()
	l, err := Compute(s)
	if err != nil {
		t.Fatal(err)
	}
	write := func(path string, zstd bool) error {
		_, err := Write(t.Context(), path, s, l, blobs, WriteOptions{Slot: testSlot, Zstd: zstd})
		return err
	}
	// There is space for the raw image, but not for the compressed image in addition.
	if err := write(filepath.Join(small, "i.zst"), true); err != nil {
		t.Errorf("compressed: %v", err)
	}
	if err := os.Remove(filepath.Join(small, "i.zst")); err != nil {
		t.Fatal(err)
	}
	// Leave space for the contents, but not for the metadata of the file systems.
	fill := func(size int) {
		if err := os.WriteFile(filepath.Join(dir, "ballast"), make([]byte, size), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	fill(23 << 19)
	for _, name := range []string{"i", "i.zst"} {
		err = write(filepath.Join(small, name), name != "i")
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "is full; make room") {
			t.Errorf("%s: full while writing: %v", name, err)
		}
	}
	// Now there is too little space from the beginning, which must be reported before anything is
	// written.
	fill(30 << 20)
	err = write(filepath.Join(small, "i"), false)
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "too little for the image of at least") {
		t.Errorf("full before: %v", err)
	}
	if left := files(t, small); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	err = write(filepath.Join(dir, "ro", "i"), false)
	if !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), "cannot be written by this user") {
		t.Errorf("read-only: %v", err)
	}
}

// TestRepartGrowsDataAlone runs systemd-repart as at first boot, with the definition from the
// images.
func TestRepartGrowsDataAlone(t *testing.T) {
	s, blobs := sample()
	d := t.TempDir()
	path := filepath.Join(d, "image.raw")
	l, _ := build(t, path, s, blobs, WriteOptions{})
	if err := os.Truncate(path, 1<<30); err != nil {
		t.Fatal(err)
	}
	defs := filepath.Join(d, "defs")
	if err := os.Mkdir(defs, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(defs, "data.conf"), []byte("[Partition]\nType=var\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	disktest.Oracle(t, "systemd-repart", "--definitions="+defs, "--dry-run=no", "--no-pager", path)
	if out := disktest.Oracle(t, "sgdisk", "-v", path); !strings.Contains(out, "No problems found") {
		t.Errorf("sgdisk: %s", out)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tab, err := gpt.Read(f, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range tab.Partitions {
		want := l.Parts[i]
		if p.Name != want.Label || p.GUID != want.GUID || p.Start != want.Start {
			t.Errorf("%+v was %+v", p, want)
		}
		if grown := p.Size > want.Size; grown != (p.Name == ondisk.LabelData) || p.Name == ondisk.LabelData && p.Attributes != gpt.NoAuto {
			t.Errorf("%s has %d bytes, attributes %x; it had %d", p.Name, p.Size, p.Attributes, want.Size)
		}
	}
}

// TestKillLeavesNothing kills a process while it writes an image.
func TestKillLeavesNothing(t *testing.T) {
	if dir := os.Getenv("EDGEBAKE_TEST_KILL"); dir != "" {
		s, blobs := sample()
		l, err := Compute(s)
		if err != nil {
			t.Fatal(err)
		}
		Write(t.Context(), filepath.Join(dir, "i.zst"), s, l, blobs, WriteOptions{Slot: testSlot, Zstd: true, Progress: func(d, n int64) {
			if d > n/2 {
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}
		}})
		t.Fatal("still alive")
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestKillLeavesNothing$")
	cmd.Env = append(os.Environ(), "EDGEBAKE_TEST_KILL="+dir)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the child was not killed: %v\n%s", err, out)
	}
	o, err := file.Create(filepath.Join(dir, "i.zst"), 0o600, false)
	if err != nil {
		t.Fatal(err)
	}
	o.Discard()
	if o.Temp() != "" {
		desk.Lacks(t, "the file system of %s has no nameless files (O_TMPFILE)", dir)
	}
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
