package firstboot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/tree"
)

const stickDev = "/dev/sdb1"

// plug puts a USB stick with an EDGEBAKE slot into the machine.
func (w *world) plug(site string) {
	w.t.Helper()
	disk := "/sys/devices/pci0/usb1/1-1/block/sdb"
	w.put(disk+"/size", "131072\n")
	w.put(disk+"/removable", "1\n")
	w.put(disk+"/sdb1/partition", "1\n")
	w.put(disk+"/sdb1/start", "2048\n")
	w.put(disk+"/sdb1/size", "32768\n")
	w.put(disk+"/sdb1/uevent", "PARTNAME=EDGEBAKE\n")
	link := filepath.Join(w.root, "sys/block/sdb")
	if err := os.Remove(link); err != nil && !errors.Is(err, os.ErrNotExist) {
		w.t.Fatal(err)
	}
	if err := os.Symlink("../devices/pci0/usb1/1-1/block/sdb", link); err != nil {
		w.t.Fatal(err)
	}
	w.stamp(stickDev, site)
}

// TestStickFromALaptop: what laptops make of a stick is a FAT file system
// with a label, in a partition without a name or on the whole device.
func TestStickFromALaptop(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		whole bool
		label string
		taken bool
	}{
		{"a partition", false, ondisk.LabelSlot, true},
		{"the whole device", true, ondisk.LabelSlot, true},
		{"somebody's pictures", false, "PICTURES", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, "testdata/machine.txtar")
			w.stamp(ownDev, "")
			w.plug("")
			img := make(memImage, 40<<20)
			site := tree.Node{Path: "SITE.YAML", Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, Data: tree.Bytes([]byte(w.site(withToken)))}}
			if err := fat.Write(img, []tree.Node{site}, nil, fat.Options{Type: 32, Label: c.label, Size: int64(len(img))}); err != nil {
				t.Fatal(err)
			}
			disk := "/sys/devices/pci0/usb1/1-1/block/sdb"
			delete(w.slots, stickDev)
			if c.whole {
				if err := os.RemoveAll(filepath.Join(w.root, disk, "sdb1")); err != nil {
					t.Fatal(err)
				}
				w.slots["/dev/sdb"] = newMemDevice(img)
			} else {
				w.put(disk+"/sdb1/uevent", "DEVTYPE=partition\n")
				w.slots[stickDev] = newMemDevice(img)
			}
			if err := w.boot(); (err == nil) != c.taken || w.said("took the Site of stick") != c.taken {
				t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
			}
			if read := slices.ContainsFunc(w.slotReads, func(dev string) bool { return dev != ownDev }); read != c.taken {
				t.Errorf("slots read: %v", w.slotReads)
			}
		})
	}
}

// TestAStickOfManyPartitions: a device may claim as many slots as it likes.
func TestAStickOfManyPartitions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "testdata/machine.txtar")
	w.stamp(ownDev, "")
	w.plug("")
	probed := 0
	e := w.env()
	e.SlotLabel = func(string) (string, error) {
		probed++
		return "PICTURES", nil
	}
	disk := "/sys/devices/pci0/usb1/1-1/block/sdb"
	for i := range 250 {
		name := fmt.Sprintf("/sdb%d", i+2)
		w.put(disk+name+"/partition", "1\n")
		w.put(disk+name+"/start", fmt.Sprint(4096+i, "\n"))
		w.put(disk+name+"/uevent", "DEVTYPE=partition\n")
	}
	if got := e.RemovableSlots(); !slices.Equal(got, []string{stickDev}) || probed > machine.MaxProbes {
		t.Errorf("%v after %d labels", got, probed)
	}
	for i := range 250 {
		w.put(fmt.Sprintf("%s/sdb%d/uevent", disk, i+2), "PARTNAME=EDGEBAKE\n")
	}
	if got := e.RemovableSlots(); len(got) != machine.MaxSticks {
		t.Errorf("%d slots", len(got))
	}
}

type memImage []byte

func (m memImage) WriteAt(p []byte, off int64) (int, error) { return copy(m[off:], p), nil }

func (w *world) unplug() {
	w.t.Helper()
	if err := os.Remove(filepath.Join(w.root, "sys/block/sdb")); err != nil {
		w.t.Fatal(err)
	}
	delete(w.slots, stickDev)
}

func (w *world) slotSite(dev string) string {
	w.t.Helper()
	c, err := slot.Read(w.slots[dev])
	if err != nil {
		w.t.Fatal(err)
	}
	return string(c.Files[ondisk.SlotSite])
}

