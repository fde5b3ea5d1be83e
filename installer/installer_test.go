package installer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/overlays/siteconf"
	"github.com/edgebake/edgebake/test/buildtest"
)

// built returns the image that all tests share. Each test uses a copy.
var built = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "installer-test-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := buildtest.Write(dir, buildtest.Base(), nil); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(dir, "image.yaml"))
	if err != nil {
		return nil, err
	}
	parsed, err := configs.ParseImages("image.yaml", text)
	if err != nil {
		return nil, err
	}
	img := parsed[0]
	cache, err := fetch.Open(filepath.Join(dir, "cache"))
	if err != nil {
		return nil, err
	}
	defer cache.Close()
	out := filepath.Join(dir, "tiny.raw.zst")
	if err := builder.BuildEach(context.Background(), []builder.Job{{Image: img, Options: builder.Options{Dir: dir, Cache: cache, Output: out}}}, func(int, *builder.Result) error { return nil }); err != nil {
		return nil, err
	}
	return os.ReadFile(out)
})

const siteText = `apiVersion: edgebake.io/v1alpha1
kind: Site
nodeName: berlin-7
masters: ["10.0.0.1:6443"]
credentials: {token: abcdef.0123456789abcdef}
caCertHashes: ["sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]
`

const inventoryText = `apiVersion: edgebake.io/v1alpha1
kind: Inventory
defaults:
  masters: ["10.0.0.1:6443"]
  caCertHashes: ["sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]
sites:
- {name: shop-1, match: {serial: EB-ONE}, credentials: {token: aaaaaa.0123456789abcdef}}
- {name: shop-2, match: {macs: ["52:54:00:00:00:02"]}, credentials: {token: bbbbbb.0123456789abcdef}}
- {name: shop-3, match: {serial: EB-TWICE}, credentials: {token: cccccc.0123456789abcdef}}
- {name: shop-4, match: {macs: ["52:54:00:00:00:04"]}, credentials: {token: dddddd.0123456789abcdef}}
`

// room is a machine with an installer attached.
type room struct {
	t     *testing.T
	c     ondisk.Install
	src   Source
	disks []device.Disk
	me    siteconf.Machine
	said  []string
	// each is called with every printed line. It may change the machine or stop the installer.
	each func(line string)
	// bootErr is the firmware's error; next is the disk that it must boot next.
	bootErr error
	next    string
	ended   string // poweroff or reboot
	gone    bool
	slept   time.Duration
	stop    context.CancelFunc

	verified bool
}

