// Package device lists the disks of this computer, with the reasons why a disk must not be
// overwritten. It opens a disk exclusively, and reads, writes and zeroes it without the page cache.
//
// lsblk (util-linux) reports mounts, swap, holders, and the signatures that udev found. It works
// without privileges. wipefs finds the signatures that udev does not know, for example in
// containers.
package device

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder/procgroup"
)

// Disk is a block device that could be overwritten as a whole.
type Disk struct {
	Path   string `json:"path"`
	Model  string `json:"model,omitempty"`
	Serial string `json:"serial,omitempty"`
	// Bus is the bus of the disk: usb, nvme, sata, mmc, sd …
	Bus       string `json:"bus,omitempty"`
	Size      int64  `json:"size"`
	Sector    int64  `json:"sector"` // bytes of a logical sector
	Removable bool   `json:"removable,omitempty"`
	// Holds describes the disk's contents for the person who decides, such as "sda1 ext4 ROOT".
	Holds []string `json:"holds,omitempty"`
	// Refusals lists the reasons why the disk must not be overwritten. It is empty if there are
	// none.
	Refusals []string `json:"refusals,omitempty"`
	// Members lists the Refusals that concern members of RAID, LVM or similar storage. If there are
	// no other Refusals, that storage is not in use, and overwriting the disk destroys only data of
	// that storage.
	Members []string `json:"-"`
}

// String returns path, model and serial number.
func (d *Disk) String() string {
	words := []string{d.Path}
	if d.Model != "" {
		words = append(words, d.Model)
	}
	if d.Serial != "" {
		words = append(words, "serial "+d.Serial)
	}
	return strings.Join(words, ", ")
}

// node is a device in the output of lsblk.
type node struct {
	Name        string   `json:"name"`
	Number      string   `json:"maj:min"`
	Path        string   `json:"path"`
	Type        string   `json:"type"`
	Size        int64    `json:"size"`
	Model       string   `json:"model"`
	Serial      string   `json:"serial"`
	Tran        string   `json:"tran"`
	Removable   bool     `json:"rm"`
	ReadOnly    bool     `json:"ro"`
	Sector      int64    `json:"log-sec"`
	FSType      string   `json:"fstype"`
	Label       string   `json:"label"`
	PartLabel   string   `json:"partlabel"`
	Mountpoints []string `json:"mountpoints"`
	Children    []node   `json:"children"`

	others     []string // further signatures on the device
	contentErr error    // the reason why the contents are unknown
}

// columns lists the lsblk columns we request.
const columns = "NAME,MAJ:MIN,PATH,TYPE,SIZE,MODEL,SERIAL,TRAN,RM,RO,LOG-SEC,FSTYPE,LABEL,PARTLABEL,MOUNTPOINTS"

// ask returns the output of lsblk.
func ask(ctx context.Context) ([]byte, error) {
	cmd := procgroup.Command(ctx, "lsblk", "--json", "--bytes", "--output", columns)
	cmd.Env = append(cmd.Env, "LC_ALL=C")
	out, err := cmd.Output()
	if e := (*exec.ExitError)(nil); errors.As(err, &e) {
		return nil, fmt.Errorf("listing disks: lsblk: %s: util-linux 2.37 or later is required", bytes.TrimSpace(e.Stderr))
	}
	if err != nil {
		return nil, fmt.Errorf("listing disks: %w: install util-linux", err)
	}
	return out, nil
}

// Devices contains all block devices of a computer.
type Devices struct{ top []node }

// List lists the block devices of this computer.
func List(ctx context.Context) (*Devices, error) {
	out, err := ask(ctx)
	if err != nil {
		return nil, err
	}
	d, err := parse(out)
	if err != nil {
		return nil, err
	}
	d.findCards("/sys/block")
	d.probe("/run/udev/data", func(path string) ([]signature, error) { return askWipefs(ctx, path) })
	return d, nil
}

// signature identifies a file system, or a part of larger storage.
type signature struct {
	Type  string `json:"type"`
	Usage string `json:"usage"`
	Label string `json:"label"`
}