func TestWaitsForASiteAndTakesAStick(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "testdata/machine.txtar")
	w.stamp(ownDev, "")
	if err := w.boot(); err == nil {
		t.Fatal("it went on without a Site")
	}
	if s := w.state(); s.Result != ondisk.ResultWaiting || !w.said("waiting for a Site: stamp one") {
		t.Fatalf("result %s\n%s", s.Result, strings.Join(w.console, "\n"))
	}
	w.plug(w.site(withToken))
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if strings.Contains(w.slotSite(ownDev), testToken) {
		t.Error("the own slot still holds the token")
	}
	// The stick may stay, or go: its site is taken once.
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	if w.said("took the Site of stick") {
		t.Error("the stick was taken twice")
	}
	w.unplug()
	w.powerOn()
	if err := w.boot(); err != nil || w.joins != 1 {
		t.Errorf("without the stick: %v, %d joins", err, w.joins)
	}
}

// TestSlowStick: it appears when the phase that would take it is over.
func TestSlowStick(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.powerOn()
	e := w.env()
	say := e.Console
	e.Console = func(line string) {
		say(line)
		if strings.Contains(line, "node-ready") && !w.has("/sys/block/sdb") {
			w.plug(w.site("network: {dns: [192.0.2.123]}"))
		}
	}
	if err := w.run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if !w.said("took the Site of stick") || !strings.Contains(w.slotSite(ownDev), "192.0.2.123") || w.joins != 1 {
		t.Errorf("%d joins, console:\n%s", w.joins, strings.Join(w.console, "\n"))
	}
}

func TestBadSiteOnAStickIsSaid(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "testdata/machine.txtar")
	w.stamp(ownDev, "")
	w.plug("kind: Site\nmasters: nonsense\n")
	if err := w.boot(); err == nil {
		t.Fatal("it went on")
	}
	if !w.said("waiting for a Site; stick /dev/sdb1 is not taken") {
		t.Errorf("console:\n%s", strings.Join(w.console, "\n"))
	}
}

// TestStickCorrectsAStoppedMachine: a permanent failure goes on by itself
// when a corrected site is brought.
func TestStickCorrectsAStoppedMachine(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.stamp(ownDev, strings.Replace(w.site(withToken), w.cluster.pin, "sha256:"+strings.Repeat("0", 64), 1))
	e := w.env()
	sleep := e.Sleep
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		if w.said("FAILED discovery") && !w.has("/sys/block/sdb") {
			w.plug(w.site(withToken))
		}
		return sleep(ctx, d)
	}
	if err := w.run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if !w.said("another Site was found") || w.state().Result != ondisk.ResultDone {
		t.Errorf("console:\n%s", strings.Join(w.console, "\n"))
	}
}

// TestCards: an SD card is a stick, and so is what hangs on an outer port,
// whatever the kernel says of its medium; the disk that was booted from and
// what is soldered in are none.
func TestCards(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, disk, file, text string
		own                    bool
		taken                  bool
	}{
		{"an SD card", "/sys/devices/platform/mmc_host/mmc0/mmc0:aaaa/block/mmcblk0", "device/type", "SD", false, true},
		{"soldered eMMC", "/sys/devices/platform/mmc_host/mmc1/mmc1:0001/block/mmcblk1", "device/type", "MMC", false, false},
		{"a disk inside", "/sys/devices/pci0000:00/0000:00:17.0/ata1/block/sdc", "device/type", "0", false, false},
		{"a Thunderbolt disk", "/sys/devices/pci0000:00/0000:00:1c.0/0000:04:00.0/nvme/nvme1/nvme1n1", "../../../removable", "removable", false, true},
		{"a disk of a fixed port", "/sys/devices/pci0000:00/0000:00:1c.0/0000:04:00.0/nvme/nvme1/nvme1n1", "../../../removable", "fixed", false, false},
		{"a Memory Stick", "/sys/devices/pci0000:00/0000:00:1e.0/memstick0/block/mspblk0", "device/uevent", "", false, true},
		{"the SD card that was booted from", "/sys/devices/virtio/block/vda", "device/type", "SD", true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, "testdata/machine.txtar")
			w.stamp(ownDev, "")
			name := filepath.Base(c.disk)
			w.put(filepath.Join(c.disk, c.file), c.text+"\n")
			dev := ownDev
			if !c.own {
				dev = "/dev/" + name + "p1"
				w.put(c.disk+"/size", "131072\n")
				w.put(c.disk+"/removable", "0\n")
				w.put(c.disk+"/"+name+"p1/partition", "1\n")
				w.put(c.disk+"/"+name+"p1/start", "2048\n")
				w.put(c.disk+"/"+name+"p1/size", "32768\n")
				w.put(c.disk+"/"+name+"p1/uevent", "PARTNAME=EDGEBAKE\n")
				if err := os.Symlink(".."+strings.TrimPrefix(c.disk, "/sys"), filepath.Join(w.root, "sys/block", name)); err != nil {
					t.Fatal(err)
				}
				w.stamp(dev, w.site(withToken))
			}
			if got := slices.Contains(w.env().RemovableSlots(), dev); got != c.taken {
				t.Errorf("a stick: %t", got)
			}
		})
	}
}
