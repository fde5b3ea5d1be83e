package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/lab"
)

// TestFlashedDisk checks that a flashed disk boots by its own GUIDs and becomes a node, and that
// DATA fills it. It uses sectors of 512 and of 4096 bytes, which need different partition tables
// and FATs. The disk is three times as large as the image and has other contents.
func TestFlashedDisk(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	for guest, sector := range []int64{512, 4096} {
		t.Run(strconv.FormatInt(sector, 10), func(t *testing.T) {
			w.t = t
			w.flashed(guest, sector)
		})
	}
}

func (w *world) flashed(guest int, sector int64) {
	name := fmt.Sprintf("flashed-%d", sector)
	image := filepath.Join(w.lab.Dir, name+".raw.zst")
	w.must(w.bin, "build", w.document(name, sector), "--output", image, "--lock", filepath.Join(w.lab.Dir, name+".lock"))
	info, err := media.Inspect(image)
	if err != nil {
		w.t.Fatal(err)
	}
	disk := filepath.Join(w.lab.Dir, name+".disk")
	size := info.Size * 3 / 4096 * 4096
	if err := os.WriteFile(disk, []byte(strings.Repeat("old data", 1<<20)), 0o600); err != nil {
		w.t.Fatal(err)
	}
	if err := os.Truncate(disk, size); err != nil {
		w.t.Fatal(err)
	}
	dev, detach := w.loop(disk, sector)
	w.must(w.bin, "flash", image, dev, "--yes", "--site", w.site(guest, lab.Site{NodeName: name}))
	w.must(w.bin, "verify", dev)
	detach()

	vm := w.start(lab.VMConfig{Name: name, Image: disk, Disk: size, Sector: sector, Guest: guest})
	w.ready(vm, nil)
	said := w.mustOnNode(vm, "cat /sys/block/vda/queue/logical_block_size; blkid -o value -s PART_ENTRY_UUID -p $(findmnt -no SOURCE /); findmnt -no SOURCE /var")
	words := strings.Fields(said)
	flashed, err := media.Inspect(disk)
	if err != nil {
		w.t.Fatal(err)
	}
	if root := partitionOf(w.t, flashed, ondisk.LabelRootA); len(words) != 3 || words[0] != strconv.FormatInt(sector, 10) || words[1] != root.GUID || words[1] == partitionOf(w.t, info, ondisk.LabelRootA).GUID {
		w.t.Errorf("the machine runs on %q; the disk's ROOT-A is %s", words, root.GUID)
	}
	w.off(vm)
	after, detach := w.loop(w.disk(vm), sector)
	defer detach()
	w.checkDisk(after)
}

// document writes an Image like testdata/first.yaml, for disks with this sector size.
func (w *world) document(name string, sector int64) string {
	w.t.Helper()
	text, err := os.ReadFile(filepath.Join(w.root, "test/e2e/testdata/first.yaml"))
	if err != nil {
		w.t.Fatal(err)
	}
	doc := strings.Replace(string(text), "name: first", "name: "+name, 1)
	doc = strings.ReplaceAll(doc, "../../../build/images", filepath.Join(w.root, "build/images"))
	doc += fmt.Sprintf("disk: {sector: %d}\n", sector)
	path := filepath.Join(w.lab.Dir, name+".image.yaml")
	if err := os.WriteFile(path, []byte(doc), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return path
}

// loop makes a loop device of a file.
func (w *world) loop(file string, sector int64) (dev string, detach func()) {
	w.t.Helper()
	out, err := exec.Command("losetup", "--find", "--show", "--sector-size", fmt.Sprint(sector), file).CombinedOutput()
	if err != nil {
		w.t.Fatalf("losetup: %v: %s", err, out)
	}
	dev = strings.TrimSpace(string(out))
	// If a loop device is detached while it is open, it exists until this process closes it or
	// ends.
	f, err := os.Open(dev)
	if out, detachErr := exec.Command("losetup", "--detach", dev).CombinedOutput(); detachErr != nil {
		w.t.Errorf("losetup --detach %s: %v: %s", dev, detachErr, out)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	detach = func() { f.Close() }
	w.t.Cleanup(detach)
	return dev, detach
}
