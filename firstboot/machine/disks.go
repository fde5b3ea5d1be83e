package machine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/firstboot/facts"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// Facts returns the identity of this machine.
func (e *Env) Facts() siteconf.Machine { return facts.Read(e.Root) }

// Partition describes a partition as the kernel reports it.
type Partition struct {
	Name  string // "nvme0n1p2"
	Label string // GPT partition name
	UUID  string // GPT partition GUID; the kernel shows it since 6.9
	Start int64  // bytes
	Size  int64
}

// Disk is a disk with its partitions.
type Disk struct {
	Name  string
	Root  string // the partition mounted at /, if it is on this disk
	Size  int64
	Parts []Partition // sorted by Start
}

func (d *Disk) Part(label string) *Partition {
	for i := range d.Parts {
		if d.Parts[i].Label == label {
			return &d.Parts[i]
		}
	}
	return nil
}

// mountsAt returns the sysfs directories of the block devices mounted at place, in the order in which
// they were mounted.
func (e *Env) mountsAt(place string) (devices []string, err error) {
	b, err := e.Read("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 5 || f[4] != place {
			continue
		}
		if target, err := os.Readlink(e.Path("/sys/dev/block/" + f[2])); err == nil { // fails for an overlay or a tmpfs
			devices = append(devices, filepath.Join("/sys/dev/block", target))
		}
	}
	return devices, nil
}

func (e *Env) isPartition(device string) bool { return e.Exists(filepath.Join(device, "partition")) }

// MountedFrom returns the names of the partition mounted at place and of its disk, or "" if no
// partition is mounted there.
func (e *Env) MountedFrom(place string) (part, disk string) {
	devices, _ := e.mountsAt(place)
	for _, d := range slices.Backward(devices) { // the last mount hides earlier ones
		if e.isPartition(d) {
			return filepath.Base(d), filepath.Base(filepath.Dir(d))
		}
	}
	return "", ""
}

// LoaderPart returns the PARTUUID of the partition from which the boot loader was started, or "" if
// the loader does not report it.
func (e *Env) LoaderPart() string { return strings.ToLower(loaderText(e.Contents(LoaderPartFile))) }

