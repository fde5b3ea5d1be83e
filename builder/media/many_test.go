package media

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/overlays/siteconf"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/disktest"
)

// named returns n Sites, each with its own node name.
func named(n int) []Named {
	var out []Named
	for i := range n {
		s := site()
		s.Doc.NodeName, s.Files = fmt.Sprintf("shop-%d", i), nil
		out = append(out, Named{fmt.Sprintf("shop-%d", i), s})
	}
	return out
}

// TestStampMany checks that each output equals the output of stamping the same Site alone.
func TestStampMany(t *testing.T) {
	for _, zstd := range []bool{false, true} {
		d := t.TempDir()
		g := filepath.Join(d, "g.raw")
		if zstd {
			g += ".zst"
		}
		golden(t, g, 1<<20, zstd)
		o := ManyOptions{StampOptions: StampOptions{Now: now}}
		images, err := StampMany(t.Context(), g, named(3), filepath.Join(d, "images"), o)
		if err != nil {
			t.Fatal(err)
		}
		o.Slots = true
		slots, err := StampMany(t.Context(), g, named(3), filepath.Join(d, "slots"), o)
		if err != nil {
			t.Fatal(err)
		}
		for i, s := range named(3) {
			one := filepath.Join(d, "one.raw")
			if zstd {
				one += ".zst"
			}
			if _, err := Stamp(t.Context(), g, s.Site, StampOptions{Now: now, Output: one, Force: true}); err != nil {
				t.Fatal(err)
			}
			if disktest.Sum(t, one) != disktest.Sum(t, images[i]) {
				t.Errorf("%s differs from the image of that one site", images[i])
			}
			img := read(t, slots[i])
			c, err := slot.Read(bytes.NewReader(img))
			if err != nil || len(img) != ondisk.SlotSize || !strings.Contains(string(c.Files[ondisk.SlotSite]), fmt.Sprintf("nodeName: \"shop-%d\"\n", i)) {
				t.Errorf("%s: %v, %d bytes", slots[i], err, len(img))
			}
			m, err := Open(one)
			if err != nil {
				t.Fatal(err)
			}
			p, err := m.partition(ondisk.LabelSlot)
			if err != nil {
				t.Fatal(err)
			}
			inside := make([]byte, ondisk.SlotSize)
			if _, err := m.ReadAt(inside, p.Start); err != nil || !bytes.Equal(inside, img) {
				t.Errorf("%s is not the slot of %s (%v)", slots[i], one, err)
			}
			m.Close()
			st, err := os.Stat(slots[i])
			if err != nil || st.Mode().Perm() != 0o600 {
				t.Errorf("%s: %v, %v", slots[i], st.Mode(), err)
			}
		}
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestStampManyRefusesFirst checks that problems of all Sites are reported before anything is
// written.
func TestStampManyRefusesFirst(t *testing.T) {
	d := t.TempDir()
	g, out := filepath.Join(d, "g.raw"), filepath.Join(d, "out")
	golden(t, g, 1<<20, false)
	sites := named(30)
	for i := range 25 {
		sites[i+1].Doc.Arch = "arm64"
	}
	_, err := StampMany(t.Context(), g, sites, out, ManyOptions{StampOptions: StampOptions{Now: now}, Slots: true})
	if err == nil || !strings.Contains(err.Error(), "nothing was written: sites[1].arch: ") || !strings.Contains(err.Error(), "sites[20].arch: ") ||
		strings.Contains(err.Error(), "sites[21]") || !strings.Contains(err.Error(), "5 more problems") {
		t.Error(err)
	}
	if _, err := os.Stat(out); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s was made: %v", out, err)
	}
	if _, err := StampMany(t.Context(), g, sites[:22], out, ManyOptions{StampOptions: StampOptions{Now: now}, Slots: true}); err == nil || !strings.HasSuffix(err.Error(), "1 more problem") {
		t.Error(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := StampMany(gone, g, named(3), filepath.Join(out, "deep"), ManyOptions{StampOptions: StampOptions{Now: now}}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := os.Stat(out); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is left behind: %v", out, err)
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		t.Fatal(err)
	}
	there := filepath.Join(out, "shop-2.slot")
	if err := os.WriteFile(there, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = StampMany(t.Context(), g, named(3), out, ManyOptions{StampOptions: StampOptions{Now: now}, Slots: true})
	entries, _ := os.ReadDir(out)
	if err == nil || !strings.Contains(err.Error(), there+" exists") || len(entries) != 1 || string(read(t, there)) != "mine" {
		t.Errorf("%v, %d files", err, len(entries))
	}
}

// TestInventoryIntoAnImage checks that an Inventory is rejected if the image's first boot cannot
// read it, and that each of its Sites is checked against the image.
func TestInventoryIntoAnImage(t *testing.T) {
	inv, err := configs.ParseInventory("i", []byte(`apiVersion: edgebake.io/v1alpha1
kind: Inventory
defaults: {masters: [192.0.2.11:6443], unsafeSkipCAVerification: true, credentials: {token: abcdef.0123456789abcdef}}
sites:
  - {name: a, match: {serial: SN1}}
  - {name: b, match: {serial: SN2}, arch: arm64}
`))
	if err != nil {
		t.Fatal(err)
	}
	m := &Image{info: ondisk.ImageInfo{Arch: "amd64", NodeTypes: []string{"native"}, SiteVersions: []string{"v1alpha1"}}}
	m.system = func() (siteconf.Root, error) { return nil, nil }
	s := Site{Inventory: inv, Files: map[string][]byte{}}
	probs, err := m.serves(s)
	if err == nil || !strings.Contains(err.Error(), "does not support Inventories") || !strings.Contains(probs.Error(), "sites[1].arch: the Site is for arm64") {
		t.Error(err, probs)
	}
	m.info.InventoryVersions, inv.Sites[1].Arch = []string{"v1alpha1"}, ""
	if probs, err := m.serves(s); err != nil || probs != nil {
		t.Error(err)
	}
	s.Files[ondisk.SlotIgnition] = []byte(`{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/a","contents":{"source":"data:;base64,YWJjZGVmLjAxMjM0NTY3ODlhYmNkZWY="}}]}}`)
	s.Files["files/note"] = []byte("abcdef.0123456789abcdef")
	if probs, err := m.serves(s); err != nil || len(probs) != 2 || !strings.Contains(probs.Error(), "credentials.token: is also in config.ign") || !strings.Contains(probs.Error(), "is also in files/note") {
		t.Error(err, probs)
	}
}

// TestSlotsOfManySites checks that making 100 slots takes at most 6 s of processor time.
func TestSlotsOfManySites(t *testing.T) {
	d := t.TempDir()
	g := filepath.Join(d, "g.raw")
	golden(t, g, 1<<20, false)
	took := desk.Processor(t, func() {
		out, err := StampMany(t.Context(), g, named(100), filepath.Join(d, "out"), ManyOptions{StampOptions: StampOptions{Now: now}, Slots: true})
		if err != nil || len(out) != 100 {
			t.Fatal(len(out), err)
		}
	})
	t.Logf("100 slots in %v, %v each", took, took/100)
	if took > 6*time.Second {
		t.Errorf("100 slots took %v", took)
	}
}

// BenchmarkSlots measures the time to make one of many slot files.
func BenchmarkSlots(b *testing.B) {
	d := b.TempDir()
	g := filepath.Join(d, "g.raw")
	golden(b, g, 1<<20, false)
	start := time.Now()
	for i := 0; b.Loop(); i++ {
		if _, err := StampMany(b.Context(), g, named(100), filepath.Join(d, fmt.Sprint(i)), ManyOptions{StampOptions: StampOptions{Now: now}, Slots: true}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(time.Since(start).Milliseconds())/float64(100*b.N), "ms/site")
}

// TestOutputIsTheImage checks that stamping leaves the image unchanged if an output is the image
// itself, under its own or another name.
func TestOutputIsTheImage(t *testing.T) {
	t.Chdir(t.TempDir())
	golden(t, "g.raw", 1<<20, false)
	before := disktest.Sum(t, "g.raw")
	if err := errors.Join(os.Mkdir("shops", 0o755), os.Symlink("g.raw", "soft.raw"), os.Link("g.raw", "hard.raw"), os.Symlink("../g.raw", "shops/shop-1.raw")); err != nil {
		t.Fatal(err)
	}
	for _, output := range []string{"soft.raw", "hard.raw", "shops/shop-1.raw", "g.raw", "./g.raw"} {
		for _, force := range []bool{false, true} {
			_, err := Stamp(t.Context(), "g.raw", site(), StampOptions{Now: now, Output: output, Force: force})
			if want := "stamping image g.raw: " + output + " is the image itself: name another file, or change the image itself (--in-place)"; err == nil || err.Error() != want {
				t.Errorf("%v, want %s", err, want)
			}
		}
	}
	if _, err := Stamp(t.Context(), "soft.raw", site(), StampOptions{Now: now, Output: "g.raw", Force: true}); err == nil || !strings.Contains(err.Error(), "g.raw is the image itself") {
		t.Error(err)
	}
	for _, dir := range []string{"shops", "."} {
		sites := named(3)
		if dir == "." {
			sites[1].Name = "g"
		}
		_, err := StampMany(t.Context(), "g.raw", sites, dir, ManyOptions{StampOptions: StampOptions{Now: now, Force: true}})
		if err == nil || !strings.Contains(err.Error(), "nothing was written: Site "+sites[1].Name+": "+filepath.Join(dir, sites[1].Name+".raw")+" is the image itself: choose another directory") {
			t.Error(err)
		}
	}
	if disktest.Sum(t, "g.raw") != before {
		t.Fatal("the image was written to")
	}
	if _, err := Stamp(t.Context(), "g.raw", site(), StampOptions{Now: now}); err != nil || disktest.Sum(t, "g.raw") == before {
		t.Error(err)
	}
}
