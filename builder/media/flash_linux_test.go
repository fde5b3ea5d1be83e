package media

import (
	"fmt"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/disktest"
)

// loop makes a loop device of the file, with the given sector size.
func loop(t testing.TB, path string, sector int64) string {
	t.Helper()
	desk.NeedRoot(t, "it makes loop devices")
	desk.NeedProgram(t, "losetup", "mount")
	out, err := osexec.Command("losetup", "--find", "--show", "--partscan", "--sector-size", fmt.Sprint(sector), path).CombinedOutput()
	if err != nil {
		desk.Lacks(t, "losetup: %v: %s", err, out)
	}
	dev := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := osexec.Command("losetup", "--detach", dev).CombinedOutput(); err != nil {
			t.Errorf("losetup --detach %s: %v: %s", dev, err, out)
		}
	})
	return dev
}

// TestFlashDevice flashes block devices with sectors of both sizes. They are three times as large
// as the image and full of old data. sgdisk, fsck.fat and e2fsck check the result.
func TestFlashDevice(t *testing.T) {
	for _, sector := range []int64{512, 4096} {
		t.Run(fmt.Sprint(sector), func(t *testing.T) {
			d := t.TempDir()
			image := filepath.Join(d, "g.raw.zst")
			want := goldenFor(t, image, 4<<20, true, sector, nil, nil)
			i, err := Inspect(image)
			if err != nil {
				t.Fatal(err)
			}
			m := blank(t, i.Size*3)
			dev := loop(t, m.path(), sector)
			target, err := device.Open(dev)
			if err != nil {
				t.Fatal(err)
			}
			if target.Size != i.Size*3 || target.Sector != sector {
				t.Errorf("the device has %d bytes, sectors of %d", target.Size, target.Sector)
			}
			if _, err := device.Open(dev); err != device.ErrBusy {
				t.Errorf("opened twice: %v", err)
			}
			s := site()
			f, err := PrepareFlash(image, FlashOptions{Site: &s, Stamp: StampOptions{Now: now}, Size: target.Size, Sector: target.Sector, Random: random})
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			r, err := f.Write(t.Context(), target)
			if err != nil {
				t.Fatal(err)
			}
			if r.Golden != want.Golden || !r.Verified {
				t.Errorf("%+v", r)
			}
			target.Reread()
			if err := target.Close(); err != nil {
				t.Fatal(err)
			}
			if err := Verify(t.Context(), dev, nil); err != nil {
				t.Error(err)
			}
			if out := disktest.Oracle(t, "sgdisk", "-v", dev); !strings.Contains(out, "No problems found") {
				t.Errorf("sgdisk: %s", out)
			}
			parts := partitionsOf(t, dev, sector)
			for label, oracle := range map[string][]string{
				ondisk.LabelESP: {"fsck.fat", "-n"}, ondisk.LabelSlot: {"fsck.fat", "-n"},
				ondisk.LabelRootA: {"e2fsck", "-fn"}, ondisk.LabelData: {"e2fsck", "-fn"},
			} {
				disktest.Oracle(t, oracle[0], append(oracle[1:], parts[label])...)
			}
			// Stamping a mounted device must fail: the mount's cache would overwrite the slot.
			claim, err := os.OpenFile(dev, os.O_RDONLY|os.O_EXCL, 0) // in use, as if a partition were mounted
			if err != nil {
				t.Fatal(err)
			}
			_, err = Stamp(t.Context(), dev, site(), StampOptions{Now: now})
			claim.Close()
			if err == nil || !strings.Contains(err.Error(), "unmount its partitions first") {
				t.Errorf("a mounted device was stamped: %v", err)
			}
			// Stamping a flashed disk must use its sector size.
			stamp(t, dev, StampOptions{})
			disktest.Oracle(t, "fsck.fat", "-n", parts[ondisk.LabelSlot])
			if err := Verify(t.Context(), dev, nil); err != nil {
				t.Error(err)
			}
		})
	}
}

// partitionsOf makes a loop device of each partition, since the kernel may not have scanned the
// disk.
func partitionsOf(t *testing.T, dev string, sector int64) map[string]string {
	t.Helper()
	i, err := Inspect(dev)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, p := range i.Partitions {
		said, err := osexec.Command("losetup", "--find", "--show", "--sector-size", fmt.Sprint(sector),
			"--offset", fmt.Sprint(p.Start), "--sizelimit", fmt.Sprint(p.Size), dev).CombinedOutput()
		if err != nil {
			t.Fatalf("losetup: %v: %s", err, said)
		}
		out[p.Label] = strings.TrimSpace(string(said))
		t.Cleanup(func() { osexec.Command("losetup", "--detach", out[p.Label]).Run() })
	}
	return out
}

// TestZero checks that Zero makes a range read as zeros and leaves its neighbours unchanged, even
// if the device cannot zero blocks itself.
func TestZero(t *testing.T) {
	m := blank(t, 64<<20)
	paths := map[string]string{"file": m.path()}
	if os.Geteuid() == 0 {
		other := blank(t, 64<<20)
		paths["device"] = loop(t, other.path(), 4096)
	}
	for name, path := range paths {
		target, err := device.Open(path)
		if err != nil {
			t.Fatal(name, err)
		}
		old := make([]byte, 4096)
		if _, err := target.ReadAt(old, 0); err != nil || old[0] == 0 {
			t.Fatalf("%s: %v", name, err)
		}
		target.Discard(32<<20, 16<<20)
		for _, x := range []struct{ off, n int64 }{{4096, 12 << 20}, {30 << 20, 10 << 20}} {
			if err := target.Zero(x.off, x.n); err != nil {
				t.Fatal(name, err)
			}
			b := make([]byte, x.n)
			if _, err := target.ReadAt(b, x.off); err != nil || strings.Trim(string(b), "\x00") != "" {
				t.Errorf("%s: %d bytes at %d are not zero, %v", name, x.n, x.off, err)
			}
		}
		b := make([]byte, 4096)
		if _, err := target.ReadAt(b, 0); err != nil || string(b) != string(old) {
			t.Errorf("%s: the neighbour changed, %v", name, err)
		}
		if err := target.Close(); err != nil {
			t.Error(err)
		}
	}
}
