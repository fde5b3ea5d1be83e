package update

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// bootsB boots the box from ROOT-B with this boot entry.
func (b *box) bootsB(entry string) {
	b.t.Helper()
	b.put("proc/self/mountinfo", "20 1 254:4 / / rw - ext4 /dev/root rw\n")
	dir := filepath.Join(b.root, "efi/loader/entries")
	if err := os.Rename(filepath.Join(b.root, entryB), filepath.Join(dir, entry)); err != nil {
		b.t.Fatal(err)
	}
	text := "\x06\x00\x00\x00"
	for _, c := range `\loader\entries\` + entry {
		text += string(c) + "\x00"
	}
	b.put(machine.BootCountFile, text+"\x00\x00")
	b.put(ondisk.ImageInfoFile, b.infoOf("new.raw.zst"))
}

// blessed removes the count from the boot entry, as systemd does.
func (b *box) blessed(entry string) {
	b.t.Helper()
	dir := filepath.Join(b.root, "efi/loader/entries")
	if err := os.Rename(filepath.Join(dir, entry), filepath.Join(dir, "edgebake-b.conf")); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) status() string {
	if s := Status(b.env()); s != nil {
		return s.Status + " " + s.Root
	}
	return ""
}

func (b *box) espInfo() (i ondisk.ImageInfo) {
	b.t.Helper()
	if err := json.Unmarshal([]byte(b.get("efi/"+ondisk.ESPImageInfo)), &i); err != nil {
		b.t.Fatal(err)
	}
	return i
}

// TestRelease checks that once the new system is kept, and not before, the EFI system partition
// describes it, with this disk's partitions. Downloaded files are then removed.
func TestRelease(t *testing.T) {
	b := newBox(t)
	flashed := b.espInfo()
	b.put("efi/"+ondisk.ESPSBOM, "{}")
	if err := Finish(t.Context(), b.env()); err != nil || b.status() != "" {
		t.Errorf("without an update: %v, %s", err, b.status())
	}
	if err := b.order(Options{Image: b.inside("new.raw.zst")}); err != nil {
		t.Fatal(err)
	}
	if s := b.status(); s != "pending ROOT-B" {
		t.Error(s)
	}
	const entry = "edgebake-b+2-1.conf"
	b.bootsB(entry)
	if s := b.status(); s != "trial ROOT-B" {
		t.Error(s)
	}
	if err := Finish(t.Context(), b.env()); err == nil || !strings.Contains(err.Error(), "on trial") || b.espInfo().Plan != oldPlan {
		t.Errorf("on trial: %v, the ESP describes %s", err, b.espInfo().Plan)
	}
	// An EFI system partition that cannot be read does not end the trial.
	loader, kept := filepath.Join(b.root, "efi/loader"), filepath.Join(b.root, "kept")
	if err := os.Rename(loader, kept); err != nil {
		t.Fatal(err)
	}
	b.put("efi/loader", "")
	if err := Finish(t.Context(), b.env()); err == nil || !strings.Contains(err.Error(), "on trial") {
		t.Errorf("on trial, without the boot entries: %v", err)
	}
	if err := errors.Join(os.Remove(loader), os.Rename(kept, loader)); err != nil {
		t.Fatal(err)
	}
	b.blessed(entry)
	if err := Finish(t.Context(), b.env()); err != nil {
		t.Fatal(err)
	}
	got := b.espInfo()
	if got.Plan != newPlan || len(got.Partitions) != len(flashed.Partitions) || got.Partitions[0] != flashed.Partitions[0] {
		t.Errorf("the ESP describes %+v", got)
	}
	for _, gone := range []string{Dir, "efi/" + ondisk.ESPSBOM} {
		if _, err := os.Stat(filepath.Join(b.root, gone)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", gone, err)
		}
	}
	if s := b.status(); s != "" {
		t.Error(s)
	}
}

// TestReleaseWithoutDescription checks that a description on the EFI system partition that is damaged
// does not keep Finish from ending the update. The console shows it at each boot.
func TestReleaseWithoutDescription(t *testing.T) {
	b := newBox(t)
	if err := b.order(Options{Image: b.inside("new.raw.zst")}); err != nil {
		t.Fatal(err)
	}
	const entry = "edgebake-b+2-1.conf"
	b.bootsB(entry)
	b.blessed(entry)
	flashed := b.get("efi/" + ondisk.ESPImageInfo)
	b.put("efi/"+ondisk.ESPImageInfo, flashed[:len(flashed)/2])
	for range 2 {
		b.console = nil
		began := b.now
		if err := Finish(t.Context(), b.env()); err != nil {
			t.Error(err)
		}
		if text := strings.Join(b.console, "\n"); strings.Count(text, "\n") > 0 || !strings.Contains(text, ondisk.ESPImageInfo+": ") || b.now.Sub(began) > 5*time.Minute {
			t.Errorf("after %s: %s", b.now.Sub(began), text)
		}
		if _, err := os.Stat(filepath.Join(b.root, spoolFile)); !errors.Is(err, os.ErrNotExist) || b.status() != "" {
			t.Errorf("the downloads are left (%v); %s", err, b.status())
		}
	}
	b.put("efi/"+ondisk.ESPImageInfo, flashed)
	if err := Finish(t.Context(), b.env()); err != nil || b.espInfo().Plan != newPlan || b.env().Exists(Dir) {
		t.Errorf("once it is repaired: %v, the ESP describes %s", err, b.espInfo().Plan)
	}
}

// TestReleaseOfAFailedUpdate checks that after the last try, the EFI system partition still
// describes the former system, and the failure is reported. An interrupted update keeps its
// downloaded files.
func TestReleaseOfAFailedUpdate(t *testing.T) {
	b := newBox(t)
	name := b.inside("new.raw.zst")
	b.cut = 40
	if err := b.order(Options{Image: name}); !errors.Is(err, errPower) {
		t.Fatal(err)
	}
	b.cut = 0
	spool := filepath.Join(b.root, spoolFile)
	left := func() bool { _, err := os.Stat(spool); return err == nil }
	if err := Finish(t.Context(), b.env()); err != nil || !left() || b.status() != "interrupted ROOT-B" {
		t.Errorf("%v, the spool is left: %v, %s", err, left(), b.status())
	}
	if err := b.order(Options{Image: name}); err != nil {
		t.Fatal(err)
	}
	if err := Finish(t.Context(), b.env()); err != nil || !left() {
		t.Errorf("before the restart: %v, the spool is left: %v", err, left())
	}
	if err := os.Rename(filepath.Join(b.root, entryB), filepath.Join(b.root, "efi/loader/entries/edgebake-b+0-3.conf")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Finish(t.Context(), b.env()); err != nil || left() || b.status() != "failed ROOT-B" || b.espInfo().Plan != oldPlan {
			t.Errorf("%v, the spool is left: %v, %s, the ESP describes %s", err, left(), b.status(), b.espInfo().Plan)
		}
	}
	// Another try.
	if err := b.order(Options{Image: name}); err != nil {
		t.Fatal(err)
	}
	b.updated()
}

// TestProvenOffline checks that a boot on trial without an API server proves nothing, unless the
// machine reached none at the update either.
func TestProvenOffline(t *testing.T) {
	for _, online := range []bool{true, false} {
		b := newBox(t)
		e := b.env()
		b.site(e)
		if online {
			e.Dial = func(context.Context, string, string) (net.Conn, error) { c, _ := net.Pipe(); return c, nil }
		}
		if err := Update(t.Context(), e, Options{Image: b.inside("new.raw.zst")}, func(run.Step) {}); err != nil {
			t.Fatal(err)
		}
		if err := ProvenOffline(e); err != nil {
			t.Errorf("a boot that is not on trial: %v", err)
		}
		b.bootsB("edgebake-b+2-1.conf")
		if err := ProvenOffline(e); errors.Is(err, run.ErrUnproven) != online {
			t.Errorf("updated online: %v; %v", online, err)
		}
	}
}

// TestProvenOfflineByMoment checks that a link that is down for a moment while the boot entry is written does not
// make the machine count as offline. An order was confirmed by an API server.
func TestProvenOfflineByMoment(t *testing.T) {
	proves := func(b *box, e *machine.Env) {
		t.Helper()
		b.bootsB("edgebake-b+2-1.conf")
		if err := ProvenOffline(e); !errors.Is(err, run.ErrUnproven) {
			t.Errorf("the trial would end without an API server: %v", err)
		}
	}
	b := newBox(t)
	e := b.env()
	b.site(e)
	began := b.now
	e.Dial = func(context.Context, string, string) (net.Conn, error) {
		if b.now.Sub(began) < 20*time.Second {
			return nil, errors.New("network is unreachable")
		}
		c, _ := net.Pipe()
		return c, nil
	}
	if err := Update(t.Context(), e, Options{Image: b.inside("new.raw.zst")}, func(run.Step) {}); err != nil {
		t.Fatal(err)
	}
	proves(b, e)

	o := newOrdered(t)
	o.site = []string{"ipvs: {profile: lan}"}
	o.give()
	e = o.env()
	dial := e.Dial
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if strings.HasPrefix(addr, "192.0.2.") {
			return nil, errors.New("network is unreachable")
		}
		return dial(ctx, network, addr)
	}
	if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil || !o.rebooted {
		t.Fatal(err)
	}
	proves(o.box, e)
}

// TestStatus checks that the status shows the progress of a running update, and nothing after its
// end.
func TestStatus(t *testing.T) {
	b := newBox(t)
	l := newLine(b, "new.raw.zst")
	l.rate = 50e3
	e := b.env()
	seen := map[string]*ondisk.UpdateState{}
	e.Get = func(ctx context.Context, url string, header http.Header, proxy []string) (*http.Response, error) {
		if s := Status(e); s != nil {
			seen[s.Phase] = s
		}
		return l.get(ctx, url, header, proxy)
	}
	if err := Update(t.Context(), e, Options{Image: "https://images.example.com/new.raw.zst"}, func(run.Step) {}); err != nil {
		t.Fatal(err)
	}
	s := seen["esp"]
	if s == nil || s.Status != ondisk.UpdateRunning || s.Root != ondisk.LabelRootB || s.Fetched < 1e6 || s.Total < s.Fetched || s.LeftSeconds == 0 {
		t.Errorf("%+v", s)
	}
	if b.status() != "pending ROOT-B" {
		t.Error(b.status())
	}
	// A killed update leaves its state.
	b.put(progressFile, `{"status":"running","root":"ROOT-B","updated":"`+b.now.Add(-time.Hour).Format(time.RFC3339)+`"}`)
	if b.status() != "interrupted ROOT-B" {
		t.Error(b.status())
	}
	b.put(progressFile, `{"status":"running","root":"ROOT-B","updated":"`+b.now.AddDate(1, 0, 0).Format(time.RFC3339)+`"}`)
	if b.status() != "interrupted ROOT-B" {
		t.Errorf("killed while the clock was a year ahead: %s", b.status())
	}
}

// TestAdmit checks images that a machine rejects, in addition to those of TestRejected.
func TestAdmit(t *testing.T) {
	s := &system{image: ondisk.ImageInfo{Plan: oldPlan, Arch: "amd64", Kubernetes: "v1.36.3"}, target: &machine.Partition{Label: ondisk.LabelRootB, Size: 1 << 30}}
	next := ondisk.ImageInfo{Plan: newPlan, Arch: "amd64", Kubernetes: "v1.36.4"}
	if err := s.checkMachine(next, 1<<30); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		want   string
		change func(*ondisk.ImageInfo)
	}{
		{"plan ID", func(i *ondisk.ImageInfo) { i.Plan = "../../linux/0123456789abcdef" }},
		{"plan ID", func(i *ondisk.ImageInfo) { i.Plan = "0123" }},
		{"begins like the running system's", func(i *ondisk.ImageInfo) { i.Plan = oldPlan[:16] + newPlan[:16] }},
		{"whose own firmware", func(i *ondisk.ImageInfo) { i.Boards = []string{"Raspberry Pi 4"} }},
	} {
		i := next
		c.change(&i)
		if err := s.checkMachine(i, 1); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q is not in: %v", c.want, err)
		}
	}
	if err := s.checkMachine(next, 1<<30+1); err == nil || !strings.Contains(err.Error(), "has only 1024 MiB") {
		t.Error(err)
	}
}

// TestMachineTakesNone checks machines that cannot be updated.
func TestMachineTakesNone(t *testing.T) {
	for _, c := range []struct {
		name, want string
		prepare    func(b *box)
	}{
		{"converted by hand", "was converted to an OpenYurt node", func(b *box) { b.put(member.KubeadmFlags, "KUBELET_KUBEADM_ARGS=\""+openyurt.RedirectFlags+"\"\n") }},
		{"version of its entry", "has no version line as edgebake writes it", func(b *box) {
			b.put(entryA, strings.Replace(b.get(entryA), "version 1\n", "version 99999999999999999999\n", 1))
		}},
		{"a Raspberry Pi", "a board whose own firmware starts the kernel (Raspberry Pi 4)", func(b *box) {
			b.put(ondisk.ImageInfoFile, strings.Replace(b.get(ondisk.ImageInfoFile), `"arch"`, `"boards":["Raspberry Pi 4"],"arch"`, 1))
		}},
		{"on trial", "on trial", func(b *box) {
			b.put(machine.BootCountFile, "\x06\x00\x00\x00\\\x00l\x00o\x00a\x00d\x00e\x00r\x00")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBox(t)
			c.prepare(b)
			s := serve(t, "new.raw.zst")
			if err := b.order(Options{Image: s.URL}); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Error(err)
			}
			if n := s.requests.Load(); n > 0 {
				t.Errorf("the server got %d requests", n)
			}
			if _, err := os.Stat(filepath.Join(b.root, entryB)); err == nil {
				t.Error("the new system has a boot entry")
			}
		})
	}
}

// TestTwoOrders checks two simultaneous updates. The second waits, and reports the reason.
func TestTwoOrders(t *testing.T) {
	b := newBox(t)
	e := b.env()
	unlock, err := run.Exclusive(t.Context(), e)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	err = Update(ctx, e, Options{Image: b.inside("new.raw.zst")}, func(run.Step) {})
	if err == nil || !strings.Contains(err.Error(), "another update, convert, revert or reset is running") {
		t.Error(err)
	}
	unlock()
	if err := b.order(Options{Image: b.inside("new.raw.zst")}); err != nil {
		t.Error(err)
	}
}

// TestRoomOnESP checks that an update that continues needs no space for files that are already in
// place.
func TestRoomOnESP(t *testing.T) {
	b := newBox(t)
	name := b.inside("new.raw.zst")
	e := b.env()
	order := func(free int64) error {
		e.FSFree = func(string) (int64, error) { return free, nil }
		return Update(t.Context(), e, Options{Image: name}, func(run.Step) {})
	}
	if err := order(4 << 20); err == nil || !strings.Contains(err.Error(), "the EFI system partition has 4 MiB free") {
		t.Error(err)
	}
	if err := order(40 << 20); err != nil {
		t.Fatal(err)
	}
	b.effects = 0
	if err := order(1 << 20); err != nil {
		t.Error(err)
	}
	b.updated()
}
