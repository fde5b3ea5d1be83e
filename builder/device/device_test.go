package device

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// computer is the output of lsblk on a computer with many kinds of devices.
const computer = `{"blockdevices": [
 {"name":"loop0","path":"/dev/loop0","type":"loop","size":1048576,"model":null,"serial":null,"tran":null,"rm":false,"ro":true,"log-sec":512,"fstype":"squashfs","label":null,"partlabel":null,"mountpoints":["/snap/x"]},
 {"name":"sda","path":"/dev/sda","type":"disk","size":1000204886016,"model":"Samsung SSD 860","serial":"S3Z8","tran":"sata","rm":false,"ro":false,"log-sec":512,"fstype":null,"label":null,"partlabel":null,"mountpoints":[null],"children":[
   {"name":"sda1","path":"/dev/sda1","type":"part","size":536870912,"ro":false,"log-sec":512,"fstype":"vfat","label":null,"partlabel":"EFI","mountpoints":["/boot/efi"]},
   {"name":"sda2","path":"/dev/sda2","type":"part","size":999000000000,"ro":false,"log-sec":512,"fstype":"LVM2_member","label":null,"partlabel":null,"mountpoints":[null],"children":[
     {"name":"vg-root","path":"/dev/mapper/vg-root","type":"lvm","size":900000000000,"ro":false,"log-sec":512,"fstype":"ext4","label":null,"partlabel":null,"mountpoints":["/run/netns","/"]},
     {"name":"vg-swap","path":"/dev/mapper/vg-swap","type":"lvm","size":9000000000,"ro":false,"log-sec":512,"fstype":"swap","label":null,"partlabel":null,"mountpoints":["[SWAP]"]}]}]},
 {"name":"sdb","path":"/dev/sdb","type":"disk","size":31000000000,"model":"Ultra \u001b[31m","serial":"4C53","tran":"usb","rm":true,"ro":false,"log-sec":512,"fstype":null,"label":null,"partlabel":null,"mountpoints":[null],"children":[
   {"name":"sdb1","path":"/dev/sdb1","type":"part","size":30000000000,"ro":false,"log-sec":512,"fstype":"vfat","label":"STICK","partlabel":null,"mountpoints":["/media/me/STICK"]}]},
 {"name":"sdc","path":"/dev/sdc","type":"disk","size":31000000000,"model":"Ultra","serial":"4C54","tran":"usb","rm":true,"ro":false,"log-sec":512,"fstype":null,"label":null,"partlabel":null,"mountpoints":[null],"children":[
   {"name":"sdc1","path":"/dev/sdc1","type":"part","size":30000000000,"ro":false,"log-sec":512,"fstype":"vfat","label":"OLD","partlabel":"data","mountpoints":[null]}]},
 {"name":"sdd","path":"/dev/sdd","type":"disk","size":31000000000,"model":null,"serial":null,"tran":"sata","rm":false,"ro":false,"log-sec":4096,"fstype":"linux_raid_member","label":"nas:0","partlabel":null,"mountpoints":[null],"children":[
   {"name":"md0","path":"/dev/md0","type":"raid1","size":30000000000,"ro":false,"log-sec":4096,"fstype":"ext4","label":null,"partlabel":null,"mountpoints":[null]}]},
 {"name":"sde","path":"/dev/sde","type":"disk","size":0,"model":"Card Reader","serial":"1","tran":"usb","rm":true,"ro":false,"log-sec":512,"fstype":null,"label":null,"partlabel":null,"mountpoints":[null]},
 {"name":"sdf","path":"/dev/sdf","type":"disk","size":31000000000,"model":"Unused","serial":"R1","tran":"sata","rm":false,"ro":false,"log-sec":512,"fstype":null,"label":null,"partlabel":null,"mountpoints":[null],"children":[
   {"name":"sdf1","path":"/dev/sdf1","type":"part","size":30000000000,"ro":false,"log-sec":512,"fstype":"linux_raid_member","label":null,"partlabel":null,"mountpoints":[null]},
   {"name":"sdf2","path":"/dev/sdf2","type":"part","size":30000000000,"ro":false,"log-sec":512,"fstype":"crypto_LUKS","label":null,"partlabel":null,"mountpoints":[null],"children":[
     {"name":"open","path":"/dev/mapper/open","type":"crypt","size":3000,"ro":false,"log-sec":512,"fstype":"xfs","label":null,"partlabel":null,"mountpoints":["/mnt/a","/mnt/b"]}]}]},
 {"name":"sr0","path":"/dev/sr0","type":"rom","size":1073741312,"model":"DVD","serial":"2","tran":"sata","rm":true,"ro":false,"log-sec":2048,"fstype":null,"label":null,"partlabel":null,"mountpoints":[null]},
 {"name":"mmcblk0","path":"/dev/mmcblk0","type":"disk","size":31000000000,"model":null,"serial":"0xabc","tran":null,"rm":false,"ro":true,"log-sec":512,"fstype":null,"label":null,"partlabel":null,"mountpoints":[null]},
 {"name":"mmcblk0boot0","path":"/dev/mmcblk0boot0","type":"disk","size":4194304,"model":null,"serial":null,"tran":null,"rm":false,"ro":true,"log-sec":512,"fstype":null,"label":null,"partlabel":null,"mountpoints":[null]},
 {"name":"zram0","path":"/dev/zram0","type":"disk","size":4194304,"model":null,"serial":null,"tran":null,"rm":false,"ro":false,"log-sec":4096,"fstype":null,"label":null,"partlabel":null,"mountpoints":["[SWAP]"]},
 {"name":"pmem0","path":"/dev/pmem0","type":"disk","size":134217728,"model":null,"serial":null,"tran":null,"rm":false,"ro":false,"log-sec":512,"fstype":null,"label":null,"partlabel":null,"mountpoints":[null]}
]}`

