package firstboot

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// second attaches another disk with the partitions of the same image.
func (w *world) second(disk string, espUUID string) {
	dir := "/sys/devices/virtio/block/" + disk
	w.Put(dir+"/size", "16777216\n")
	w.Put(dir+"/removable", "0\n")
	for n, label := range map[string]string{"1": "ESP", "5": "DATA"} {
		w.Put(dir+"/"+disk+n+"/partition", n+"\n")
		w.Put(dir+"/"+disk+n+"/start", "2048\n")
		w.Put(dir+"/"+disk+n+"/size", "1048576\n")
		uuid := espUUID
		if label == "DATA" {
			uuid = "5"
		}
		w.Put(dir+"/"+disk+n+"/uevent", "PARTNAME="+label+"\nPARTUUID="+uuid+"\n")
	}
	for name, to := range map[string]string{
		"sys/block/" + disk: "../devices/virtio/block/" + disk, "sys/dev/block/253:5": "../../devices/virtio/block/" + disk + "/" + disk + "5",
		"sys/dev/block/254:5": "../../devices/virtio/block/vda/vda5",
	} {
		if err := os.Symlink(to, filepath.Join(w.Root, name)); err != nil {
			w.T.Fatal(err)
		}
	}
}

// utf16 returns an EFI variable that contains s.
func utf16(s string) string {
	var b strings.Builder
	b.WriteString("\x06\x00\x00\x00")
	for _, c := range s {
		b.WriteRune(c)
		b.WriteByte(0)
	}
	return b.String() + "\x00\x00"
}

