package firstboot

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/fat"
	"github.com/edgebake/edgebake/configs/ondisk/slot"
	"github.com/edgebake/edgebake/configs/ondisk/tree"
	"github.com/edgebake/edgebake/openyurt"
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
			if err := w.boot(); (err == nil) != c.taken || w.said("took the site of stick") != c.taken {
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
	if got := e.removableSlots(); !slices.Equal(got, []string{stickDev}) || probed > maxProbes {
		t.Errorf("%v after %d labels", got, probed)
	}
	for i := range 250 {
		w.put(fmt.Sprintf("%s/sdb%d/uevent", disk, i+2), "PARTNAME=EDGEBAKE\n")
	}
	if got := e.removableSlots(); len(got) != maxSticks {
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
		t.Fatal("it went on without a site")
	}
	if s := w.state(); s.Result != ondisk.ResultWaiting || !w.said("waiting for a site: stamp one") {
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
	if w.said("took the site of stick") {
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
			w.plug(w.site("network: {ntp: [ntp.example]}"))
		}
	}
	if err := w.run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if !w.said("took the site of stick") || !strings.Contains(w.slotSite(ownDev), "ntp.example") || w.joins != 1 {
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
	if !w.said("the one on stick /dev/sdb1 is not taken") {
		t.Errorf("console:\n%s", strings.Join(w.console, "\n"))
	}
}

func TestWithoutIPVS(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "ipvs: {disabled: true}")
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	hosts := w.get("/etc/hosts")
	if w.has(ondisk.IPVSConfig) || w.units[ondisk.UnitIPVSCare] == "active" || !strings.Contains(hosts, "\tapiserver.cluster.local") {
		t.Errorf("ipvscare %s, hosts:\n%s", w.units[ondisk.UnitIPVSCare], hosts)
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
	if !w.said("another site was found") || w.state().Result != ondisk.ResultDone {
		t.Errorf("console:\n%s", strings.Join(w.console, "\n"))
	}
}

func TestBrokenCorrectionKeepsTheFormerSite(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.stamp(ownDev, "kind: Site\nmasters: nonsense\n")
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if w.slotSite(ownDev) != "kind: Site\nmasters: nonsense\n" {
		t.Error("the person's file was written over")
	}
	if !w.said("the slot's site is not taken, the former one stays: the site has problems") {
		t.Error("nothing was said")
	}
}

func TestSlotBlankedByAPowerCutIsMadeAgain(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.slots[ownDev].WriteAt(make([]byte, 512), 0); err != nil {
		t.Fatal(err)
	}
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if !strings.Contains(w.slotSite(ownDev), "192.0.2.11:6443") {
		t.Error("the slot was not made again")
	}
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	for _, n := range w.names {
		if !strings.HasPrefix(n, "write "+ondisk.StateFile) && !strings.HasPrefix(n, "report") && n != "write "+ondisk.HealthyFile {
			t.Errorf("then it did %s", n)
		}
	}
}

func TestMastersChanged(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.stamp(ownDev, strings.Replace(w.site(), "192.0.2.13", "192.0.2.14", 1))
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if !strings.Contains(w.get(ondisk.IPVSConfig), "192.0.2.14:6443") || w.joins != 1 {
		t.Errorf("%d joins, %s", w.joins, w.get(ondisk.IPVSConfig))
	}
}

func TestCertificateExpiredOffline(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.powerOn()
	w.now = w.now.AddDate(2, 0, 0)
	if err := w.boot(); err == nil {
		t.Fatal("it went on with an expired certificate")
	}
	if !w.said("this node's certificate has expired") || !w.said("put a new token into site.yaml") {
		t.Fatalf("console:\n%s", strings.Join(w.console, "\n"))
	}
	w.cluster.nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.plug(w.site(withToken))
	w.powerOn()
	w.cluster.revive = true
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if w.joins != 2 {
		t.Errorf("%d joins", w.joins)
	}
}

// TestNetworkRollsBack: the corrected settings reach no master, the former
// ones do.
func TestNetworkRollsBack(t *testing.T) {
	t.Parallel()
	settings := func(addr string) string {
		return "network: {interfaces: [{name: eth0, addresses: [" + addr + "/24]}]}"
	}
	w := nativeWorld(t, settings("192.0.2.50"))
	// The link is up only with the first address.
	w.link = func() bool {
		files, _ := filepath.Glob(filepath.Join(w.root, "etc/systemd/network/*.network"))
		for _, f := range files {
			if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), "192.0.2.50/24") {
				return true
			}
		}
		return false
	}
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	w.stamp(ownDev, w.site(settings("192.0.3.50")))
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if !w.said("the former ones are back") || !w.link() {
		t.Errorf("console:\n%s", strings.Join(w.console, "\n"))
	}
	// It is not tried again at the next boot.
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	if w.said("the former ones are back") {
		t.Error("the bad settings were tried again")
	}
}

