package worldtest

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// StickDevice is the slot on the stick of Plug.
const StickDevice = "/dev/sdb1"

// Plug puts a USB stick with an EDGEBAKE slot into the machine.
func (w *World) Plug(site string) {
	w.T.Helper()
	disk := "/sys/devices/pci0/usb1/1-1/block/sdb"
	w.Put(disk+"/size", "131072\n")
	w.Put(disk+"/removable", "1\n")
	w.Put(disk+"/sdb1/partition", "1\n")
	w.Put(disk+"/sdb1/start", "2048\n")
	w.Put(disk+"/sdb1/size", "32768\n")
	w.Put(disk+"/sdb1/uevent", "PARTNAME=EDGEBAKE\n")
	link := filepath.Join(w.Root, "sys/block/sdb")
	if err := os.Remove(link); err != nil && !errors.Is(err, os.ErrNotExist) {
		w.T.Fatal(err)
	}
	if err := os.Symlink("../devices/pci0/usb1/1-1/block/sdb", link); err != nil {
		w.T.Fatal(err)
	}
	w.Stamp(StickDevice, site)
}

// Unplug removes the stick.
func (w *World) Unplug() {
	w.T.Helper()
	if err := os.Remove(filepath.Join(w.Root, "sys/block/sdb")); err != nil {
		w.T.Fatal(err)
	}
	delete(w.Slots, StickDevice)
}

// StampAt writes files to a slot with this date; 0 means no date, as from a laptop.
func (w *World) StampAt(dev string, stamped int64, files map[string]string) {
	w.T.Helper()
	c := slot.Contents{Info: ondisk.SlotInfo{Version: 1, Plan: "plan", Stamped: stamped}, Files: map[string][]byte{}}
	for name, data := range files {
		c.Files[name] = []byte(data)
	}
	w.Slots[dev] = w.NewSlot(c)
}

// Day returns the time of a day in the month of WorldStart, as in a slot.
func Day(n int) int64 { return time.Date(2026, 11, n, 0, 0, 0, 0, time.UTC).Unix() }

// SetStickPolicy gives the machine an Image with this policy (sites.removable) and these public
// keys.
func (w *World) SetStickPolicy(policy string, keys ...string) {
	w.T.Helper()
	var info map[string]any
	if err := json.Unmarshal([]byte(w.Get(ondisk.ImageInfoFile)), &info); err != nil {
		w.T.Fatal(err)
	}
	info["removable"], info["siteKeys"] = policy, append([]string{}, keys...)
	b, err := json.Marshal(info)
	if err != nil {
		w.T.Fatal(err)
	}
	w.Put(ondisk.ImageInfoFile, string(b))
}