// TestTwoCopiesOfOneImage checks that a system with / and /var on different disks is detected
// before anything is changed.
func TestTwoCopiesOfOneImage(t *testing.T) {
	const esp = "aaaaaaaa-0000-4000-8000-000000000001"
	for name, tc := range map[string]struct {
		other, loader string
		words         string
	}{
		"the loader does not tell": {esp, "", "two copies of one image are in this machine"},
		"the loader's disk":        {esp, strings.ToUpper(esp), "the boot loader was started from vdb"},
		"of neither":               {"b", strings.ToUpper(esp), "two copies of one image are in this machine"},
	} {
		t.Run(name, func(t *testing.T) {
			w := nativeWorld(t)
			w.second("vdb", tc.other)
			if tc.loader != "" {
				w.Put(machine.LoaderPartFile, utf16(tc.loader))
			}
			w.Put("/proc/self/mountinfo", strings.Replace(w.Get("/proc/self/mountinfo"), "254:5 / /var", "253:5 / /var", 1))
			if err := w.boot(); err == nil || !w.ConsoleHas("/ is on vda3, but /var is on vdb5, on another disk: "+tc.words) {
				t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			if w.Joins != 0 {
				t.Error("the machine joined the cluster")
			}
			for _, effect := range w.EffectNames {
				if strings.HasPrefix(effect, "run systemd-repart") || strings.HasPrefix(effect, "write slot") || strings.HasPrefix(effect, "hostname") {
					t.Errorf("first boot continued: %s", effect)
				}
			}
			// With one of the disks removed it continues.
			w.Put("/proc/self/mountinfo", strings.Replace(w.Get("/proc/self/mountinfo"), "253:5 / /var", "254:5 / /var", 1))
			w.PowerOn()
			w.mustBoot()
		})
	}
}

// TestRewritingSaysWhatIsLost checks that a fix that overwrites the disk names the data that is
// lost. The fix for a damaged archive does not overwrite the disk.
func TestRewritingSaysWhatIsLost(t *testing.T) {
	t.Parallel()
	damaged := func(w *world) {
		w.Put(ondisk.ImportImageDir+"/000-pause.tar", "damaged")
		w.Put(ondisk.ImportImageDir+"/"+ondisk.ImportIndexFile, `{"version":1,"archives":[{"file":"000-pause.tar","ref":"example.com/pause:1","sha256":"0","platform":"linux/amd64"}]}`)
	}
	fixOf := func(w *world, phase string) string {
		t.Helper()
		w.PowerOn()
		if err := w.boot(); err == nil {
			t.Fatal("first boot succeeded, want an error")
		}
		for _, p := range w.State().Phases {
			if p.Name == phase {
				return p.Fix
			}
		}
		t.Fatalf("no phase %s", phase)
		return ""
	}
	fresh := nativeWorld(t)
	damaged(fresh)
	worker := nativeWorld(t)
	worker.mustBoot()
	damaged(worker)
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Put(configs.EtcdDataDir+"/member/wal/0.wal", "data")
	damaged(m.world)
	for _, tt := range []struct {
		name string
		w    *world
		lost string
	}{
		{"new machine", fresh, ""},
		{"worker", worker, "this destroys the data of pods on the disk, and the Site needs a token"},
		{"control-plane node", m.world, "this destroys the machine's etcd data: first make sure that more than half of all control-plane nodes run without it"},
	} {
		fix := fixOf(tt.w, "images")
		if !strings.Contains(fix, "import example.com/pause:1 by hand") || !strings.Contains(fix, "remove "+ondisk.ImportImageDir+"/000-pause.tar") {
			t.Errorf("%s: %s", tt.name, fix)
		}
		if strings.Contains(fix, "this destroys") != (tt.lost != "") || !strings.Contains(fix, tt.lost) {
			t.Errorf("%s: %s", tt.name, fix)
		}
	}
	// A wrong node name must not lead to the advice to reset a
	// control-plane node, which is impossible.
	named := newControlPlane(t, mintedSites(t, 1))
	named.bootDone()
	named.Put(configs.EtcdDataDir+"/member/wal/0.wal", "data")
	active := &site.Active{Site: named.site, Node: "m9"}
	err := controlplane.DiskIsOfSite(named.Env(), active)
	if fix, permanent := run.Fix(err); !permanent || strings.Contains(fix, "firstboot reset") || !strings.Contains(fix, "this destroys the machine's etcd data") {
		t.Errorf("%v: %s", err, fix)
	}
}

// TestDataCannotGrow checks that, if DATA cannot grow into the free space of a larger disk, the
// node still joins, or a control-plane node's etcd starts, and a note reports the problem.
func TestDataCannotGrow(t *testing.T) {
	t.Parallel()
	const note = "DATA does not use all the free space after it"
	larger := func(w *world) { w.Put("/sys/devices/virtio/block/vda/size", "83886080\n") }
	for _, tt := range []struct {
		name   string
		change func(*world)
		repart error
		says   string // the note; "": none
		runs   bool   // systemd-repart runs
	}{
		{"it grows", larger, nil, "", true},
		{"systemd-repart fails", larger, errors.New("exit status 1: Can't fit requested partitions into available free space"), "growing partition vda5: exit status 1", true},
		{"a partition behind it", func(w *world) { larger(w); w.behindData("16777216") }, nil, "", false},
		{"a partition behind it, and a gap", func(w *world) { larger(w); w.behindData("41943040") }, nil, "12289 MiB after partition vda5 are free", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 1))
			m.bootDone()
			worker := nativeWorld(t)
			for _, w := range []*world{m.world, worker} {
				tt.change(w)
				e := w.Env()
				run, size := e.Run, int64(4<<30)
				e.FSSize = func(string) (int64, error) { return size, nil }
				e.Run = func(ctx context.Context, c machine.Cmd) error {
					if c.Args[0] == "systemd-repart" {
						w.EffectNames = append(w.EffectNames, "systemd-repart")
						if tt.name == "it grows" {
							w.Put("/sys/devices/virtio/block/vda/vda5/size", "75495424\n")
							size = 36 << 30
						}
						return tt.repart
					}
					return run(ctx, c)
				}
				if w == m.world {
					m.on()
				}
				if err := w.Run(New(e)); err != nil {
					t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
				}
				if w == m.world && !controlplane.Decided(e) {
					t.Error("etcd cannot start")
				}
				notes := strings.Join(w.State().Notes, "\n")
				if strings.Contains(notes, note) != (tt.says != "") || !strings.Contains(notes, tt.says) {
					t.Errorf("notes: %q", notes)
				}
				if ran := slices.Contains(w.EffectNames, "systemd-repart"); ran != tt.runs {
					t.Errorf("systemd-repart ran: %v", ran)
				}
			}
		})
	}
}

// behindData adds another partition after DATA. It begins at sector start.
func (w *world) behindData(start string) {
	dir := "/sys/devices/virtio/block/vda/vda6"
	w.Put(dir+"/partition", "6\n")
	w.Put(dir+"/start", start+"\n")
	w.Put(dir+"/size", "2048\n")
	w.Put(dir+"/uevent", "PARTNAME=backup\n")
}