// TestReportIsSentAgain: the server is away when the node is done.
func TestReportIsSentAgain(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "report: {url: 'https://report.example/'}")
	e := w.env()
	post, away := e.Post, 3
	e.Post = func(ctx context.Context, url string, body []byte, proxy []string) error {
		if url != "https://report.example/" {
			t.Errorf("sent to %s", url)
		}
		if away--; away >= 0 {
			return errors.New("connection refused")
		}
		return post(ctx, url, body, proxy)
	}
	before := w.now
	if err := w.run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if len(w.posted) != 1 || !strings.Contains(string(w.posted[0]), `"result": "done"`) {
		t.Errorf("sent: %s", w.posted)
	}
	if took := w.now.Sub(before); took > time.Minute {
		t.Errorf("it took %s", took)
	}
	noSecret(t, w)

	// One that stays away is given up.
	w.powerOn()
	e = w.env()
	tries := 0
	e.Post = func(context.Context, string, []byte, []string) error {
		tries++
		return errors.New("connection refused")
	}
	if err := w.run(New(e)); err != nil || tries != reportTries {
		t.Errorf("%d tries, %v", tries, err)
	}
}

func TestClockBehind(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.now = time.Date(1970, 1, 1, 0, 0, 30, 0, time.UTC)
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if floor := time.Unix(1767225600, 0); w.now.Before(floor) {
		t.Errorf("the clock says %s", w.now)
	}
	if !strings.Contains(w.log.String(), "no time server answers") {
		t.Error("a time server was not even tried")
	}
}

// TestReportGoesThroughTheProxy: the site has no other way out.
func TestReportGoesThroughTheProxy(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "report: {url: 'https://report.example/'}", "network: {proxy: {https: 'http://proxy.example:3128', noProxy: [.shop.example]}}")
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if len(w.posted) == 0 || !slices.Contains(w.proxies, "HTTPS_PROXY=http://proxy.example:3128") ||
		!slices.ContainsFunc(w.proxies, func(v string) bool { return strings.HasPrefix(v, "NO_PROXY=") && strings.Contains(v, ".shop.example") }) {
		t.Errorf("%d reports through %s", len(w.posted), w.proxies)
	}
}

// TestSpread: a thousand nodes that boot together do not ask together, and none
// of them waits for long.
func TestSpread(t *testing.T) {
	t.Parallel()
	var early, late int
	for i := range 1000 {
		id := fmt.Sprintf("shop-%d", i)
		d := spread(id)
		if d < 0 || d >= spreadMax || d != spread(id) {
			t.Fatalf("%s waits %s", id, d)
		}
		if d < spreadMax/10 {
			early++
		}
		if d >= spreadMax*9/10 {
			late++
		}
	}
	if early > 150 || late > 150 || early < 50 || late < 50 {
		t.Errorf("%d of 1000 in the first tenth, %d in the last", early, late)
	}
	// Once a boot, before the first connection, also when the run begins again.
	w := nativeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.powerOn()
	w.offline, w.patience = true, 5*time.Minute
	e := w.env()
	var first time.Time
	began, dial := w.now, e.Dial
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if first.IsZero() {
			first = w.now
		}
		return dial(ctx, network, addr)
	}
	waits, sleep := 0, e.Sleep
	want := spread("edge-sn0042" + machineID(e))
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		if d == want {
			waits++
		}
		return sleep(ctx, d)
	}
	if err := w.run(New(e)); err == nil {
		t.Fatal("it was done, offline")
	}
	if first.Sub(began) != want || waits != 1 {
		t.Errorf("the first connection came after %s, expected %s; it waited %d times", first.Sub(began), want, waits)
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
			if got := slices.Contains(w.env().removableSlots(), dev); got != c.taken {
				t.Errorf("a stick: %t", got)
			}
		})
	}
}