// TestDisks checks that all reasons why a disk must not be overwritten are listed.
func TestDisks(t *testing.T) {
	devices, err := parse([]byte(computer))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]string{
		"/dev/sdc":   nil,
		"/dev/loop0": {"the disk is read-only", "loop0 is mounted at /snap/x: umount /dev/loop0"},
		"/dev/sda": {"the running system uses this disk: sda1 is mounted at /boot/efi", "sda2 is part of LVM", "wipefs --all /dev/sda2",
			"sda2 is in use by /dev/mapper/vg-root (lvm)", "the running system uses this disk: vg-root is mounted at /",
			"vg-swap is swap in use: swapoff /dev/mapper/vg-swap"},
		"/dev/sdb":     {"sdb1 is mounted at /media/me/STICK: umount /dev/sdb1"},
		"/dev/sdd":     {"sdd is part of a Linux RAID", "sdd is in use by /dev/md0 (raid1)"},
		"/dev/sdf":     {"sdf1 is part of a Linux RAID", "sdf2 is in use by /dev/mapper/open (crypt)", "mounted at /mnt/a", "mounted at /mnt/b"},
		"/dev/mmcblk0": {"the disk is read-only: look for a write-protect switch"},
	}
	disks := devices.Disks()
	if disks[0].Path != "/dev/sdc" || len(disks) != len(want) {
		t.Errorf("%d disks, first %s", len(disks), disks[0].Path)
	}
	for _, d := range disks {
		parts, ok := want[d.Path]
		if !ok || (len(d.Refusals) == 0) != (parts == nil) {
			t.Errorf("%s: %v", d.Path, d.Refusals)
		}
		all := strings.Join(d.Refusals, "\n")
		if strings.Contains(all, "/run/netns") {
			t.Errorf("%s: the refusal suggests unmounting a part of the running system:\n%s", d.Path, all)
		}
		for _, w := range parts {
			if !strings.Contains(all, w) {
				t.Errorf("%s: no %q in\n%s", d.Path, w, all)
			}
		}
	}
	i := slices.IndexFunc(disks, func(d Disk) bool { return d.Path == "/dev/sdb" })
	if d := disks[i]; d.Model != "Ultra [31m" || d.String() != "/dev/sdb, Ultra [31m, serial 4C53" || d.Bus != "usb" || !d.Removable {
		t.Errorf("%+v", d)
	}
	if d := disks[0]; !slices.Equal(d.Holds, []string{"sdc1 vfat OLD (data)"}) {
		t.Errorf("%s holds %q", d.Path, d.Holds)
	}
	if d := disks[slices.IndexFunc(disks, func(d Disk) bool { return d.Path == "/dev/mmcblk0" })]; d.Bus != "mmc" || d.Serial != "0xabc" {
		t.Errorf("%+v", d)
	}
}

