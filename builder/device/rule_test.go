package device

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// shelf is a list of disks.
var shelf = []Disk{
	{Path: "/dev/nvme0n1", Bus: "nvme", Model: "Samsung SSD 980 PRO", Serial: "S5GX", Size: 500e9},
	{Path: "/dev/nvme1n1", Bus: "nvme", Model: "WD/BLACK SN770", Serial: "22A1", Size: 1000e9},
	{Path: "/dev/sda", Bus: "sata", Model: "ST2000DM008", Serial: "ZFL1", Size: 2000e9},
	{Path: "/dev/sdb", Bus: "sata", Model: "ST2000DM008", Serial: "ZFL2", Size: 2000e9},
	{Path: "/dev/sdc", Bus: "usb", Model: "Ultra", Serial: "4C53", Size: 32e9, Removable: true},
	{Path: "/dev/sdd", Bus: "usb", Model: "Portable SSD", Serial: "P1", Size: 4000e9},
	{Path: "/dev/mmcblk0", Bus: "mmc", Model: "", Serial: "0x1", Size: 64 << 30},
	{Path: "/dev/mmcblk1", Bus: "sd", Model: "", Serial: "0x2", Size: 32e9},
}

// TestRule checks which disks match a rule. It must not choose between disks that it cannot
// distinguish, and a removable disk must match only if the rule names its bus.
func TestRule(t *testing.T) {
	for _, c := range []struct{ rule, want string }{
		{"only", "nvme0n1 nvme1n1 sda sdb mmcblk0"},
		{"smallest", "mmcblk0"},
		{"largest", "sda sdb"},
		{"smallest-nvme", "nvme0n1"},
		{"largest-nvme", "nvme1n1"},
		{"smallest-sata", "sda sdb"},
		{"smallest-sata,serial=zfl2", "sdb"},
		{"bus=nvme", "nvme0n1 nvme1n1"},
		{"model=samsung*", "nvme0n1"},
		{"model=*black*", "nvme1n1"},
		{"model=Samsung", ""},
		{"serial=ZFL?", "sda sdb"},
		{"size>=600G,size<=1T", "nvme1n1"},
		{"size<=64Gi", "mmcblk0"},
		{"size<=64G", ""},
		{"size>=100G,smallest", "nvme0n1"},
		{"largest,size<=1500G", "nvme1n1"},
		{"bus=usb", "sdc sdd"},
		{"smallest-usb", "sdc"},
		{"bus=usb,size>=1T", "sdd"},
		{"bus=scsi", ""},
		{"bus=mmc", "mmcblk0"},
		{"bus=sd", "mmcblk1"},
		{"smallest-sd", "mmcblk1"},
		{"/dev/sdb", ""}, // this path need not exist on the test's computer
	} {
		r, err := ParseRule(c.rule)
		if err != nil {
			t.Errorf("%s: %v", c.rule, err)
			continue
		}
		var got []string
		for _, d := range r.Pick(shelf) {
			got = append(got, filepath.Base(d.Path))
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%s picks %q, want %q", c.rule, s, c.want)
		}
	}
}

// TestRuleByPath checks that a path, or a link to it, selects any kind of disk.
func TestRuleByPath(t *testing.T) {
	dir := t.TempDir()
	disk, link := filepath.Join(dir, "sdz"), filepath.Join(dir, "by-path")
	if err := os.WriteFile(disk, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("sdz", link); err != nil {
		t.Fatal(err)
	}
	got := Rule{path: link}.Pick([]Disk{{Path: "/dev/sda"}, {Path: disk, Bus: "usb"}})
	if len(got) != 1 || got[0].Path != disk {
		t.Errorf("%v", got)
	}
}

// TestRuleRefuses checks that all errors of a rule are reported together, with the allowed values.
func TestRuleRefuses(t *testing.T) {
	for rule, wants := range map[string][]string{
		"":                             {"a term is empty"},
		"biggest":                      {`unknown term "biggest"`},
		"smallest-floppy":              {`unknown bus "floppy": want one of nvme`},
		"bus=pci,size>=big":            {`unknown bus "pci"`, `reading size "big"`},
		"smallest,largest":             {"smallest or largest is given twice"},
		"smallest-nvme,bus=sata":       {"bus is given twice"},
		"only,smallest":                {"cannot be combined with other terms"},
		"/dev/sda,smallest":            {"/dev/sda names one disk"},
		"/etc/passwd":                  {"not below /dev"},
		"/dev/../etc/passwd":           {"not below /dev"},
		"model=":                       {"is not a pattern"},
		"model=[":                      {"is not a pattern"},
		"size>=2T,size<=1T":            {"no disk has both"},
		"size>=99999999999999T":        {"more than 64Ti"},
		"size=1T":                      {`unknown term "size=1T"`},
		"serial=a,serial=b":            {"serial is given twice"},
		"size>=0":                      {"write a whole number with"},
		"size>=100":                    {`"100": write a whole number with Mi, Gi or Ti (or k, M, G or T), e.g. 512Mi or 3Gi; did you mean "100Gi"?`},
		"size<=64,smallest":            {`did you mean "64Gi"?`},
		",":                            {"a term is empty"},
		"size>=1G, size>=2G,bus=zip,x": {"size is given twice", "unknown bus", `unknown term "x"`},
	} {
		_, err := ParseRule(rule)
		for _, want := range wants {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q: %v\nwant %s", rule, err, want)
			}
		}
	}
}

// TestStorageNetwork checks that a disk of a storage network is not internal, because other
// machines may use it too.
func TestStorageNetwork(t *testing.T) {
	for _, bus := range []string{"fc", "fcoe", "iscsi", "sbp"} {
		lun := Disk{Path: "/dev/sdz", Bus: bus, Size: 1}
		for rule, want := range map[string]int{"only": 0, "smallest": 0, "size>=1M": 0, "smallest-" + bus: 1, "bus=" + bus: 1} {
			r, err := ParseRule(rule)
			if err != nil {
				t.Fatal(err)
			}
			if got := r.Pick([]Disk{lun}); len(got) != want {
				t.Errorf("%s: %d disks on %s", rule, len(got), bus)
			}
		}
	}
}

// FuzzRule checks that a removable disk matches only if the rule names its bus.
func FuzzRule(f *testing.F) {
	for _, s := range []string{"only", "smallest-nvme", "model=[a-z]*,size>=1G", "/dev/sda"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseRule(text)
		if err != nil {
			return
		}
		for _, d := range r.Pick(shelf) {
			if !d.IsInternal() && !slices.Contains(external, r.bus) && r.path == "" {
				t.Errorf("%q picks %s", text, d.Path)
			}
		}
	})
}

// TestSame checks that Same notices every difference between two disks with the same path.
func TestSame(t *testing.T) {
	d := Disk{Path: "/dev/sda", Bus: "sata", Model: "Samsung", Serial: "S1"}
	if now := d; !d.Same(&now) {
		t.Error("a disk is not the same as itself")
	}
	for name, change := range map[string]func(*Disk){
		"path": func(d *Disk) { d.Path = "/dev/sdb" }, "bus": func(d *Disk) { d.Bus = "usb" },
		"model": func(d *Disk) { d.Model = "" }, "serial": func(d *Disk) { d.Serial = "S2" },
	} {
		now := d
		if change(&now); d.Same(&now) {
			t.Errorf("a change of %s is not detected", name)
		}
	}
}
