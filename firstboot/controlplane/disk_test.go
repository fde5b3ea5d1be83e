package controlplane_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestRewritingSaysWhatIsLost checks that a fix that overwrites the disk names the data that is
// lost. For a damaged archive, another fix keeps the disk.
func TestRewritingSaysWhatIsLost(t *testing.T) {
	t.Parallel()
	damaged := func(w *worldtest.World) {
		w.Put(ondisk.ImportImageDir+"/000-pause.tar", "damaged")
		w.Put(ondisk.ImportImageDir+"/"+ondisk.ImportIndexFile, `{"version":1,"archives":[{"file":"000-pause.tar","ref":"example.com/pause:1","sha256":"0","platform":"linux/amd64"}]}`)
	}
	fixOf := func(w *worldtest.World, phase string) string {
		t.Helper()
		w.PowerOn()
		if err := w.Boot(); err == nil {
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
	worker.MustBoot()
	damaged(worker)
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Put(configs.EtcdDataDir+"/member/wal/0.wal", "data")
	damaged(m.World)
	for _, tt := range []struct {
		name string
		w    *worldtest.World
		lost string
	}{
		{"new machine", fresh, ""},
		{"worker", worker, "this destroys the data of pods on the disk, and the Site needs a token"},
		{"control-plane node", m.World, "this destroys the machine's etcd data: first make sure that more than half of all control-plane nodes run without it"},
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

// TestDataCannotGrow checks that a worker joins, and a control-plane node's etcd starts, even if
// DATA cannot grow into the free space of a larger disk. A note then reports the problem.
func TestDataCannotGrow(t *testing.T) {
	t.Parallel()
	const note = "DATA does not use all the free space after it"
	larger := func(w *worldtest.World) { w.Put("/sys/devices/virtio/block/vda/size", "83886080\n") }
	for _, tt := range []struct {
		name   string
		change func(*worldtest.World)
		repart error
		says   string // the note; "": none
		runs   bool   // systemd-repart runs
	}{
		{"it grows", larger, nil, "", true},
		{"systemd-repart fails", larger, errors.New("exit status 1: Can't fit requested partitions into available free space"), "growing partition vda5: exit status 1", true},
		{"a partition behind it", func(w *worldtest.World) { larger(w); behindData(w, "16777216") }, nil, "", false},
		{"a partition behind it, and a gap", func(w *worldtest.World) { larger(w); behindData(w, "41943040") }, nil, "12289 MiB after partition vda5 are free", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 1))
			m.bootDone()
			worker := nativeWorld(t)
			for _, w := range []*worldtest.World{m.World, worker} {
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
				if w == m.World {
					m.on()
				}
				if err := w.Run(firstboot.New(e)); err != nil {
					t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
				}
				if w == m.World && !controlplane.Decided(e) {
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
func behindData(w *worldtest.World, start string) {
	dir := "/sys/devices/virtio/block/vda/vda6"
	w.Put(dir+"/partition", "6\n")
	w.Put(dir+"/start", start+"\n")
	w.Put(dir+"/size", "2048\n")
	w.Put(dir+"/uevent", "PARTNAME=backup\n")
}