// CountedEntry returns the path, below ESPDir, of the boot entry whose tries the loader counted at
// this boot, or "" if it counted none.
func (e *Env) CountedEntry() string {
	return strings.ReplaceAll(loaderText(e.Contents(BootCountFile)), `\`, "/")
}

// loaderText decodes a boot loader's variable: attributes, then UTF-16.
func loaderText(b []byte) string {
	var s strings.Builder
	for i := 4; i+1 < len(b); i += 2 {
		if r := rune(b[i]) | rune(b[i+1])<<8; r != 0 {
			s.WriteRune(r)
		}
	}
	return s.String()
}

// Variables of systemd's Boot Loader Interface.
const (
	LoaderPartFile = "/sys/firmware/efi/efivars/LoaderDevicePartUUID-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
	BootCountFile  = "/sys/firmware/efi/efivars/LoaderBootCountPath-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
)

// EntryName is the information in a boot entry's file name.
type EntryName struct {
	Root string // ROOT-A or ROOT-B
	// Trial means that the loader counts the boots; Left tries remain. systemd removes the count
	// once UnitHealthy has finished.
	Trial bool
	Left  int
}

// entryName matches the file names of edgebake's boot entries. During a trial, they contain the
// numbers of remaining and of failed tries (Automatic Boot Assessment).
var entryName = regexp.MustCompile(`^edgebake-([ab])(\+(\d+)(-\d+)?)?\.conf$`)

// ParseEntryName parses a boot entry's file name. ok is false if the entry is not edgebake's.
func ParseEntryName(file string) (n EntryName, ok bool) {
	m := entryName.FindStringSubmatch(file)
	if m == nil {
		return n, false
	}
	left, _ := strconv.Atoi(m[3]) // digits
	return EntryName{Root: "ROOT-" + strings.ToUpper(m[1]), Trial: m[2] != "", Left: left}, true
}

// ESPDir is where systemd mounts the EFI system partition on demand.
const ESPDir = "/efi"

// DisksWith lists the disks that have a partition with this PARTUUID.
func (e *Env) DisksWith(partUUID string) []string {
	entries, err := os.ReadDir(e.Path("/sys/block"))
	if err != nil || partUUID == "" {
		return nil
	}
	var out []string
	for _, en := range entries {
		dir := filepath.Join("/sys/block", en.Name())
		if target, err := os.Readlink(e.Path(dir)); err == nil {
			dir = filepath.Join("/sys/block", target)
		}
		d, err := e.readDisk(dir)
		if err != nil {
			continue
		}
		if slices.ContainsFunc(d.Parts, func(p Partition) bool { return p.UUID == partUUID }) {
			out = append(out, d.Name)
		}
	}
	return out
}

// RootDisk returns the disk from which this system was started, with the partition mounted at /.
// The result is cached for a pass; use LookUpRootDisk if the partitions' sizes may have changed.
func (e *Env) RootDisk() (*Disk, error) {
	if e.Pass != nil && e.Pass.disk != nil {
		return e.Pass.disk, nil
	}
	d, err := e.LookUpRootDisk()
	if err == nil && e.Pass != nil {
		e.Pass.disk = d
	}
	return d, err
}

// LookUpRootDisk is like RootDisk, without the cache.
func (e *Env) LookUpRootDisk() (*Disk, error) {
	devices, err := e.mountsAt("/")
	if err != nil {
		return nil, fmt.Errorf("looking for the root device: %w", err)
	}
	if len(devices) == 0 {
		return nil, errors.New("looking for the root device: no block device is mounted at /")
	}
	part := devices[0]
	if !e.isPartition(part) {
		return nil, fmt.Errorf("looking for the root device: %s is not a partition", filepath.Base(part))
	}
	d, err := e.readDisk(filepath.Dir(part))
	if err == nil {
		d.Root = filepath.Base(part)
	}
	return d, err
}

func (e *Env) readDisk(dir string) (*Disk, error) {
	d := &Disk{Name: filepath.Base(dir), Size: e.sectors(filepath.Join(dir, "size"))}
	entries, err := os.ReadDir(e.Path(dir))
	if err != nil {
		return nil, fmt.Errorf("reading disk %s: %w", d.Name, err)
	}
	for _, en := range entries {
		p := filepath.Join(dir, en.Name())
		if !e.Exists(filepath.Join(p, "partition")) {
			continue
		}
		part := Partition{Name: en.Name(), Start: e.sectors(filepath.Join(p, "start")), Size: e.sectors(filepath.Join(p, "size"))}
		for line := range strings.Lines(string(e.Contents(filepath.Join(p, "uevent")))) {
			if v, ok := strings.CutPrefix(strings.TrimSpace(line), "PARTNAME="); ok {
				part.Label = v
			}
			if v, ok := strings.CutPrefix(strings.TrimSpace(line), "PARTUUID="); ok {
				part.UUID = strings.ToLower(v)
			}
		}
		d.Parts = append(d.Parts, part)
	}
	slices.SortFunc(d.Parts, func(a, b Partition) int { return int(min(max(a.Start-b.Start, -1), 1)) })
	return d, nil
}

// sectors reads a number of 512-byte sectors from a file, and returns bytes.
func (e *Env) sectors(path string) int64 {
	n, err := strconv.ParseInt(e.Text(path), 10, 64)
	if err != nil {
		return 0
	}
	return n * 512
}

// MaxSticks and MaxProbes limit the search, because a stick may claim to have hundreds of
// partitions.
const (
	MaxSticks = 8
	MaxProbes = 64
)

// RemovableSlots lists the devices on sticks and cards that may contain a Site: partitions named
// EDGEBAKE, and FAT file systems with that label, with or without a partition table.
func (e *Env) RemovableSlots() (out []string) {
	for p := range e.removable {
		if len(out) == MaxSticks {
			break
		}
		if dev := "/dev/" + p.Name; p.Label == ondisk.LabelSlot || e.labelled(dev) {
			out = append(out, dev)
		}
	}
	return out
}

// RemovableParts lists the partitions of USB sticks and cards. For a device without partitions, it
// lists the device.
func (e *Env) RemovableParts() (out []string) {
	for p := range e.removable {
		out = append(out, "/dev/"+p.Name)
	}
	return out
}

// removable yields at most MaxProbes partitions of USB sticks and cards. A device without
// partitions counts as one.
func (e *Env) removable(yield func(Partition) bool) {
	entries, err := os.ReadDir(e.Path("/sys/block"))
	if err != nil {
		return
	}
	root, err := e.RootDisk()
	if err != nil {
		return // any disk might be the root disk
	}
	probes := 0
	for _, en := range entries {
		if en.Name() == root.Name {
			continue
		}
		dir := filepath.Join("/sys/block", en.Name())
		target, err := os.Readlink(e.Path(dir))
		if err == nil {
			dir = filepath.Join("/sys/block", target)
		}
		if !e.isRemovable(dir) {
			continue
		}
		d, err := e.readDisk(dir)
		if err != nil || d.Size == 0 {
			continue // removed meanwhile, or a card reader without a card
		}
		parts := d.Parts
		if len(parts) == 0 {
			parts = []Partition{{Name: d.Name}}
		}
		for _, p := range parts {
			if probes++; probes > MaxProbes || !yield(p) {
				return
			}
		}
	}
}

// isRemovable reports whether people plug this disk in and out. The kernel's attribute "removable"
// describes the medium in a drive; it is 0 for an SD card.
func (e *Env) isRemovable(disk string) bool {
	switch {
	case e.Text(filepath.Join(disk, "removable")) == "1", strings.Contains(disk, "/usb"):
		return true
	case e.Text(filepath.Join(disk, "device/type")) == "SD": // a soldered eMMC has the type MMC
		return true
	case strings.HasPrefix(filepath.Base(disk), "mspblk"): // Memory Stick
		return true
	}
	// Devices behind an external port, for example Thunderbolt.
	for dir := filepath.Dir(disk); dir != "/sys/devices" && len(dir) > 1; dir = filepath.Dir(dir) {
		if e.Text(filepath.Join(dir, "removable")) == "removable" {
			return true
		}
	}
	return false
}

// labelled reports whether a device has a FAT file system with the slot's label. It reads no more
// than the label.
func (e *Env) labelled(dev string) bool {
	label, err := e.SlotLabel(dev) // an error usually means another file system
	return err == nil && label == ondisk.LabelSlot
}

// OwnSlot returns the device of the slot on this system's disk.
func OwnSlot(e *Env) (string, error) {
	d, err := e.RootDisk()
	if err != nil {
		return "", err
	}
	p := d.Part(ondisk.LabelSlot)
	if p == nil {
		return "", fmt.Errorf("disk %s has no partition %s", d.Name, ondisk.LabelSlot)
	}
	return "/dev/" + p.Name, nil
}