// TestClockSynced: a clock that follows a time server is not set, whatever the
// slot says.
func TestClockSynced(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.now, w.synced = time.Date(2025, 12, 1, 0, 0, 0, 0, time.UTC), true
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if slices.Contains(w.names, "clock") || w.now.Year() != 2025 {
		t.Errorf("the clock was set to %s", w.now)
	}
}

// TestStampedByAWrongClock: what a computer of 2031 stamped does not take the
// node there.
func TestStampedByAWrongClock(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	img, err := slot.Make(slot.Contents{Info: ondisk.SlotInfo{Version: 1, Plan: "plan", Stamped: time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC).Unix()},
		Files: map[string][]byte{ondisk.SlotSite: []byte(w.site(withToken))}})
	if err != nil {
		t.Fatal(err)
	}
	w.slots[ownDev] = newMemDevice(img)
	w.now = time.Date(1970, 1, 1, 0, 0, 30, 0, time.UTC)
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if w.now.Year() != 2026 {
		t.Errorf("the clock says %s, the image is of 2026-01-01", w.now)
	}
}

// TestClockInTheFuture: the certificate only looks expired. A time server is
// asked before anything is made of it; while none answers, the clock is named
// beside the token, and once one does the node goes on with what it has.
func TestClockInTheFuture(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		lines []string
		after int // seconds until a time server answers; 0: none does
	}{
		{"a time server answers", nil, 20},
		{"with a new token in the slot", []string{withToken}, 20},
		{"late", nil, 15 * 60},
		{"none answers", nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := nativeWorld(t)
			w.patience = 30 * time.Minute
			if err := w.boot(); err != nil {
				t.Fatal(err)
			}
			truth := w.now
			w.patience = 30 * time.Minute
			cert := w.get(clientCert)
			w.stamp(ownDev, w.site(c.lines...))
			w.powerOn()
			w.now = truth.AddDate(5, 0, 0)
			e := w.env()
			set, end := false, w.now.Add(time.Duration(c.after)*time.Second)
			e.ClockSynced = func(context.Context) (bool, error) {
				if c.after > 0 && !set && w.now.After(end) {
					set, w.now = true, truth.Add(time.Minute)
					w.started[ondisk.UnitKubelet] = w.now
				}
				return set, nil
			}
			err := w.run(New(e))
			said := strings.Join(w.console, "\n")
			if w.joins != 1 || w.get(clientCert) != cert {
				t.Errorf("it joined anew\n%s", said)
			}
			if c.after == 0 {
				if err == nil || w.state().Result != ondisk.ResultWaiting || !w.said("follows no time server") || !w.said("network.ntp") {
					t.Errorf("%v, %s\n%s", err, w.state().Result, said)
				}
				return
			}
			if err != nil {
				t.Errorf("%v\n%s", err, said)
			}
			if w.said("FAILED") {
				t.Errorf("it gave up\n%s", said)
			}
		})
	}
}

// allDown switches every master off or on.
func (c *fakeCluster) allDown(down bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range []string{"192.0.2.11:6443", "192.0.2.12:6443", "192.0.2.13:6443"} {
		c.down[m] = down
	}
}