// newRoom returns a machine whose installer's image has this document in its slot; "" means none.
func newRoom(t *testing.T, document string, sizes ...int64) *room {
	t.Helper()
	b, err := built()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	image := filepath.Join(dir, "image.raw.zst")
	if err := os.WriteFile(image, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if document != "" {
		var s media.Site
		if strings.Contains(document, "kind: Inventory") {
			s.Inventory, err = configs.ParseInventory(ondisk.SlotInventory, []byte(document))
		} else {
			s.Doc, err = configs.ParseSite(ondisk.SlotSite, []byte(document))
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := media.Stamp(t.Context(), image, s, media.StampOptions{Now: time.Now()}); err != nil {
			t.Fatal(err)
		}
	}
	p, err := media.OpenPayload(image, nil, media.StampOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	r := &room{t: t, src: Source{Image: media.ImageSource{Name: image}}, me: siteconf.Machine{Serial: "EB-ONE", MACs: []string{"52:54:00:00:00:09"}}}
	r.c = ondisk.Install{Version: ondisk.InstallVersion, ID: "0123456789abcdef0123456789abcdef", Image: p.Image.Name, Golden: p.Slot.Golden, Slot: p.SlotSum,
		Need: p.Need, Sector: p.Sector, Disk: device.OnlyDisk, Then: ondisk.ThenPowerOff}
	for i, size := range sizes {
		r.add(fmt.Sprintf("disk%d", i+1), size)
	}
	return r
}

// add adds a disk with old data to the machine.
func (r *room) add(name string, size int64) *device.Disk {
	r.t.Helper()
	path := filepath.Join(filepath.Dir(r.src.Image.Name), name)
	if err := os.WriteFile(path, []byte("old data"), 0o600); err != nil {
		r.t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		r.t.Fatal(err)
	}
	r.disks = append(r.disks, device.Disk{Path: path, Size: size, Sector: 512, Bus: "sata", Model: "Model of " + name, Serial: "S-" + name})
	return &r.disks[len(r.disks)-1]
}

var errStopped = errors.New("stopped by the test")

// run runs the installer until the machine stops, or until the installer has waited for limit.
func (r *room) run(limit time.Duration) error {
	r.t.Helper()
	ctx, stop := context.WithCancel(r.t.Context())
	defer stop()
	r.stop, r.ended, r.next, r.said, r.slept = stop, "", "", nil, 0
	return Run(ctx, r.c, &Env{
		Say: func(line string) {
			r.said = append(r.said, line)
			if r.each != nil {
				r.each(line)
			}
		},
		Sleep: func(ctx context.Context, d time.Duration) error {
			if r.slept += d; r.slept > limit {
				return errStopped
			}
			return ctx.Err()
		},
		Source:   func(context.Context) (Source, error) { return r.src, nil },
		Disks:    func(context.Context) ([]device.Disk, error) { return slices.Clone(r.disks), nil },
		Machine:  func() siteconf.Machine { return r.me },
		BootNext: func(path string, _ media.DiskContent) error { r.next = path; return r.bootErr },
		PowerOff: func() error { r.ended = "poweroff"; return nil },
		Reboot:   func() error { r.ended = "reboot"; return nil },
		Gone:     func(Source) bool { return r.gone },
	})
}

// want checks that all lines were printed.
func (r *room) want(lines ...string) {
	r.t.Helper()
	all := strings.Join(r.said, "\n")
	for _, l := range lines {
		if !strings.Contains(all, l) {
			r.t.Errorf("no message %q in:\n%s", l, all)
		}
	}
}

// untouched checks that disks still contain their old data.
func (r *room) untouched(paths ...string) {
	r.t.Helper()
	for _, p := range paths {
		f, err := os.Open(p)
		if err != nil {
			r.t.Fatal(err)
		}
		b := make([]byte, 8)
		_, err = f.ReadAt(b, 0)
		f.Close()
		if string(b) != "old data" {
			r.t.Errorf("%s has %q %v", p, b, err)
		}
	}
}

// installed checks that a disk has a complete image, and describes it.
func (r *room) installed(path string) *media.Info {
	r.t.Helper()
	if !r.verified { // verify once: it reads gigabytes
		r.verified = true
		if err := media.Verify(r.t.Context(), path, nil); err != nil {
			r.t.Error(err)
		}
	}
	i, err := media.Inspect(path)
	if err != nil {
		r.t.Fatal(err)
	}
	return i
}

const gb = 1e9

// TestInstall checks that the rule's disk is installed with the Site, and that the machine powers
// off. While the stick stays in the machine, each start must boot that disk and install nothing.
// The same applies to another stick; with --reinstall, it installs the disk again, but only once.
func TestInstall(t *testing.T) {
	r := newRoom(t, siteText, 12*gb, 8*gb)
	r.c.Disk = "smallest"
	if err := r.run(time.Hour); err != nil {
		t.Fatal(err)
	}
	disk1, disk2 := r.disks[0].Path, r.disks[1].Path
	if r.ended != "poweroff" || r.next != "" {
		t.Errorf("the installer ended with %s, BootNext is %q", r.ended, r.next)
	}
	r.want("installing tiny on "+disk2+", 8.0 GB, sata, Model of disk2, serial S-disk2 in 10 seconds", "write: 100 %", "verify: 100 %", "INSTALLED tiny on", "read back and verified", "powering off: remove the installer")
	r.untouched(disk1)
	if i := r.installed(disk2); i.Slot.Site == nil || i.Slot.Site.NodeName != "berlin-7" {
		t.Errorf("%+v", i.Slot)
	}
	for range 2 {
		if err := r.run(time.Hour); err != nil || r.ended != "reboot" || r.next != disk2 {
			t.Errorf("%v: the installer ended with %s, BootNext is %q", err, r.ended, r.next)
		}
		r.want("this machine is installed: " + disk2)
	}
	r.c.Reinstall = true
	if err := r.run(time.Hour); err != nil || r.ended != "reboot" || r.next != disk2 {
		t.Errorf("start after its own installation: %v: the installer ended with %s, BootNext is %q", err, r.ended, r.next)
	}
	// Attach another stick, and a disk that its rule would select.
	r.c.Reinstall, r.c.ID = false, "another"
	r.add("disk3", 7*gb)
	if err := r.run(time.Hour); err != nil || r.ended != "reboot" || r.next != disk2 {
		t.Errorf("another stick: %v: the installer ended with %s, BootNext is %q", err, r.ended, r.next)
	}
	r.untouched(disk1, r.disks[2].Path)
	r.c.Reinstall, r.c.Disk, r.c.Then = true, "serial=S-disk2", ondisk.ThenReboot
	before := r.installed(disk2).DiskGUID
	if err := r.run(time.Hour); err != nil || r.ended != "reboot" || r.next != disk2 {
		t.Errorf("reinstalling: %v: the installer ended with %s, BootNext is %q", err, r.ended, r.next)
	}
	r.want("INSTALLED")
	if after := r.installed(disk2).DiskGUID; after == before {
		t.Error("the disk was not installed again")
	}
	if err := r.run(time.Hour); err != nil || r.next != disk2 || slices.ContainsFunc(r.said, func(s string) bool { return strings.Contains(s, "INSTALLED") }) {
		t.Errorf("a forgotten stick with --reinstall installs again and again: %v\n%s", err, strings.Join(r.said, "\n"))
	}
}

// TestInstallsNoEdgebakeDisk checks that no other installer overwrites an installed disk, even if
// the disk is external and the rule selects it.
func TestInstallsNoEdgebakeDisk(t *testing.T) {
	r := newRoom(t, siteText, 8*gb)
	r.disks[0].Bus, r.c.Disk = "usb", "bus=usb"
	if err := r.run(time.Hour); err != nil || r.ended != "poweroff" {
		t.Fatalf("%v %s", err, r.ended)
	}
	before := r.installed(r.disks[0].Path).DiskGUID
	r.c.ID = "another"
	if err := r.run(time.Hour); err != nil || r.ended != "reboot" || r.next != r.disks[0].Path {
		t.Errorf("%v: the installer ended with %s, BootNext is %q", err, r.ended, r.next)
	}
	if after := r.installed(r.disks[0].Path).DiskGUID; after != before {
		t.Error("the disk was installed again")
	}
}

// TestDisksOfTheirOwn checks that one installer gives the disks of two machines different GUIDs.
func TestDisksOfTheirOwn(t *testing.T) {
	r := newRoom(t, siteText, 8*gb)
	if err := r.run(time.Hour); err != nil {
		t.Fatal(err)
	}
	one := r.installed(r.disks[0].Path).DiskGUID
	r.disks = nil
	two := r.add("two", 8*gb).Path
	if err := r.run(time.Hour); err != nil {
		t.Fatal(err)
	}
	if guid := r.installed(two).DiskGUID; guid == one {
		t.Errorf("both disks have the GUID %s", guid)
	}
}

// TestForgottenStickWithoutFirmware checks that, if the firmware's variables cannot be set, the
// installer waits until the stick is removed.
func TestForgottenStickWithoutFirmware(t *testing.T) {
	r := newRoom(t, siteText, 8*gb)
	if err := r.run(time.Hour); err != nil {
		t.Fatal(err)
	}
	r.bootErr = errors.New("no variables here")
	// After a network boot there is nothing to remove.
	if err := r.run(5 * time.Minute); !errors.Is(err, errStopped) || r.ended != "" {
		t.Errorf("%v %s", err, r.ended)
	}
	r.want("set the firmware to start its disk before the network, and switch the machine off and on (setting the firmware to start it failed: no variables here)")
	r.src.Disk = "/dev/sdz"
	if err := r.run(5 * time.Minute); !errors.Is(err, errStopped) || r.ended != "" {
		t.Errorf("%v %s", err, r.ended)
	}
	r.want("remove the installer, then the machine restarts from its disk (setting the firmware to start it failed: no variables here)")
	if n := len(r.said); n > 10 {
		t.Errorf("the installer printed %d lines in five minutes", n)
	}
	r.each = func(line string) { r.gone = strings.HasPrefix(line, "remove the installer") }
	if err := r.run(time.Hour); err != nil || r.ended != "reboot" {
		t.Errorf("%v %s", err, r.ended)
	}
}

// TestWaits checks that nothing is written unless the rule selects exactly one usable disk, and an
// Inventory has exactly one Site for the machine. The message must describe the disks or the
// machine.
func TestWaits(t *testing.T) {
	for _, c := range []struct {
		name, rule string
		sizes      []int64
		change     func(*room)
		want       []string
	}{
		{"two", "only", []int64{8 * gb, 9 * gb}, nil, []string{`2 disks match the rule "only", but exactly one must match`, "disk1, 8.0 GB, sata, Model of disk1, serial S-disk1", "disk2, 9.0 GB", "This machine: MAC 52:54:00:00:00:09, serial EB-ONE"}},
		{"two of a size", "smallest", []int64{8 * gb, 8 * gb, 9 * gb}, nil, []string{`2 disks match the rule "smallest"`}},
		{"none", "smallest-nvme", []int64{8 * gb}, nil, []string{`no disk matches the rule "smallest-nvme"`, "disk1, 8.0 GB, sata"}},
		{"no disks", "only", nil, nil, []string{"  none"}},
		{"small", "only", []int64{1 * gb}, nil, []string{"no disk matches the rule", "too small: the image needs "}},
		{"sectors", "only", []int64{8 * gb}, func(r *room) { r.disks[0].Sector = 4096 }, []string{"has sectors of 4096 bytes, but the image is for sectors of 512 (disk.sector)"}},
		{"the smallest is too small", "smallest", []int64{1 * gb, 8 * gb}, nil, []string{`the rule "smallest" selects a disk that cannot hold the image, and no other disk is used instead`, "disk1, 1.0 GB", "too small: the image needs ", "disk2, 8.0 GB"}},
		{"the smallest has other sectors", "smallest-sata", []int64{8 * gb, 9 * gb}, func(r *room) { r.disks[0].Sector = 4096 }, []string{"cannot hold the image", "has sectors of 4096 bytes"}},
		{"one of two is too small", "bus=sata", []int64{1 * gb, 8 * gb}, nil, []string{`2 disks match the rule "bus=sata"`}},
		{"stick", "only", []int64{8 * gb}, func(r *room) { r.disks[0].Bus = "usb" }, []string{"no disk matches the rule", ": removable"}},
		{"its own stick", "bus=usb", []int64{8 * gb}, func(r *room) { r.disks[0].Bus = "usb"; r.src.Disk = r.disks[0].Path }, []string{"no disk matches the rule", "  none"}},
		{"in use", "only", []int64{8 * gb}, func(r *room) { r.disks[0].Refusals = []string{"sda1 is mounted"} }, []string{"is not overwritten:", "  sda1 is mounted"}},
		{"member", "only", []int64{8 * gb}, func(r *room) {
			r.disks[0].Refusals = []string{"sda1 is part of LVM"}
			r.disks[0].Members = r.disks[0].Refusals
		}, []string{"is not overwritten:", "sda1 is part of LVM, or make an installer with --reinstall"}},
		{"member in use", "only", []int64{8 * gb}, func(r *room) {
			r.c.Reinstall = true
			r.disks[0].Refusals = []string{"sda1 is part of LVM", "sda1 is in use by dm-0"}
			r.disks[0].Members = r.disks[0].Refusals[:1]
		}, []string{"is not overwritten:", "sda1 is in use by dm-0"}},
		{"another inventory", "only", []int64{8 * gb}, func(r *room) { r.me = siteconf.Machine{Serial: "EB-NOBODY", MACs: []string{"52:54:00:00:00:77"}} },
			[]string{"the inventory has no Site for this machine, so nothing is installed. This machine: MAC 52:54:00:00:00:77, serial EB-NOBODY"}},
		{"two sites", "only", []int64{8 * gb}, func(r *room) { r.me = siteconf.Machine{Serial: "EB-TWICE", MACs: []string{"52:54:00:00:00:04"}} },
			[]string{"the Sites shop-3, shop-4 all match this machine"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRoom(t, inventoryText, c.sizes...)
			r.c.Disk = c.rule
			if c.change != nil {
				c.change(r)
			}
			if err := r.run(4 * time.Minute); !errors.Is(err, errStopped) || r.ended != "" {
				t.Errorf("%v %s", err, r.ended)
			}
			r.want(c.want...)
			if n := strings.Count(strings.Join(r.said, "\n"), r.said[1]); n < 3 || n > 6 {
				t.Errorf("the installer printed %q %d times in four minutes", r.said[1], n)
			}
			for _, d := range r.disks {
				r.untouched(d.Path)
			}
		})
	}
}

// TestSiteForOneMachine checks that a single Site is installed only on the machine that it matches.
func TestSiteForOneMachine(t *testing.T) {
	r := newRoom(t, siteText+"match: {serial: EB-OTHER}\n", 8*gb)
	if err := r.run(4 * time.Minute); !errors.Is(err, errStopped) || r.ended != "" {
		t.Errorf("%v %s", err, r.ended)
	}
	r.want("the Site is for another machine (match), so nothing is installed. This machine: MAC 52:54:00:00:00:09, serial EB-ONE")
	r.untouched(r.disks[0].Path)

	r = newRoom(t, siteText+"match: {serial: EB-ONE}\n", 8*gb)
	if err := r.run(time.Hour); err != nil || r.ended != "poweroff" {
		t.Fatalf("%v %s", err, r.ended)
	}
	r.installed(r.disks[0].Path)
}

// TestGoesOn checks that the installation begins when two disks match the rule and one of them is
// removed.
func TestGoesOn(t *testing.T) {
	r := newRoom(t, siteText, 8*gb, 9*gb)
	other := r.disks[1].Path
	r.each = func(line string) {
		if strings.Contains(line, "This machine:") {
			r.disks = r.disks[:1]
		}
	}
	if err := r.run(time.Hour); err != nil || r.ended != "poweroff" {
		t.Fatalf("%v %s", err, r.ended)
	}
	r.installed(r.disks[0].Path)
	r.untouched(other)
}

// TestLateDisk checks that the list of disks includes one that appears late.
func TestLateDisk(t *testing.T) {
	r := newRoom(t, siteText, 8*gb)
	first := r.disks[0].Path
	late := *r.add("late", 7*gb)
	r.disks = r.disks[:1]
	r.c.Disk = "smallest"
	asked := 0
	disks := func() []device.Disk {
		if asked++; asked == 3 {
			r.disks = append(r.disks, late)
		}
		return slices.Clone(r.disks)
	}
	ctx := t.Context()
	e := &Env{Say: func(string) {}, Sleep: func(context.Context, time.Duration) error { return nil },
		Disks: func(context.Context) ([]device.Disk, error) { return disks(), nil }}
	found, err := (&installation{Env: e, c: r.c}).allDisks(ctx, Source{})
	if err != nil || len(found) != 2 || found[0].Path != first || found[1].Path != late.Path {
		t.Errorf("%v %v", found, err)
	}
}

// TestDiskInTheCountdown checks that a disk that appears during the countdown is considered.
func TestDiskInTheCountdown(t *testing.T) {
	r := newRoom(t, siteText, 8*gb)
	r.c.Disk = "smallest"
	r.each = func(line string) {
		if strings.HasPrefix(line, "installing ") && len(r.disks) == 1 {
			r.add("late", 7*gb)
		}
	}
	if err := r.run(time.Hour); err != nil || r.ended != "poweroff" {
		t.Fatalf("%v %s", err, r.ended)
	}
	r.want("nothing was written, checking them again", "INSTALLED tiny on "+r.disks[1].Path)
	r.untouched(r.disks[0].Path)

	// If an edgebake disk appears during the countdown, nothing is installed.
	had := r.disks[1]
	r.disks = r.disks[:1]
	r.each = func(line string) {
		if strings.HasPrefix(line, "installing ") {
			r.disks = append(r.disks, had)
		}
	}
	_ = r.run(time.Hour)
	r.untouched(r.disks[0].Path)
}

// TestDiskDies checks that no other disk is chosen if writing to the chosen one fails and it is gone
// afterwards. The test truncates the image to make the write fail.
func TestDiskDies(t *testing.T) {
	r := newRoom(t, siteText, 7*gb, 8*gb)
	r.c.Disk = "smallest"
	image, err := os.ReadFile(r.src.Image.Name)
	if err != nil {
		t.Fatal(err)
	}
	dead := r.disks[0]
	r.each = func(line string) {
		switch {
		case line == "write: 0 %":
			if err := os.Truncate(r.src.Image.Name, 1<<20); err != nil {
				t.Error(err)
			}
		case strings.HasPrefix(line, "FAILED: "):
			if err := os.WriteFile(r.src.Image.Name, image, 0o600); err != nil {
				t.Error(err)
			}
			r.disks = slices.Clone(r.disks[1:])
			r.each = nil
		}
	}
	if err := r.run(time.Hour); !errors.Is(err, errStopped) || r.ended != "" {
		t.Errorf("%v %s", err, r.ended)
	}
	r.want("the disk "+dead.Path, "is gone. Its installation had begun")
	r.untouched(r.disks[0].Path)

	back := dead
	back.Path += ".back"
	if !isSame(&dead, &back) || isSame(&dead, &r.disks[0]) {
		t.Error("the disk was not recognized by its serial number under another path")
	}
}

// TestInventory checks that a machine gets its own Site of an Inventory, and no data of the others.
func TestInventory(t *testing.T) {
	r := newRoom(t, inventoryText, 8*gb)
	r.me = siteconf.Machine{Serial: "whatever", MACs: []string{"52:54:00:00:00:02"}}
	if err := r.run(time.Hour); err != nil || r.ended != "poweroff" {
		t.Fatal(err)
	}
	r.want("INSTALLED tiny for shop-2 on")
	i := r.installed(r.disks[0].Path)
	if i.Slot.State != media.SlotSite || i.Slot.Site == nil || i.Slot.Site.NodeName != "shop-2" || !i.Slot.Site.Token {
		t.Errorf("%+v", i.Slot)
	}
	s, err := media.ReadImageSlot(media.ImageSource{Name: r.disks[0].Path})
	if err != nil || s.Info.Stamped == 0 {
		t.Fatalf("%+v %v", s, err)
	}
	for _, other := range []string{"aaaaaa", "cccccc", "shop-1", "EB-ONE"} {
		if strings.Contains(string(s.Bytes), other) {
			t.Errorf("the slot has %s", other)
		}
	}
}

// TestInstallAgain interrupts an installation at different steps. The next start must install the
// disk.
func TestInstallAgain(t *testing.T) {
	for _, at := range []string{"write: 0 %", "verify: 90 %"} {
		r := newRoom(t, siteText, 8*gb)
		r.each = func(line string) {
			if line == at {
				r.stop()
			}
		}
		if err := r.run(time.Hour); !errors.Is(err, context.Canceled) {
			t.Fatalf("%s: %v", at, err)
		}
		found, err := media.ReadDiskContent(r.disks[0].Path)
		if err != nil || !found.Unfinished {
			t.Errorf("%s: %+v %v", at, found, err)
		}
		r.each = nil
		if err := r.run(time.Hour); err != nil || r.ended != "poweroff" {
			t.Errorf("%s: %v", at, err)
		}
		r.installed(r.disks[0].Path)
	}
}

// TestFails checks that failures are reported and the installation is retried: a disk that
// vanishes, an image that does not match the configuration, and a truncated image.
func TestFails(t *testing.T) {
	r := newRoom(t, siteText, 8*gb)
	path := r.disks[0].Path
	r.each = func(line string) {
		switch {
		case strings.HasPrefix(line, "installing "):
			_ = os.Rename(path, path+".away")
		case strings.HasPrefix(line, "FAILED: "):
			_ = os.Rename(path+".away", path)
			r.each = nil
		}
	}
	if err := r.run(time.Hour); err != nil || r.ended != "poweroff" {
		t.Fatalf("%v %s", err, r.ended)
	}
	r.want("FAILED: installing on "+path, "INSTALLED")

	r = newRoom(t, siteText, 8*gb)
	r.c.Slot = strings.Repeat("0", 64)
	if err := r.run(5 * time.Minute); !errors.Is(err, errStopped) {
		t.Error(err)
	}
	r.want("FAILED: the image is not the one that this installer was made for")
	r.untouched(r.disks[0].Path)

	r = newRoom(t, siteText, 8*gb)
	if err := os.Truncate(r.src.Image.Name, 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := r.run(5 * time.Minute); !errors.Is(err, errStopped) {
		t.Error(err)
	}
	r.want("FAILED: ", "truncated")
	r.untouched(r.disks[0].Path)
}

// TestAnotherDiskUnderItsName replaces the chosen disk during the countdown with another disk of
// the same name. That disk was not announced, so it must not be written.
func TestAnotherDiskUnderItsName(t *testing.T) {
	r := newRoom(t, siteText, 8*gb)
	r.each = func(line string) {
		if strings.HasPrefix(line, "installing ") {
			r.disks[0].Serial = "S-customer"
		}
	}
	r.c.Disk = "serial=S-disk1"
	if err := r.run(2 * time.Minute); !errors.Is(err, errStopped) || r.ended != "" {
		t.Errorf("%v %s", err, r.ended)
	}
	r.want("no disk matches the rule")
	r.untouched(r.disks[0].Path)
}

// TestConfig checks that the installer ends at once with a configuration of another version or with
// an invalid rule.
func TestConfig(t *testing.T) {
	r := newRoom(t, siteText, 8*gb)
	r.c.Version = 99
	if err := r.run(time.Hour); err == nil || !strings.Contains(err.Error(), "version 99") {
		t.Error(err)
	}
	r.c.Version, r.c.Disk = ondisk.InstallVersion, "the nice one"
	if err := r.run(time.Hour); err == nil || !strings.Contains(err.Error(), "unknown term") {
		t.Error(err)
	}
	file := filepath.Join(t.TempDir(), "install.json")
	if _, err := ReadConfig(file); err == nil {
		t.Error("ReadConfig accepted a missing file")
	}
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadConfig(file); err == nil || !strings.Contains(err.Error(), "make the installer again") {
		t.Error(err)
	}
}

// TestBootNext checks that repeated calls of bootNext create only one entry, and that BootNext
// names it. The bytes must match the UEFI specification.
func TestBootNext(t *testing.T) {
	r := newRoom(t, siteText, 8*gb)
	if err := r.run(time.Hour); err != nil {
		t.Fatal(err)
	}
	found, err := media.ReadDiskContent(r.disks[0].Path)
	if err != nil || !found.Ours || found.ESPNumber != 1 || found.Golden != r.c.Golden || found.Name != "tiny" {
		t.Fatalf("%+v %v", found, err)
	}
	dir := t.TempDir()
	if err := writeVar(dir, "Boot0000", []byte("of another")); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := bootNext(dir, "amd64", found); err != nil {
			t.Fatal(err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 3 {
		t.Errorf("%v %v", entries, err)
	}
	next, err := os.ReadFile(filepath.Join(dir, "BootNext-"+efiGlobal))
	if err != nil || string(next) != "\x07\x00\x00\x00\x01\x00" {
		t.Errorf("%q %v", next, err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "Boot0001-"+efiGlobal))
	if err != nil {
		t.Fatal(err)
	}
	guid, err := efiGUID(found.ESP.GUID)
	if err != nil {
		t.Fatal(err)
	}
	want := "\x07\x00\x00\x00" + "\x01\x00\x00\x00" + "\x5e\x00" + "e\x00d\x00g\x00e\x00b\x00a\x00k\x00e\x00\x00\x00" +
		"\x04\x01\x2a\x00" + "\x01\x00\x00\x00" + "\x00\x20\x00\x00\x00\x00\x00\x00" + "\x00\x00\x10\x00\x00\x00\x00\x00" + string(guid) + "\x02\x02" +
		"\x04\x04\x30\x00" + "\\\x00E\x00F\x00I\x00\\\x00B\x00O\x00O\x00T\x00\\\x00B\x00O\x00O\x00T\x00X\x006\x004\x00.\x00E\x00F\x00I\x00\x00\x00" + "\x7f\xff\x04\x00"
	if string(b) != want {
		t.Errorf("%q\nwant %q", b, want)
	}
	if err := bootNext(dir, "amd64", media.DiskContent{}); err == nil {
		t.Error("bootNext accepted a disk without an ESP")
	}
	if g, err := efiGUID("00112233-4455-6677-8899-aabbccddeeff"); err != nil || fmt.Sprintf("%x", g) != "33221100554477668899aabbccddeeff" {
		t.Errorf("%x %v", g, err)
	}
}
