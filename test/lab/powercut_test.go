package lab

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/edgebake/edgebake/test/desk"
)

// recorded makes QEMU write to a disk, and returns the record of the writes.
func recorded(t *testing.T, commands ...string) *os.File {
	t.Helper()
	tool := desk.NeedProgram(t, "qemu-io", "qemu-utils")
	dir := t.TempDir()
	disk, record := filepath.Join(dir, "disk"), filepath.Join(dir, "log")
	for _, f := range []string{disk, record} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Truncate(disk, 1<<20); err != nil {
		t.Fatal(err)
	}
	args := []string{"--image-opts", "driver=blklogwrites,file.driver=file,file.filename=" + disk + ",log.driver=file,log.filename=" + record}
	for _, c := range commands {
		args = append(args, "-c", c)
	}
	if out, err := exec.Command(tool, args...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	log, err := os.Open(record)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { log.Close() })
	return log
}

// TestRecordingCutsAnywhere compares successive cuts of one recording with replays of the record
// from its beginning.
func TestRecordingCutsAnywhere(t *testing.T) {
	log := recorded(t, "write -P 1 0 4k", "flush", "write -P 2 4k 4k", "write -P 3 0 4k", "write -f -P 4 8k 4k", "write -P 5 0 8k", "flush", "write -P 6 12k 4k")
	entries, err := readRecord(log)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "disk")
	disk, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	if err := disk.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	r := &Recording{Disk: path, disk: disk, log: log, entries: entries}
	if len(r.Flushes(0)) < 3 || r.At(1<<40) != r.Len() || r.At(0) != 0 {
		t.Errorf("%d entries, flushes %v, at the end %d", r.Len(), r.Flushes(0), r.At(1<<40))
	}
	for n := range r.Len() + 1 {
		for name, lose := range map[string]func() func() bool{
			"all lost":  func() func() bool { return func() bool { return true } },
			"none lost": func() func() bool { return func() bool { return false } },
			"some lost": func() func() bool { odd := false; return func() bool { odd = !odd; return odd } },
		} {
			if _, err := r.Cut(n, lose()); err != nil {
				t.Fatal(err)
			}
			want, decide := make(ram, 1<<20), lose()
			for i, e := range entries[:n] {
				var l Loss
				if e.n > 0 && l.count(i < lastFlush(entries[:n]) || e.fua, decide) {
					if err := e.write(log, want); err != nil {
						t.Fatal(err)
					}
				}
			}
			got, err := os.ReadFile(path)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("cut after %d of %d, %s: the disk differs (%v)", n, r.Len(), name, err)
			}
		}
	}
	if _, err := r.Cut(1, func() bool { return true }); err == nil {
		t.Error("a cut before an earlier one succeeded")
	}
}

type ram []byte

func (r ram) WriteAt(p []byte, off int64) (int, error) { return copy(r[off:], p), nil }

func TestPowerCutLosesWhatWasNotFlushed(t *testing.T) {
	// qemu-io flushes when it ends. The test truncates the record before that flush, because a
	// killed QEMU would not have written it.
	log := recorded(t, "write -P 1 0 4k", "flush", "write -P 2 4k 4k", "write -f -P 3 8k 4k", "write -z 0 512", "discard 64k 4k", "write -P 4 12k 4k")
	fi, err := log.Stat()
	if err != nil {
		t.Fatal(err)
	}
	const sector, page = 512, 4096
	// The entries: superblock, write, flush, write, FUA write (and a flush if QEMU emulates FUA),
	// zeroes, discard, write.
	whole := make([]byte, fi.Size())
	if _, err := log.ReadAt(whole, 0); err != nil {
		t.Fatal(err)
	}
	last := bytes.LastIndex(whole, bytes.Repeat([]byte{4}, page)) + page
	path := filepath.Join(t.TempDir(), "killed")
	if err := os.WriteFile(path, whole[:last], 0o600); err != nil {
		t.Fatal(err)
	}
	killed, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer killed.Close()

	all := make(ram, 1<<20)
	if _, err := replay(killed, all, func() bool { return false }); err != nil {
		t.Fatal(err)
	}
	want := make(ram, 1<<20)
	for i, b := range []byte{1, 2, 3, 4} {
		copy(want[i*page:], bytes.Repeat([]byte{b}, page))
	}
	clear(want[:sector])
	if !bytes.Equal(all, want) {
		t.Error("the disk differs from what was written although nothing was lost")
	}

	least := make(ram, 1<<20)
	loss, err := replay(killed, least, func() bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	if least[sector] != 1 || least[2*page] != 3 {
		t.Errorf("a flushed write (%d) or one with FUA (%d) was lost", least[sector], least[2*page])
	}
	if least[3*page] != 0 || loss.Dropped == 0 {
		t.Errorf("a write that was never flushed was always kept: %d; %+v", least[3*page], loss)
	}

	// The record can be replayed wherever it ends.
	for n := range last {
		if n%97 != 0 && n > 40 {
			continue
		}
		if err := os.WriteFile(path, whole[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		cut, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		_, err = replay(cut, make(ram, 1<<20), func() bool { return false })
		cut.Close()
		if err != nil && n >= sector {
			t.Errorf("cut at %d: %v", n, err)
		}
	}
}