// TestMastersComeLate: nobody answers when the machine is switched on, for
// longer than kubeadm or any phase would wait.
func TestMastersComeLate(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.patience = 30 * time.Minute
	w.cluster.allDown(true)
	e := w.env()
	on, sleep := w.now, e.Sleep
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		err := sleep(ctx, d)
		if w.now.Sub(on) > 17*time.Minute {
			w.cluster.allDown(false)
		}
		return err
	}
	if err := w.run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if took := w.now.Sub(on); w.joins != 1 || took < 17*time.Minute || took > 20*time.Minute {
		t.Errorf("%d joins, Ready after %s", w.joins, took)
	}
	if !w.said("network: will be tried again: no master answers") {
		t.Errorf("console:\n%s", strings.Join(w.console, "\n"))
	}
}

// TestMastersGoDuringTheJoin: kubeadm is left waiting, and killed when its
// time is up.
func TestMastersGoDuringTheJoin(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.patience = 30 * time.Minute
	e := w.env()
	gone, back := time.Time{}, time.Time{}
	e.Run = func(ctx context.Context, c Cmd) error {
		if c.Args[0] != "kubeadm" || !gone.IsZero() {
			return w.exec(ctx, c)
		}
		w.cluster.allDown(true)
		gone = w.now
		for {
			if err := w.sleep(ctx, 10*time.Second); err != nil {
				back = w.now.Add(7 * time.Minute)
				return err
			}
		}
	}
	sleep := e.Sleep
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		err := sleep(ctx, d)
		if !back.IsZero() && w.now.After(back) {
			w.cluster.allDown(false)
		}
		return err
	}
	if err := w.run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if !w.said("join: will be tried again: context deadline exceeded") || w.joins != 1 {
		t.Errorf("%d joins, console:\n%s", w.joins, strings.Join(w.console, "\n"))
	}
	if late := w.now.Sub(back); late > 3*time.Minute {
		t.Errorf("Ready %s after the masters were back", late)
	}
	noSecret(t, w)
}

func TestFirstMasterDead(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.cluster.down["192.0.2.11:6443"] = true
	w.cluster.down["192.0.2.13:6443"] = true
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if server, name, err := kubeletServer(w.env()); err != nil || server != "https://apiserver.cluster.local:6443" || name != "kubernetes" {
		t.Errorf("kubelet goes to %s (%s), %v", server, name, err)
	}
}

// TestHealedInTheCluster: nobody comes to the machine when the stale Node was
// removed.
func TestHealedInTheCluster(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.patience = 30 * time.Minute
	w.cluster.register("edge-sn0042", "", "another")
	e := w.env()
	sleep := e.Sleep
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		if w.said("FAILED discovery") {
			w.cluster.mu.Lock()
			delete(w.cluster.nodes, "edge-sn0042")
			w.cluster.mu.Unlock()
		}
		return sleep(ctx, d)
	}
	if err := w.run(New(e)); err != nil || w.state().Result != ondisk.ResultDone {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
}

// TestJoinsThroughTheEndpoint: where the certificate has its name, kubelet
// need not be restarted after the join.
func TestJoinsThroughTheEndpoint(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "testdata/machine.txtar", "apiserver.cluster.local")
	w.stamp(ownDev, w.site(withToken))
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if server, name, err := kubeletServer(w.env()); err != nil || server != "https://apiserver.cluster.local:6443" || name != "" {
		t.Errorf("kubelet goes to %s (%s), %v", server, name, err)
	}
	if slices.Contains(w.names, "restart kubelet.service") {
		t.Error("kubelet was restarted for nothing")
	}
}

func TestAddressChanged(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.source = netip.MustParseAddr("192.0.2.77")
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	if hosts := w.get("/etc/hosts"); !strings.Contains(hosts, "192.0.2.77\tedge-sn0042") || strings.Contains(hosts, "192.0.2.50") || !strings.Contains(hosts, "localhost") {
		t.Errorf("hosts:\n%s", hosts)
	}
}

