package slot

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/test/disktest"
)

const token = "abcdef.0123456789abcdef"

func sample() Contents {
	return Contents{
		Info: ondisk.SlotInfo{Version: 1, Plan: "p1", Golden: "g1", SiteVersions: []string{"v1alpha1"}, Stamped: 1767225600},
		Files: map[string][]byte{
			"site.yaml":                    []byte("token: " + token + "\n"),
			"config.ign":                   []byte(`{"ignition":{"version":"3.5.0"}}`),
			"files/etc/A long file name.d": []byte("content"),
			"pki/ca.crt":                   []byte("certificate"),
		},
	}
}

func mustMake(t testing.TB, c Contents) []byte {
	t.Helper()
	b, err := Make(c)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestMakeAndRead(t *testing.T) {
	want := sample()
	want.Report = Report{Text: []byte("all is well\n"), JSON: []byte("{}\n")}
	img := mustMake(t, want)
	if len(img) != ondisk.SlotSize {
		t.Errorf("%d bytes", len(img))
	}
	if !bytes.Equal(img, mustMake(t, want)) {
		t.Error("two slots differ")
	}
	got, err := Read(bytes.NewReader(img))
	if err != nil {
		t.Fatal(err)
	}
	want.Label = ondisk.LabelSlot
	if !reflect.DeepEqual(*got, want) {
		t.Errorf("read %+v, made %+v", *got, want)
	}

	name := filepath.Join(t.TempDir(), "slot")
	if err := os.WriteFile(name, img, 0o644); err != nil {
		t.Fatal(err)
	}
	disktest.Oracle(t, "fsck.fat", "-n", name)
	if out := disktest.Oracle(t, "mtype", "-i", name, "::site.yaml"); out != string(want.Files["site.yaml"]) {
		t.Errorf("mtype: %q", out)
	}
	if out := disktest.Oracle(t, "mdir", "-i", name); !strings.Contains(out, "Volume in drive : is EDGEBAKE") || !strings.Contains(out, "2026-01-01") {
		t.Errorf("mdir: %s", out)
	}
	// Each report is contiguous and has its full size.
	f, err := fat.Open(bytes.NewReader(img))
	if err != nil {
		t.Fatal(err)
	}
	for name, size := range map[string]int64{"report.txt": ReportTextSize, "report.json": ReportJSONSize} {
		if x, err := f.Extents(name); err != nil || len(x) != 1 || x[0].Len != size {
			t.Errorf("%s: %v %v", name, x, err)
		}
	}
}

// TestGeometry checks that the number of clusters is not near the limit between FAT12 and FAT16,
// because programs differ in that limit. With 512-byte sectors, the geometry must stay the same,
// since digests of existing images depend on it.
func TestGeometry(t *testing.T) {
	for sector, want := range map[int64]struct{ kind, clusterSize, clusters int }{0: {16, 2048, 8166}, 4096: {12, 8192, 2044}} {
		c := sample()
		c.Info.SectorSize = sector
		img := mustMake(t, c)
		u16 := func(at int) int { return int(binary.LittleEndian.Uint16(img[at:])) }
		size, per := u16(11), int(img[13])
		if size*per != want.clusterSize {
			t.Errorf("sectors of %d: clusters have %d bytes", sector, size*per)
		}
		root := (u16(17)*32 + size - 1) / size
		clusters := (u16(19) - u16(14) - int(img[16])*u16(22) - root) / per
		if clusters != want.clusters {
			t.Errorf("sectors of %d: %d clusters", sector, clusters)
		}
		if off := clusters - 4085; off > -16 && off < 16 {
			t.Errorf("sectors of %d: %d clusters are within 16 of the limit between FAT12 and FAT16", sector, clusters)
		}
		f, err := fat.Open(bytes.NewReader(img))
		if err != nil || f.Type() != want.kind {
			t.Errorf("sectors of %d: a FAT%d, %v", sector, f.Type(), err)
		}
		got, err := Read(bytes.NewReader(img))
		if err != nil || !reflect.DeepEqual(got.Files, c.Files) {
			t.Errorf("sectors of %d: %v %v", sector, got, err)
		}
		l := newLaptop(t, img)
		disktest.Oracle(t, "fsck.fat", "-n", l.img)
		if out := disktest.Oracle(t, "mtype", "-i", l.img, "::site.yaml"); out != string(c.Files["site.yaml"]) {
			t.Errorf("sectors of %d: mtype: %q", sector, out)
		}
		// Fill as many clusters as the largest Site that a person edits on a laptop.
		l.put("site.yaml", strings.Repeat("# comment\n", 20000))
		l.put("files/large", strings.Repeat("x", 5<<20))
		disktest.Oracle(t, "fsck.fat", "-n", l.img)
		back, err := os.Open(l.img)
		if err != nil {
			t.Fatal(err)
		}
		defer back.Close()
		if got, err = Read(back); err != nil || len(got.Files["files/large"]) != 5<<20 || len(got.Files["site.yaml"]) != 200000 {
			t.Errorf("sectors of %d, edited: %v", sector, err)
		}
	}
}

// TestFormerSlotOf4Kn checks that the FAT16 slots of older 4Kn disks are read, verified and
// overwritten.
func TestFormerSlotOf4Kn(t *testing.T) {
	c := sample()
	c.Info.SectorSize = 4096
	meta, err := json.Marshal(c.Info)
	if err != nil {
		t.Fatal(err)
	}
	nodes := append(c.nodes(), node(ondisk.SlotMeta, meta),
		node(ondisk.SlotReportText, bytes.Repeat([]byte("\n"), ReportTextSize)), node(ondisk.SlotReportJSON, bytes.Repeat([]byte("\n"), ReportJSONSize)))
	img := mem(make([]byte, ondisk.SlotSize))
	if err := fat.Write(img, nodes, nil, fat.Options{Type: 16, Label: ondisk.LabelSlot, Size: ondisk.SlotSize, SectorSize: 4096}); err != nil {
		t.Fatal(err)
	}
	d := newDevice(img)
	check := func(what string, kind int) {
		t.Helper()
		f, err := fat.Open(d)
		if err != nil || f.Type() != kind {
			t.Fatalf("%s: %v %v", what, f, err)
		}
		got, err := Read(d)
		if err != nil || got.Info.Plan != c.Info.Plan || len(got.Files) == 0 {
			t.Errorf("%s: %v %v", what, got, err)
		}
		if err := errors.Join(AsMade(d), Strays(d)); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	check("as it was", 16)
	if err := WriteReport(d, Report{Text: []byte("all is well\n"), JSON: []byte("{}\n")}); err != nil {
		t.Fatal(err)
	}
	check("reported", 16)
	former := slices.Clone(d.cache)
	if err := Scrub(d, c.Info, []byte("public: true\n"), token); err != nil {
		t.Fatal(err)
	}
	check("scrubbed", 12)
	d = newDevice(former)
	if err := Rewrite(d, c); err != nil {
		t.Fatal(err)
	}
	check("replaced", 12)
}

func TestMakeRefuses(t *testing.T) {
	c := sample()
	c.Files["inventory.yaml"] = nil
	c.Files["passwords.txt"] = nil
	c.Report.JSON = make([]byte, ReportJSONSize+1)
	_, err := Make(c)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"both exist", "passwords.txt does not belong", "there is space for"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
	big := sample()
	big.Files["files/big"] = make([]byte, 15<<20)
	big.Files["files/also big"] = make([]byte, 2<<20)
	if _, err := Make(big); err == nil || !strings.Contains(err.Error(), "have room") && !strings.Contains(err.Error(), "has room") {
		t.Errorf("17 MiB of files: %v", err)
	}
}

func TestNoneAndBoth(t *testing.T) {
	c := sample()
	delete(c.Files, "site.yaml")
	got, err := Read(bytes.NewReader(mustMake(t, c)))
	if !errors.Is(err, ErrNoSite) || got == nil || got.Info.Plan != "p1" || got.Files["config.ign"] == nil {
		t.Errorf("none: %+v %v", got, err)
	}
	if _, err := Read(bytes.NewReader(make([]byte, ondisk.SlotSize))); !errors.Is(err, ErrBlank) {
		t.Errorf("zeros: %v", err)
	}
	if _, err := Read(bytes.NewReader(bytes.Repeat([]byte("x"), 4096))); !errors.Is(err, fat.ErrNotFAT) {
		t.Errorf("noise: %v", err)
	}
}

// laptop is a slot that mtools edit, as people do on their computers.
type laptop struct {
	t   *testing.T
	img string
	dir string
}

func newLaptop(t *testing.T, img []byte) *laptop {
	d := t.TempDir()
	l := &laptop{t, filepath.Join(d, "img"), d}
	if err := os.WriteFile(l.img, img, 0o644); err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *laptop) put(name, content string) {
	l.t.Helper()
	p := filepath.Join(l.dir, "src")
	if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
		l.t.Fatal(err)
	}
	disktest.Oracle(l.t, "mcopy", "-o", "-i", l.img, p, "::"+name)
}

func (l *laptop) read() (*Contents, error) {
	l.t.Helper()
	b, err := os.ReadFile(l.img)
	if err != nil {
		l.t.Fatal(err)
	}
	return Read(bytes.NewReader(b))
}

func TestWhatLaptopsDo(t *testing.T) {
	golden := sample()
	delete(golden.Files, "site.yaml")
	t.Run("an added site and litter", func(t *testing.T) {
		l := newLaptop(t, mustMake(t, golden))
		l.put("site.yaml", "\xef\xbb\xbfapiVersion: x\r\n")
		l.put("._site.yaml", "mac")
		l.put(".DS_Store", "mac")
		disktest.Oracle(t, "mmd", "-i", l.img, "::System Volume Information")
		l.put("System Volume Information/IndexerVolumeGuid", "windows")
		l.put("files/._x", "mac")
		l.put("files/Thumbs.db", "windows")
		c, err := l.read()
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"config.ign", "files/etc/A long file name.d", "pki/ca.crt", "site.yaml"}
		if got := slices.Sorted(maps.Keys(c.Files)); !slices.Equal(got, want) {
			t.Errorf("files are %v", got)
		}
		if got := string(c.Files["site.yaml"]); got != "apiVersion: x\r\n" {
			t.Errorf("site is %q", got)
		}
		disktest.Oracle(t, "fsck.fat", "-n", l.img)
	})
	t.Run("capital letters", func(t *testing.T) {
		l := newLaptop(t, mustMake(t, golden))
		l.put("INVENTORY.YAML", "a: b\n")
		c, err := l.read()
		if err != nil || string(c.Files["inventory.yaml"]) != "a: b\n" {
			t.Errorf("%v %v", c, err)
		}
	})
	t.Run("an editor replaced the site", func(t *testing.T) {
		l := newLaptop(t, mustMake(t, sample()))
		l.put("site.tmp", "new")
		disktest.Oracle(t, "mdel", "-i", l.img, "::site.yaml")
		disktest.Oracle(t, "mren", "-i", l.img, "::site.tmp", "site.yaml")
		c, err := l.read()
		if err != nil || string(c.Files["site.yaml"]) != "new" {
			t.Errorf("%v %v", c, err)
		}
	})
	t.Run("both", func(t *testing.T) {
		l := newLaptop(t, mustMake(t, sample()))
		l.put("inventory.yaml", "x")
		if _, err := l.read(); !errors.Is(err, ErrBothSites) {
			t.Errorf("got %v", err)
		}
		b, err := os.ReadFile(l.img)
		if err != nil {
			t.Fatal(err)
		}
		if info, err := ReadInfo(bytes.NewReader(b)); err != nil || info.Plan != "p1" {
			t.Errorf("%+v %v", info, err)
		}
	})
	t.Run("almost the right name", func(t *testing.T) {
		for _, name := range []string{"site.yaml.txt", "site.yml", "Site (1).yaml"} {
			l := newLaptop(t, mustMake(t, golden))
			l.put(name, "x")
			if _, err := l.read(); !errors.Is(err, ErrNoSite) || !strings.Contains(err.Error(), name) {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
	t.Run("a broken edgebake.json", func(t *testing.T) {
		for content, want := range map[string]string{"{": "stamp the image again", `{"version":7}`: "supports only version 1"} {
			l := newLaptop(t, mustMake(t, sample()))
			l.put("edgebake.json", content)
			if _, err := l.read(); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v", content, err)
			}
		}
	})
	t.Run("a stick of one's own", func(t *testing.T) {
		img := filepath.Join(t.TempDir(), "stick")
		disktest.Oracle(t, "truncate", "-s", "64M", img)
		disktest.Oracle(t, "mkfs.fat", "-F", "32", "-n", "EDGEBAKE", img)
		l := &laptop{t, img, t.TempDir()}
		l.put("site.yaml", "s")
		c, err := l.read()
		if err != nil || string(c.Files["site.yaml"]) != "s" || c.Info.Version != 0 {
			t.Errorf("%+v %v", c, err)
		}
		l.put("files", strings.Repeat("x", 100))
		if _, err := l.read(); err != nil {
			t.Errorf("a file called files: %v", err)
		}
	})
	t.Run("too much", func(t *testing.T) {
		img := filepath.Join(t.TempDir(), "stick")
		disktest.Oracle(t, "truncate", "-s", "64M", img)
		disktest.Oracle(t, "mkfs.fat", "-F", "32", img)
		l := &laptop{t, img, t.TempDir()}
		l.put("site.yaml", strings.Repeat("x", 17<<20))
		if _, err := l.read(); err == nil || !strings.Contains(err.Error(), "site.yaml: it has 17825792 bytes") {
			t.Errorf("got %v", err)
		}
		disktest.Oracle(t, "mdel", "-i", img, "::site.yaml")
		disktest.Oracle(t, "mmd", "-i", img, "::files")
		l.put("files/a", strings.Repeat("x", 9<<20))
		l.put("files/b", strings.Repeat("x", 9<<20))
		if _, err := l.read(); err == nil || !strings.Contains(err.Error(), "remove the files that do not belong") {
			t.Errorf("got %v", err)
		}
	})
}

// device is a disk with a volatile cache. A power cut keeps any subset of the sectors written since
// the last Sync.
type device struct {
	durable, cache []byte
	dirty          map[int]bool
	writes         int
	cutAfter       int // -1 means never
}

var errCut = errors.New("power cut")

func newDevice(b []byte) *device {
	return &device{durable: bytes.Clone(b), cache: bytes.Clone(b), dirty: map[int]bool{}, cutAfter: -1}
}

func (d *device) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(d.cache).ReadAt(p, off)
}

func (d *device) WriteAt(p []byte, off int64) (int, error) {
	if d.writes == d.cutAfter {
		return 0, errCut
	}
	d.writes++
	if off+int64(len(p)) > int64(len(d.cache)) {
		return 0, io.ErrShortWrite
	}
	copy(d.cache[off:], p)
	for s := int(off / 512); s <= int(off+int64(len(p))-1)/512; s++ {
		d.dirty[s] = true
	}
	return len(p), nil
}

func (d *device) Sync() error {
	if d.writes == d.cutAfter {
		return errCut
	}
	copy(d.durable, d.cache)
	clear(d.dirty)
	return nil
}

// cut returns the content of the disk after a power cut.
func (d *device) cut(rnd *rand.Rand) []byte {
	out := bytes.Clone(d.durable)
	keep := rnd.IntN(3) // keep none, all or some
	for s := range d.dirty {
		if keep == 1 || keep == 2 && rnd.IntN(2) == 0 {
			copy(out[s*512:(s+1)*512], d.cache[s*512:])
		}
	}
	return out
}

func TestWholeWriteSurvivesPowerCuts(t *testing.T) {
	before := mustMake(t, sample())
	after := sample()
	after.Files["site.yaml"] = []byte("another site\n")
	after.Files["files/more"] = bytes.Repeat([]byte("m"), 100000)
	want := mustMake(t, after)
	rnd := rand.New(rand.NewPCG(1, 2))
	outcomes := map[string]int{}
	uncut := newDevice(before)
	if err := WriteWhole(uncut, want); err != nil {
		t.Fatal(err)
	}
	all := uncut.writes
	for _, n := range []int{0, 1, 2, 3, all - 2, all - 1, all} {
		for range 20 {
			d := newDevice(before)
			d.cutAfter = n
			err := WriteWhole(d, want)
			if n < all && !errors.Is(err, errCut) {
				t.Fatalf("cut after %d writes: %v", n, err)
			}
			got, err := Read(bytes.NewReader(d.cut(rnd)))
			switch {
			case errors.Is(err, ErrBlank):
				outcomes["blank"]++
			case err != nil:
				t.Errorf("cut after %d writes: %v", n, err)
			case string(got.Files["site.yaml"]) == "another site\n" && len(got.Files) == len(after.Files) && bytes.Equal(got.Files["files/more"], after.Files["files/more"]):
				outcomes["new"]++
			case reflect.DeepEqual(got.Files, sample().Files):
				outcomes["old"]++
			default:
				t.Errorf("cut after %d writes: a mixture of old and new: %v", n, slices.Sorted(maps.Keys(got.Files)))
			}
		}
	}
	for _, o := range []string{"blank", "new", "old"} {
		if outcomes[o] == 0 {
			t.Errorf("no cut ended %s: %v", o, outcomes)
		}
	}
	if err := WriteWhole(newDevice(before), nil); err == nil {
		t.Error("nothing at all was written as a slot")
	}
}

func TestReportInPlace(t *testing.T) {
	img := mustMake(t, sample())
	d := newDevice(img)
	report := Report{Text: []byte("joined\n"), JSON: []byte(`{"result":"done"}`)}
	if err := WriteReport(d, report); err != nil {
		t.Fatal(err)
	}
	got, err := Read(bytes.NewReader(d.durable))
	if err != nil || string(got.Report.Text) != "joined\n" || string(got.Report.JSON) != "{\"result\":\"done\"}\n" {
		t.Errorf("%+v %v", got.Report, err)
	}
	// Only sectors of the two files have changed.
	f, err := fat.Open(bytes.NewReader(img))
	if err != nil {
		t.Fatal(err)
	}
	outside := func(b []byte) []byte {
		b = bytes.Clone(b)
		for _, name := range []string{"report.txt", "report.json"} {
			ext, err := f.Extents(name)
			if err != nil {
				t.Fatal(err)
			}
			for _, x := range ext {
				clear(b[x.Off:][:x.Len])
			}
		}
		return b
	}
	if !bytes.Equal(outside(img), outside(d.durable)) {
		t.Error("sectors outside the report were written")
	}

	// A shorter report leaves no part of the longer one, and a long text is truncated.
	if err := WriteReport(d, Report{Text: bytes.Repeat([]byte("long line\n"), 10000), JSON: []byte("{}")}); err != nil {
		t.Error(err)
	}
	got, err = Read(bytes.NewReader(d.durable))
	if err != nil || !strings.HasSuffix(string(got.Report.Text), "run firstboot status for the rest]\n") || string(got.Report.JSON) != "{}\n" {
		t.Errorf("%d bytes, %q, %v", len(got.Report.Text), got.Report.JSON, err)
	}
	if !json.Valid(got.Report.JSON) {
		t.Error("the padded document is no JSON")
	}
	// If the JSON document is too long, the text is written anyway.
	err = WriteReport(d, Report{Text: []byte("t"), JSON: make([]byte, ReportJSONSize+1)})
	if !errors.Is(err, ErrNoReport) {
		t.Errorf("got %v", err)
	}
	if got, err := Read(bytes.NewReader(d.durable)); err != nil || string(got.Report.Text) != "t\n" {
		t.Errorf("%q %v", got.Report.Text, err)
	}
}

func TestReportFilesGone(t *testing.T) {
	l := newLaptop(t, mustMake(t, sample()))
	disktest.Oracle(t, "mdel", "-i", l.img, "::report.txt")
	l.put("report.json", "{}") // replaced with a smaller file
	f, err := os.OpenFile(l.img, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	err = WriteReport(f, Report{Text: []byte("x"), JSON: []byte(`{"a":1}`)})
	if !errors.Is(err, ErrNoReport) || !strings.Contains(err.Error(), "report.txt") || !strings.Contains(err.Error(), "report.json") {
		t.Errorf("got %v", err)
	}
	disktest.Oracle(t, "fsck.fat", "-n", l.img)
}

func TestScrubLeavesNoSecret(t *testing.T) {
	l := newLaptop(t, mustMake(t, sample()))
	// Put the token into a deleted file, an editor's backup, the unused end of a shortened file,
	// the user's config and a report.
	l.put("old.txt", strings.Repeat(token+"\n", 1000))
	disktest.Oracle(t, "mdel", "-i", l.img, "::old.txt")
	l.put("site.yaml~", "token: "+token)
	l.put("config.ign", `{"x":"`+token+`"}`)
	l.put("pki/admin.key", token)
	b, err := os.ReadFile(l.img)
	if err != nil {
		t.Fatal(err)
	}
	d := newDevice(b)
	if err := WriteReport(d, Report{Text: []byte("tried " + token), JSON: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(d.durable, []byte(token)); n < 100 {
		t.Fatalf("the test's slot has the token only %d times", n)
	}
	info := ondisk.SlotInfo{Version: 1, Plan: "other"}
	if err := Scrub(d, info, []byte("public: true\n"), token, ""); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{token, token[7:]} {
		if i := bytes.Index(d.durable, []byte(part)); i >= 0 {
			t.Errorf("%q is still there, at %d", part, i)
		}
	}
	c, err := Read(bytes.NewReader(d.durable))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"site.yaml": "public: true\n", "files/etc/A long file name.d": "content",
		"config.ign": `{"x":"` + strings.Repeat("*", len(token)) + `"}`,
	}
	for name, b := range c.Files {
		if want[name] != string(b) {
			t.Errorf("%s is %q", name, b)
		}
		delete(want, name)
	}
	if len(want) > 0 || c.Info.Plan != "p1" || !strings.HasPrefix(string(c.Report.Text), "tried *") {
		t.Errorf("missing %v; info %+v; report %q", want, c.Info, c.Report.Text)
	}
}

// TestScrubIsFinishedAfterAPowerCut cuts the power at each write and scrubs again, as firstboot
// does.
func TestScrubIsFinishedAfterAPowerCut(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	info := ondisk.SlotInfo{Version: 1, Plan: "p1"}
	img := mustMake(t, sample())
	cuts, whole := 0, false
	for n := 0; !whole; n++ {
		for range 2 {
			d := newDevice(img)
			d.cutAfter = n
			if err := Scrub(d, info, []byte("public\n"), token); err == nil {
				whole = true
			} else {
				cuts++
			}
			d = newDevice(d.cut(rnd))
			if err := Scrub(d, info, []byte("public\n"), token); err != nil {
				t.Fatalf("cut after %d writes: %v", n, err)
			}
			if bytes.Contains(d.durable, []byte(token)) {
				t.Errorf("cut after %d writes: the token is still there", n)
			}
			if c, err := Read(bytes.NewReader(d.durable)); err != nil || string(c.Files["site.yaml"]) != "public\n" || c.Info.Plan != "p1" {
				t.Errorf("cut after %d writes: %+v %v", n, c, err)
			}
		}
	}
	if cuts < 20 {
		t.Errorf("only %d cuts", cuts)
	}
}

func TestScrubOfADamagedSlot(t *testing.T) {
	l := newLaptop(t, mustMake(t, sample()))
	l.put("edgebake.json", "{")
	b, err := os.ReadFile(l.img)
	if err != nil {
		t.Fatal(err)
	}
	d := newDevice(b)
	if err := Scrub(d, ondisk.SlotInfo{Version: 1, Plan: "p9"}, []byte("public\n"), token); err != nil {
		t.Fatal(err)
	}
	c, err := Read(bytes.NewReader(d.durable))
	if err != nil || c.Info.Plan != "p9" || bytes.Contains(d.durable, []byte(token)) {
		t.Errorf("%+v %v", c, err)
	}
}

func TestScrubLeavesAPersonsStickAlone(t *testing.T) {
	img := filepath.Join(t.TempDir(), "stick")
	disktest.Oracle(t, "truncate", "-s", "64M", img)
	disktest.Oracle(t, "mkfs.fat", "-F", "32", "-n", "EDGEBAKE", img)
	l := &laptop{t, img, t.TempDir()}
	l.put("site.yaml", token)
	l.put("holiday.jpg", "precious")
	before, err := os.ReadFile(img)
	if err != nil {
		t.Fatal(err)
	}
	d := newDevice(before)
	if err := Scrub(d, ondisk.SlotInfo{}, nil, token); !errors.Is(err, ErrForeign) {
		t.Errorf("got %v", err)
	}
	if !bytes.Equal(d.cache, before) {
		t.Error("the larger file system was written to")
	}
}

func TestScrubOfAnInventory(t *testing.T) {
	c := sample()
	c.Files["inventory.yaml"] = c.Files["site.yaml"]
	delete(c.Files, "site.yaml")
	for _, site := range [][]byte{[]byte("public\n"), nil} {
		d := newDevice(mustMake(t, c))
		if err := Scrub(d, c.Info, site); err != nil {
			t.Fatal(err)
		}
		got, err := Read(bytes.NewReader(d.durable))
		if site == nil && !errors.Is(err, ErrNoSite) || site != nil && string(got.Files["site.yaml"]) != "public\n" || got.Files["inventory.yaml"] != nil {
			t.Errorf("%q: %v %v", site, got, err)
		}
	}
}

// patched is a slot with other bytes in some places.
type patched struct {
	img     []byte
	patches map[int64][]byte
}

func (p patched) ReadAt(b []byte, off int64) (int, error) {
	n, err := bytes.NewReader(p.img).ReadAt(b, off)
	for at, patch := range p.patches {
		from, to := max(off, at), min(off+int64(n), at+int64(len(patch)))
		if from < to {
			copy(b[from-off:to-off], patch[from-at:])
		}
	}
	return n, err
}

// TestFoldersInsideThemselves uses a directory in which many entries refer to the directory itself.
func TestFoldersInsideThemselves(t *testing.T) {
	c := sample()
	for i := range 100 {
		c.Files[fmt.Sprintf("files/loop/D%d", i)] = nil
	}
	img := mustMake(t, c)
	// Find the entry of the directory, then the entries in it.
	top := bytes.Index(img, []byte("LOOP       \x10"))
	if top < 0 {
		t.Fatal("no directory to damage")
	}
	n := 0
	for i := range 100 {
		name := fmt.Appendf(nil, "%-11s\x20", fmt.Sprintf("D%d", i))
		if at := bytes.Index(img, name); at >= 0 {
			img[at+11] = 0x10
			copy(img[at+26:at+28], img[top+26:top+28])
			n++
		}
	}
	if n != 100 {
		t.Fatalf("%d entries damaged", n)
	}
	if _, err := Read(bytes.NewReader(img)); err == nil || !strings.Contains(err.Error(), "remove the files that do not belong") && !strings.Contains(err.Error(), "too deep") {
		t.Errorf("got %v", err)
	}
}

// FuzzRead damages a valid slot in its first sector, its allocation table and its top directory.
func FuzzRead(f *testing.F) {
	img := mustMake(f, sample())
	reserved := int64(img[14]) * 512
	table := int64(img[22]) * 512
	top := reserved + 2*table
	f.Add(img[:64], img[reserved:][:256], img[top:][:1024])
	f.Fuzz(func(t *testing.T, boot, fats, dir []byte) {
		c, err := Read(patched{img, map[int64][]byte{
			0: boot[:min(len(boot), 510)], reserved: fats[:min(len(fats), int(table))], top: dir[:min(len(dir), 16<<10)],
		}})
		if c == nil {
			if err == nil {
				t.Error("Read returned neither contents nor an error")
			}
			return
		}
		for name := range c.Files {
			if !allowedPath(name) || !filepath.IsLocal(name) {
				t.Errorf("a file called %q was read", name)
			}
		}
	})
}

func BenchmarkMake(b *testing.B) {
	c := sample()
	for b.Loop() {
		if _, err := Make(c); err != nil {
			b.Fatal(err)
		}
	}
}

// TestExplain checks that Explain adds no second fix to a message that has one.
func TestExplain(t *testing.T) {
	for name, tt := range map[string]struct {
		slot         []byte
		meta         string
		problem, fix string
	}{
		"blank":   {make([]byte, ondisk.SlotSize), "", "reading the slot: the slot is blank", "stamp the image again"},
		"newer":   {mustMake(t, sample()), `{"version":7}`, "reading the slot: reading edgebake.json: its version is 7, but this program supports only version 1", "use the edgebake that made the image"},
		"broken":  {mustMake(t, sample()), "{", "reading the slot: reading edgebake.json: ", "stamp the image again"},
		"damaged": {bytes.Repeat([]byte("junk"), ondisk.SlotSize/4), "", "reading the slot: ", "stamp the image again"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLaptop(t, tt.slot)
			if tt.meta != "" {
				l.put("edgebake.json", tt.meta)
			}
			_, err := l.read()
			if err == nil {
				t.Fatal("no error")
			}
			problem, fix := Explain(err)
			if !strings.HasPrefix(problem, tt.problem) || fix != tt.fix || strings.Contains(problem, tt.fix) {
				t.Errorf("%q, %q", problem, fix)
			}
		})
	}
}