// TestCards checks that SD cards are distinguished from eMMCs and count as removable.
func TestCards(t *testing.T) {
	sys := t.TempDir()
	for name, kind := range map[string]string{"mmcblk0": "MMC\n", "mmcblk1": "SD\n", "sda": "0\n"} {
		if err := os.MkdirAll(filepath.Join(sys, name, "device"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(sys, name, "device", "type"), []byte(kind), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	devices, err := parse([]byte(`{"blockdevices":[
 {"name":"mmcblk0","path":"/dev/mmcblk0","type":"disk","size":31000000000,"tran":null,"rm":false},
 {"name":"mmcblk1","path":"/dev/mmcblk1","type":"disk","size":31000000000,"tran":"mmc","rm":false},
 {"name":"mmcblk2","path":"/dev/mmcblk2","type":"disk","size":31000000000,"tran":null,"rm":false},
 {"name":"sda","path":"/dev/sda","type":"disk","size":31000000000,"tran":"sata","rm":false}]}`))
	if err != nil {
		t.Fatal(err)
	}
	devices.findCards(sys)
	want := map[string]string{"/dev/mmcblk0": "mmc", "/dev/mmcblk1": "sd", "/dev/mmcblk2": "mmc", "/dev/sda": "sata"}
	for _, d := range devices.Disks() {
		if d.Bus != want[d.Path] || d.IsInternal() != (d.Bus != "sd") {
			t.Errorf("%s: bus %s, internal %v", d.Path, d.Bus, d.IsInternal())
		}
	}
}

// TestFind checks that Find follows links, and that its errors describe devices that are not disks.
func TestFind(t *testing.T) {
	dir := t.TempDir()
	// Find resolves links, so the paths must exist. Here, files take the place of devices.
	real := func(name string) string { return filepath.Join(dir, name) }
	for _, n := range []string{"sdc", "sda2", "vg-root", "sr0", "sde", "sdz"} {
		if err := os.WriteFile(real(n), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(real("sdc"), real("by-id")); err != nil {
		t.Fatal(err)
	}
	text := strings.NewReplacer(`"/dev/mapper/`, `"`+dir+"/", `"/dev/`, `"`+dir+"/").Replace(computer) // dir may itself be in /dev
	devices, err := parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"by-id": "", "sda2": "this is a part of " + dir + "/sda (part)", "vg-root": "(lvm)", "sr0": "type rom", "sde": "no medium",
	} {
		d, err := devices.Find(real(name))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if all := strings.Join(d.Refusals, "\n"); !strings.Contains(all, want) || want == "" && all != "" {
			t.Errorf("%s: %q", name, all)
		}
	}
	if _, err := devices.Find(real("sdz")); err == nil || !strings.Contains(err.Error(), "lists no block device") {
		t.Errorf("got %v", err)
	}
	if _, err := devices.Find(real("none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestParseOther(t *testing.T) {
	for _, text := range []string{"", "lsblk: unknown column: MOUNTPOINTS", `{"blockdevices":[{"size":"1G"}]}`} {
		if _, err := parse([]byte(text)); err == nil || !strings.Contains(err.Error(), "util-linux 2.37") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// TestProbe checks that wipefs examines only the devices that udev has not examined.
func TestProbe(t *testing.T) {
	devices, err := parse([]byte(`{"blockdevices": [
		{"name": "sda", "maj:min": "8:0", "path": "/dev/sda", "type": "disk", "size": 1000, "children": [
			{"name": "sda1", "maj:min": "8:1", "path": "/dev/sda1", "type": "part", "size": 500},
			{"name": "sda2", "maj:min": "8:2", "path": "/dev/sda2", "type": "part", "size": 500, "fstype": "ext4"}]},
		{"name": "sdb", "maj:min": "8:16", "path": "/dev/sdb", "type": "disk", "size": 1000},
		{"name": "sdc", "maj:min": "8:32", "path": "/dev/sdc", "type": "disk", "size": 1000},
		{"name": "sdd", "maj:min": "8:48", "path": "/dev/sdd", "type": "disk", "size": 0},
		{"name": "sr0", "maj:min": "11:0", "path": "/dev/sr0", "type": "rom", "size": 1000}]}`))
	if err != nil {
		t.Fatal(err)
	}
	udev := t.TempDir()
	if err := os.WriteFile(filepath.Join(udev, "b8:16"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var asked []string
	devices.probe(udev, func(path string) ([]signature, error) {
		asked = append(asked, path)
		switch path {
		case "/dev/sda":
			return []signature{{Type: "gpt", Usage: "partition-table"}}, nil
		case "/dev/sda1":
			return []signature{{Type: "ext4", Usage: "filesystem", Label: "OLD"}, {Type: "LVM2_member", Usage: "raid"}}, nil
		}
		return nil, errors.New("wipefs: error: /dev/sdc: Input/output error")
	})
	if !slices.Equal(asked, []string{"/dev/sda", "/dev/sda1", "/dev/sdc"}) {
		t.Errorf("wipefs was run for %q", asked)
	}
	for path, want := range map[string]struct{ holds, refusals, members []string }{
		"/dev/sda": {[]string{"sda1 ext4 OLD", "sda2 ext4"}, []string{"sda1 is part of LVM: if you no longer need that, run wipefs --all /dev/sda1"}, []string{"sda1 is part of LVM: if you no longer need that, run wipefs --all /dev/sda1"}},
		"/dev/sdb": {},
		"/dev/sdc": {nil, []string{"the content of sdc is unknown: wipefs: error: /dev/sdc: Input/output error"}, nil},
	} {
		i := slices.IndexFunc(devices.top, func(n node) bool { return n.Path == path })
		if d := devices.top[i].disk(); !slices.Equal(d.Holds, want.holds) || !slices.Equal(d.Refusals, want.refusals) || !slices.Equal(d.Members, want.members) {
			t.Errorf("%s: %+v, want %q", path, d, want)
		}
	}
	for text, want := range map[string]int{"": 0, "\n": 0, `{"signatures": []}`: 0, `{"signatures": [{"type": "swap", "usage": "other", "label": null}]}`: 1, "nonsense": -1} {
		got, err := parseSignatures([]byte(text))
		if (err != nil) != (want < 0) || len(got) != max(want, 0) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

// TestWipefsOfWhatIsMissing checks that the error has a fix for a container with a disk but without
// its partitions.
func TestWipefsOfWhatIsMissing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sdb1")
	if _, err := askWipefs(t.Context(), path); err == nil || !strings.Contains(err.Error(), "sdb1 is missing in this container") || !strings.Contains(err.Error(), "-v /dev:/dev") {
		t.Error(err)
	}
}
