package firstboot

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// TestStickFromALaptop checks that a FAT file system with the slot's label counts as a stick, in an
// unnamed partition or on the whole device. One with another label does not.
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
			w := newWorld(t)
			w.Stamp(worldtest.SlotDevice, "")
			w.Plug("")
			img := make(memImage, 40<<20)
			site := tree.Node{Path: "SITE.YAML", Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, Data: tree.Bytes([]byte(w.Site(worldtest.WithToken)))}}
			if err := fat.Write(img, []tree.Node{site}, nil, fat.Options{Type: 32, Label: c.label, Size: int64(len(img))}); err != nil {
				t.Fatal(err)
			}
			disk := "/sys/devices/pci0/usb1/1-1/block/sdb"
			delete(w.Slots, worldtest.StickDevice)
			if c.whole {
				if err := os.RemoveAll(filepath.Join(w.Root, disk, "sdb1")); err != nil {
					t.Fatal(err)
				}
				w.Slots["/dev/sdb"] = worldtest.NewMemDevice(img)
			} else {
				w.Put(disk+"/sdb1/uevent", "DEVTYPE=partition\n")
				w.Slots[worldtest.StickDevice] = worldtest.NewMemDevice(img)
			}
			if err := w.Boot(); (err == nil) != c.taken || w.ConsoleHas("using the Site of stick") != c.taken {
				t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			if read := slices.ContainsFunc(w.SlotReads, func(dev string) bool { return dev != worldtest.SlotDevice }); read != c.taken {
				t.Errorf("slots read: %v", w.SlotReads)
			}
		})
	}
}

// TestAStickOfManyPartitions checks that of a device with very many partitions, only a limited
// number is probed for the slot's label, and only a limited number counts as sticks.
func TestAStickOfManyPartitions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.Stamp(worldtest.SlotDevice, "")
	w.Plug("")
	probed := 0
	e := w.Env()
	e.SlotLabel = func(string) (string, error) {
		probed++
		return "PICTURES", nil
	}
	disk := "/sys/devices/pci0/usb1/1-1/block/sdb"
	for i := range 250 {
		name := fmt.Sprintf("/sdb%d", i+2)
		w.Put(disk+name+"/partition", "1\n")
		w.Put(disk+name+"/start", fmt.Sprint(4096+i, "\n"))
		w.Put(disk+name+"/uevent", "DEVTYPE=partition\n")
	}
	if got := e.RemovableSlots(); !slices.Equal(got, []string{worldtest.StickDevice}) || probed > machine.MaxProbes {
		t.Errorf("%v after %d labels", got, probed)
	}
	for i := range 250 {
		w.Put(fmt.Sprintf("%s/sdb%d/uevent", disk, i+2), "PARTNAME=EDGEBAKE\n")
	}
	if got := e.RemovableSlots(); len(got) != machine.MaxSticks {
		t.Errorf("%d slots", len(got))
	}
}

type memImage []byte

func (m memImage) WriteAt(p []byte, off int64) (int, error) { return copy(m[off:], p), nil }

func TestWaitsForASiteAndTakesAStick(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.Stamp(worldtest.SlotDevice, "")
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded without a Site")
	}
	if s := w.State(); s.Result != ondisk.ResultWaiting || !w.ConsoleHas("waiting for a Site: stamp one") {
		t.Fatalf("result %s\n%s", s.Result, strings.Join(w.Console, "\n"))
	}
	w.Plug(w.Site(worldtest.WithToken))
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if strings.Contains(w.SlotSite(worldtest.SlotDevice), worldtest.TestToken) {
		t.Error("the machine's own slot still has the token")
	}
	// The stick may stay or be removed, because its Site is used only once.
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	if w.ConsoleHas("using the Site of stick") {
		t.Error("the stick's Site was used twice")
	}
	w.Unplug()
	w.PowerOn()
	if err := w.Boot(); err != nil || w.Joins != 1 {
		t.Errorf("without the stick: %v, %d joins", err, w.Joins)
	}
}

// TestSlowStick checks that the Site of a stick is applied even if the stick appears only after the
// phase that reads sticks.
func TestSlowStick(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.PowerOn()
	e := w.Env()
	say := e.Console
	e.Console = func(line string) {
		say(line)
		if strings.Contains(line, "node-ready") && !w.Has("/sys/block/sdb") {
			w.Plug(w.Site("network: {dns: [192.0.2.123]}"))
		}
	}
	if err := w.Run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if !w.ConsoleHas("using the Site of stick") || !strings.Contains(w.SlotSite(worldtest.SlotDevice), "192.0.2.123") || w.Joins != 1 {
		t.Errorf("kubeadm joined %d times, console:\n%s", w.Joins, strings.Join(w.Console, "\n"))
	}
}

func TestBadSiteOnAStickIsSaid(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.Stamp(worldtest.SlotDevice, "")
	w.Plug("kind: Site\nmasters: nonsense\n")
	if err := w.Boot(); err == nil {
		t.Fatal("first boot succeeded, want an error")
	}
	if !w.ConsoleHas("waiting for a Site; stick /dev/sdb1 is ignored") {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
}

// TestStickCorrectsAStoppedMachine checks that after a permanent failure, first boot continues
// automatically when a corrected Site is plugged in.
func TestStickCorrectsAStoppedMachine(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.Stamp(worldtest.SlotDevice, strings.Replace(w.Site(worldtest.WithToken), w.Cluster.Pin, "sha256:"+strings.Repeat("0", 64), 1))
	e := w.Env()
	sleep := e.Sleep
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		if w.ConsoleHas("FAILED discovery") && !w.Has("/sys/block/sdb") {
			w.Plug(w.Site(worldtest.WithToken))
		}
		return sleep(ctx, d)
	}
	if err := w.Run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if !w.ConsoleHas("another Site was found") || w.State().Result != ondisk.ResultDone {
		t.Errorf("console:\n%s", strings.Join(w.Console, "\n"))
	}
}

// TestCards checks that SD cards and devices on external ports count as sticks, whatever the kernel
// reports about their medium. The boot disk and soldered storage do not.
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
			w := newWorld(t)
			w.Stamp(worldtest.SlotDevice, "")
			name := filepath.Base(c.disk)
			w.Put(filepath.Join(c.disk, c.file), c.text+"\n")
			dev := worldtest.SlotDevice
			if !c.own {
				dev = "/dev/" + name + "p1"
				w.Put(c.disk+"/size", "131072\n")
				w.Put(c.disk+"/removable", "0\n")
				w.Put(c.disk+"/"+name+"p1/partition", "1\n")
				w.Put(c.disk+"/"+name+"p1/start", "2048\n")
				w.Put(c.disk+"/"+name+"p1/size", "32768\n")
				w.Put(c.disk+"/"+name+"p1/uevent", "PARTNAME=EDGEBAKE\n")
				if err := os.Symlink(".."+strings.TrimPrefix(c.disk, "/sys"), filepath.Join(w.Root, "sys/block", name)); err != nil {
					t.Fatal(err)
				}
				w.Stamp(dev, w.Site(worldtest.WithToken))
			}
			if got := slices.Contains(w.Env().RemovableSlots(), dev); got != c.taken {
				t.Errorf("a stick: %t", got)
			}
		})
	}
}