// askWipefs returns the signatures on a device. It does not change the device.
func askWipefs(ctx context.Context, path string) ([]signature, error) {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s is missing in this container: run it with all devices and udev's database (-v /dev:/dev -v /run/udev:/run/udev:ro)", path)
	}
	cmd := procgroup.Command(ctx, "wipefs", "--json", "--output", "TYPE,USAGE,LABEL", path)
	if cmd.Err != nil { // not in PATH, which is usual for users other than root
		cmd = procgroup.Command(ctx, "/usr/sbin/wipefs", cmd.Args[1:]...)
	}
	cmd.Env = append(cmd.Env, "LC_ALL=C")
	out, err := cmd.Output()
	if e := (*exec.ExitError)(nil); errors.As(err, &e) {
		return nil, fmt.Errorf("wipefs: %w: %s", err, bytes.TrimSpace(e.Stderr))
	}
	if err != nil {
		return nil, fmt.Errorf("%w: install util-linux", err)
	}
	return parseSignatures(out)
}

func parseSignatures(out []byte) ([]signature, error) {
	var doc struct{ Signatures []signature }
	if len(bytes.TrimSpace(out)) == 0 {
		return nil, nil
	}
	if err := json.Unmarshal(out, &doc); err != nil {
		return nil, fmt.Errorf("parsing the output of wipefs: %w", err)
	}
	return doc.Signatures, nil
}

// probe reads the signatures of devices that udev has not examined. dir is the directory of udev's
// database, on which lsblk relies. Containers do not have it.
func (d *Devices) probe(dir string, ask func(path string) ([]signature, error)) {
	for i := range d.top {
		if !d.top[i].isDisk() {
			continue
		}
		d.top[i].walk(func(n *node) {
			if _, err := os.Stat(filepath.Join(dir, "b"+n.Number)); err == nil || n.FSType != "" || n.Size == 0 {
				return
			}
			found, err := ask(n.Path)
			n.contentErr = err
			for _, s := range found {
				switch {
				case s.Usage == "partition-table":
				case n.FSType == "":
					n.FSType, n.Label = s.Type, s.Label
				default:
					n.others = append(n.others, s.Type)
				}
			}
		})
	}
}

// findCards marks SD cards, which lsblk does not distinguish from eMMCs. lsblk does not report a
// card in a built-in reader as removable. block is the directory /sys/block.
func (d *Devices) findCards(block string) {
	for i := range d.top {
		n := &d.top[i]
		if !strings.HasPrefix(n.Name, "mmcblk") {
			continue
		}
		kind, err := os.ReadFile(filepath.Join(block, n.Name, "device", "type"))
		if err == nil && strings.HasPrefix(string(kind), "SD") {
			n.Tran = busSD
		}
	}
}

// parse decodes the output of lsblk.
func parse(out []byte) (*Devices, error) {
	var doc struct {
		Devices []node `json:"blockdevices"`
	}
	if err := json.Unmarshal(out, &doc); err != nil {
		return nil, fmt.Errorf("listing disks: parsing the output of lsblk: %w: util-linux 2.37 or later is required", err)
	}
	return &Devices{doc.Devices}, nil
}

// isDisk reports whether n is a disk with a medium. It excludes optical drives and RAM disks. After
// a network boot, a RAM disk (pmem) contains the downloaded boot disk.
func (n *node) isDisk() bool {
	return n.Size > 0 && (n.Type == "disk" || n.Type == "loop") &&
		!slices.ContainsFunc([]string{"zram", "mtdblock", "ram", "pmem"}, func(p string) bool { return strings.HasPrefix(n.Name, p) }) &&
		// The boot and RPMB areas of an eMMC are not disks to write an image to.
		!(strings.HasPrefix(n.Name, "mmcblk") && (strings.Contains(n.Name, "boot") || strings.HasSuffix(n.Name, "rpmb")))
}

// Disks lists the disks. Those that may be overwritten come first.
func (d *Devices) Disks() []Disk {
	out := []Disk{}
	for i := range d.top {
		// Use only the top level: a volume that spans several disks is listed below each of them.
		if d.top[i].isDisk() {
			out = append(out, d.top[i].disk())
		}
	}
	slices.SortStableFunc(out, func(a, b Disk) int {
		return min(len(a.Refusals), 1) - min(len(b.Refusals), 1)
	})
	return out
}

// Find returns the disk at path. It follows symbolic links.
func (d *Devices) Find(path string) (*Disk, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, err
	}
	for i := range d.top {
		top := &d.top[i]
		if top.Path == real {
			disk := top.disk()
			if !top.isDisk() {
				disk.Refusals = append(disk.Refusals, notDisk(top))
			}
			return &disk, nil
		}
		if n := top.find(real); n != nil {
			disk := n.disk()
			disk.Refusals = append([]string{fmt.Sprintf("this is a part of %s (%s), but an image needs a whole disk: name the disk", top.Path, n.Type)}, disk.Refusals...)
			return &disk, nil
		}
	}
	return nil, fmt.Errorf("the kernel lists no block device %s: see edgebake devices", real)
}