func TestNodeRenamedByTheSite(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.stamp(ownDev, strings.Replace(w.site(), "edge-{{.Serial}}", "other", 1))
	w.powerOn()
	if err := w.boot(); err == nil || !w.said("enrolled as edge-sn0042, the site calls it other") {
		t.Errorf("console:\n%s", strings.Join(w.console, "\n"))
	}
}

func TestStaleNodeKeepsItsLabels(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "labels: {zone: north}")
	w.cluster.register("edge-sn0042", "", "another")
	w.cluster.nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.cluster.revive = true
	w.cluster.labelsKept = true
	if err := w.boot(); err == nil {
		t.Fatal("it was said to be done without its label")
	}
	s := w.state()
	i := slices.IndexFunc(s.Phases, func(p ondisk.PhaseState) bool { return p.Name == "node-ready" })
	if p := s.Phases[i]; !strings.Contains(p.Error, "lacks labels of the site: zone=north; the node may not set them: labelling Node edge-sn0042: ") || !strings.Contains(p.Fix, "kubectl delete node edge-sn0042") {
		t.Errorf("%+v", p)
	}
	if !w.said("the cluster has a stale Node edge-sn0042") {
		t.Error("the stale Node was not said")
	}
	w.cluster.labelsKept = false
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	if !w.said("the Node edge-sn0042 lacked labels of the site, and has them now: zone=north") || w.cluster.nodes["edge-sn0042"].Metadata.Labels["zone"] != "north" {
		t.Errorf("it did not label its Node:\n%s", strings.Join(w.console, "\n"))
	}
}

// TestStaleEdgeNodeGetsItsLabels: as the administrator OpenYurt's webhook would
// refuse it.
func TestStaleEdgeNodeGetsItsLabels(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	w.cluster.register("edge-sn0042", "", "another")
	w.cluster.nodes["edge-sn0042"].Status.Conditions[0].Status = "Unknown"
	w.cluster.revive = true
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	labels := w.cluster.nodes["edge-sn0042"].Metadata.Labels
	if labels[openyurt.LabelEdgeWorker] != "true" || labels[openyurt.LabelNodePool] != "shanghai" {
		t.Errorf("labels: %v", labels)
	}
}

// TestPoolChanged: what kubelet registers with follows the site, so that the
// fix that is said is one.
func TestPoolChanged(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.cluster.labelsKept = true
	w.stamp(ownDev, strings.Replace(w.site("nodeType: edge", "nodePool: shanghai"), "nodePool: shanghai", "nodePool: beijing", 1))
	w.powerOn()
	if err := w.boot(); err == nil {
		t.Fatal("it was said to be done in its old pool")
	}
	if !w.said("lacks labels of the site: "+openyurt.LabelNodePool+"=beijing") || !w.said("kubectl delete node edge-sn0042, then restart the machine") {
		t.Errorf("%s", strings.Join(w.console, "\n"))
	}
	if flags := w.get(kubeadmFlags); !strings.Contains(flags, openyurt.LabelNodePool+"=beijing") || strings.Contains(flags, "shanghai") {
		t.Errorf("kubelet registers with %s", flags)
	}
}