func notDisk(n *node) string {
	if n.Size == 0 {
		return "the drive has no medium, or its size is 0: insert a medium"
	}
	return fmt.Sprintf("this is not a disk but a device of type %s", n.Type)
}

func (n *node) find(path string) *node {
	for i := range n.Children {
		if n.Children[i].Path == path {
			return &n.Children[i]
		}
		if found := n.Children[i].find(path); found != nil {
			return found
		}
	}
	return nil
}

func (n *node) disk() Disk {
	d := Disk{
		Path: n.Path, Model: clean(n.Model), Serial: clean(n.Serial), Bus: n.Tran,
		Size: n.Size, Sector: n.Sector, Removable: n.Removable,
	}
	if d.Bus == "" && strings.HasPrefix(n.Name, "mmcblk") {
		d.Bus = "mmc"
	}
	n.walk(func(x *node) {
		what := strings.Fields(x.FSType + " " + clean(x.Label))
		if x.PartLabel != "" && x.PartLabel != x.Label {
			what = append(what, "("+clean(x.PartLabel)+")")
		}
		if len(what) > 0 {
			d.Holds = append(d.Holds, x.Name+" "+strings.Join(what, " "))
		}
	})
	d.Refusals, d.Members = n.refusals()
	return d
}

// clean removes control characters, which could affect the terminal: models and labels of disks are
// not trusted.
func clean(s string) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return -1
		}
		return r
	}, s))
}

func (n *node) walk(do func(*node)) {
	do(n)
	for i := range n.Children {
		n.Children[i].walk(do)
	}
}

// systemMounts lists the mount points of the running system.
var systemMounts = []string{"/", "/boot", "/boot/efi", "/efi", "/usr", "/var", "/home"}

// members maps libblkid's type of a device that is a part of larger storage to the kind of storage.
// Firmware RAIDs have a type for each vendor: see memberOf.
var members = map[string]string{
	"LVM2_member": "LVM", "LVM1_member": "LVM", "linux_raid_member": "a Linux RAID",
	"zfs_member": "a ZFS pool", "bcache": "a bcache", "drbd": "a DRBD volume", "drbdmanage_control_volume": "a DRBD volume",
	"VMFS_volume_member": "a VMFS volume", "ceph_bluestore": "a Ceph store", "mpath_member": "a multipath device",
	"stratis": "a Stratis pool", "oracleasm": "an Oracle ASM disk group",
}

// memberOf returns the kind of storage of which a device with this type is a part, or "".
func memberOf(fstype string) string {
	what := members[fstype]
	if what == "" && strings.HasSuffix(fstype, "_raid_member") {
		what = "a firmware RAID"
	}
	return what
}

// refusals returns all reasons (out) why a disk must not be overwritten. lost lists the reasons
// that are about a part of larger storage.
func (n *node) refusals() (out, lost []string) {
	add := func(format string, args ...any) string {
		s := fmt.Sprintf(format, args...)
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
		return s
	}
	if n.ReadOnly {
		add("the disk is read-only: look for a write-protect switch")
	}
	n.walk(func(x *node) {
		system := slices.ContainsFunc(x.Mountpoints, func(at string) bool { return slices.Contains(systemMounts, at) })
		for _, at := range x.Mountpoints {
			switch {
			case at == "":
			case at == "[SWAP]":
				add("%s is swap in use: swapoff %s", x.Name, x.Path)
			case slices.Contains(systemMounts, at):
				add("the running system uses this disk: %s is mounted at %s", x.Name, at)
			case !system: // do not suggest to unmount the running system
				add("%s is mounted at %s: umount %s", x.Name, clean(at), x.Path)
			}
		}
		for _, fstype := range append([]string{x.FSType}, x.others...) {
			what := memberOf(fstype)
			if what == "" {
				continue
			}
			no := add("%s is part of %s: if you no longer need that, run wipefs --all %s", x.Name, what, x.Path)
			if !slices.Contains(lost, no) {
				lost = append(lost, no)
			}
		}
		for i := range x.Children {
			if c := &x.Children[i]; c.Type != "part" {
				add("%s is in use by %s (%s): close or stop %[2]s first", x.Name, c.Path, c.Type)
			}
		}
	})
	if len(out) == 0 { // this matters only without other reasons
		n.walk(func(x *node) {
			if x.contentErr != nil {
				add("the content of %s is unknown: %v", x.Name, x.contentErr)
			}
		})
	}
	return out, lost
}