// TestPoolOfTheCluster: what OpenYurt would refuse or undo is named.
func TestPoolOfTheCluster(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "nodeType: cloud", "nodePool: shanghai")
	if err := w.boot(); err == nil || !w.said("NodePool shanghai is of type Edge, and OpenYurt would turn this cloud node into an edge node") {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	w = nativeWorld(t, "nodeType: cloud", "nodePool: shanghai")
	w.cluster.poolType = "Cloud"
	if err := w.boot(); err != nil {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	// Where nothing converts it, a node that runs goes on, also with a change.
	w.cluster.poolType = ""
	w.units[openyurt.Unit] = "failed"
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	w = edgeWorld(t)
	w.cluster.noPool, w.cluster.refusesNode = true, true // as the webhook does
	if err := w.boot(); err == nil || w.state().Result == ondisk.ResultDone || !w.said("node-ready: will be tried again: the cluster has no NodePool shanghai") {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	w = edgeWorld(t)
	w.cluster.noPool, w.cluster.csr = true, "Denied" // which it also says
	if err := w.boot(); err == nil || !w.said("the cluster has no NodePool shanghai, and OpenYurt's webhook lets no Node be of a pool that is not there") {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
}

// TestAnotherYurthub: a program of another release gets flags that it does not
// know.
func TestAnotherYurthub(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	w.put(openyurt.Program, `yurthub: projectinfo.Info{GitVersion:"v1.6.1"}`)
	if err := w.boot(); err == nil || !w.said("yurthub on board is of v1.6, the Image says v1.7.0, which has other flags") {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
}

// TestSiteTurnedNative: first boot does not turn a node back, and says that
// nobody looks after its yurthub.
func TestSiteTurnedNative(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	if _, err := w.revert(); err == nil || !strings.Contains(err.Error(), "this machine's site says nodeType: edge") {
		t.Errorf("revert against the site: %v", err)
	}
	w.stamp(ownDev, w.site())
	w.powerOn()
	if err := w.boot(); err != nil || !w.said("this node goes through yurthub, and its site says nodeType: native") {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if _, err := w.revert(); err != nil {
		t.Fatal(err)
	}
	if flags := w.get(kubeadmFlags); strings.Contains(flags, "openyurt") {
		t.Errorf("kubelet registers with %s", flags)
	}
	w.powerOn()
	if err := w.boot(); err != nil || w.said("goes through yurthub") {
		t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
}

// TestBackoff passes real time, made up by synctest.
func TestBackoff(t *testing.T) {
	t.Parallel()
	e := newWorld(t, "testdata/machine.txtar").env() // its API servers live outside the bubble
	synctest.Test(t, func(t *testing.T) {
		var tried []time.Duration
		start := time.Now()
		e.Now = time.Now
		e.Sleep = func(ctx context.Context, d time.Duration) error {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(d):
				return nil
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
		defer cancel()
		r := &Runner{Env: e, Sources: func(*Env) string { return "" }}
		r.Phases = func(*Active) []Phase {
			return []Phase{{
				Name: "never", Doc: "never done", Timeout: 10 * time.Second,
				Check: func(context.Context, *Env) (Verdict, error) { return Todo, nil },
				Run: func(ctx context.Context, e *Env) error {
					tried = append(tried, time.Since(start))
					<-ctx.Done() // hangs until its deadline
					return ctx.Err()
				},
			}}
		}
		if err := r.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		if n := len(tried); n < 20 || n > 60 {
			t.Errorf("%d attempts in 20 minutes", n)
		}
		for i := 1; i < len(tried); i++ {
			pause := tried[i] - tried[i-1] - 10*time.Second
			want := Backoff(i, 0)
			if pause != want {
				t.Errorf("pause %d is %v, not %v", i, pause, want)
			}
		}
		if !r.Alive(time.Now().Add(-time.Minute)) {
			t.Error("the watchdog would have bitten")
		}
	})
	for n := 1; n < 40; n++ {
		low, high := Backoff(n, 0), Backoff(n, 0.999)
		if low <= 0 || high > backoffMax || high < low || high > 2*low {
			t.Errorf("attempt %d: %v to %v", n, low, high)
		}
	}
}

func TestImagesAreImportedOnce(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.put(ondisk.ImportImageDir+"/000-pause.tar", "archive")
	w.put(ondisk.ImportImageDir+"/"+ondisk.ImportIndexFile, `{"version":1,"archives":[{"file":"000-pause.tar","ref":"example.com/pause:1",
"sha256":"`+fmt.Sprintf("%x", sha256.Sum256([]byte("archive")))+`","platform":"linux/amd64","names":["example.com/pause@sha256:0"],"labels":{"a":"b"}}]}`)
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	var ran []string
	for _, n := range w.names {
		if c, ok := strings.CutPrefix(n, "run ctr --namespace k8s.io images "); ok {
			ran = append(ran, strings.ReplaceAll(c, w.root, ""))
		}
	}
	want := []string{
		"import --platform linux/amd64 " + ondisk.ImportImageDir + "/000-pause.tar",
		"tag --force example.com/pause:1 example.com/pause@sha256:0",
		"label example.com/pause:1 a=b", "label example.com/pause@sha256:0 a=b",
	}
	if !slices.Equal(ran, want) {
		t.Errorf("ran %q", ran)
	}
	w.powerOn()
	if err := w.boot(); err != nil || slices.ContainsFunc(w.names, func(n string) bool { return strings.Contains(n, "ctr") }) {
		t.Errorf("%v, %v", err, w.names)
	}
	w.put(ondisk.ImportImageDir+"/000-pause.tar", "damaged")
	w.powerOn()
	if err := w.boot(); err == nil || !w.said("FAILED images") {
		t.Errorf("a damaged archive: %v", err)
	}
}

// TestOfflineHubIsWaitedFor: yurthub takes a while to serve from its cache,
// and no master can be asked about certificates meanwhile.
func TestOfflineHubIsWaitedFor(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.powerOn()
	w.offline = true
	w.cluster.csr = "pending" // it is not ready
	e := w.env()
	sleep, naps := e.Sleep, 0
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		if naps++; naps == 4 {
			w.cluster.mu.Lock()
			w.cluster.csr = "Approved"
			w.cluster.mu.Unlock()
		}
		return sleep(ctx, d)
	}
	if err := w.run(New(e)); err == nil {
		t.Fatal("offline, and done")
	}
	if w.said("will be tried again") || !w.said("yurthub: done in") {
		t.Errorf("console:\n%s", strings.Join(w.console, "\n"))
	}
	if slices.Contains(w.names, "restart "+openyurt.Unit) {
		t.Error("a yurthub that was starting was restarted")
	}
}

// TestPortOpened: the port for other nodes of the pool, and no other.
func TestPortOpened(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.stamp(ownDev, w.site("nodeType: edge", "nodePool: shanghai", "yurthub: {openPort: true}"))
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if strings.Contains(w.rules, "10269") || !strings.Contains(w.rules, "10261, 10268") {
		t.Errorf("the rules are:\n%s", w.rules)
	}
}

// TestAFailedLookUndoesNothing: systemd does not answer once, on an edge node
// without a way to the masters. Kubelet stays behind yurthub.
func TestAFailedLookUndoesNothing(t *testing.T) {
	t.Parallel()
	w := edgeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	for _, before := range []bool{true, false} {
		w.powerOn()
		w.offline, w.patience = true, 10*time.Minute
		e := w.env()
		state, failed := e.UnitState, 0
		e.UnitState = func(ctx context.Context, unit string) (string, error) {
			if unit == ondisk.UnitKubelet && failed < 3 {
				failed++
				return "", errors.New("talking to systemd: context deadline exceeded")
			}
			return state(ctx, unit)
		}
		if !before { // after a Run that went well
			if err := os.Remove(filepath.Join(w.root, openyurt.KubeletConf)); err != nil {
				t.Fatal(err)
			}
			failed = 3
			unit := e.Unit
			e.Unit = func(ctx context.Context, verb, name string) error {
				if verb == "restart" && name == ondisk.UnitKubelet {
					failed = 0
				}
				return unit(ctx, verb, name)
			}
		}
		if err := w.run(New(e)); err == nil {
			t.Fatal("it was done, offline")
		}
		if failed != 3 {
			t.Errorf("it was asked %d times", failed)
		}
		if slices.Contains(w.names, "remove "+openyurt.KubeletConf) || !strings.Contains(w.get(kubeadmFlags), openyurt.KubeletConf) {
			t.Errorf("kubelet was turned away from yurthub: %s", w.names)
		}
	}
}
