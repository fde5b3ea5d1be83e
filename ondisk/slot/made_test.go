package slot

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/disktest"
)

// TestAsMade checks that AsMade accepts every slot that edgebake or first boot writes.
func TestAsMade(t *testing.T) {
	litter := sample()
	litter.Files["files/.DS_Store"] = []byte("mac") // stamping accepts this file, but no machine applies it
	large := sample()
	large.Info.SectorSize = 4096
	signed := sample()
	signed.Signature = []byte("untrusted comment: x\n")
	undated := sample()
	undated.Info.Stamped = 0
	mark := sample()
	mark.Files["site.yaml"] = []byte("\xef\xbb\xbfa: b\r\n")
	for name, c := range map[string]Contents{"sample": sample(), "litter": litter, "4096": large, "signed": signed, "undated": undated, "mark": mark, "golden": {Info: sample().Info}} {
		d := newDevice(mustMake(t, c))
		check := func(what string) {
			t.Helper()
			if err := AsMade(d); err != nil {
				t.Errorf("%s, %s: %v", name, what, err)
			}
			if err := Strays(d); err != nil {
				t.Errorf("%s, %s: %v", name, what, err)
			}
		}
		check("made")
		if err := WriteReport(d, Report{Text: bytes.Repeat([]byte("tried "+token+"\n\n\n"), 9000), JSON: []byte("{}\n")}); err != nil {
			t.Fatal(err)
		}
		check("reported")
		if err := Scrub(d, c.Info, []byte("public: true\n"), token); err != nil {
			t.Fatal(err)
		}
		check("scrubbed")
		if err := Rewrite(d, sample()); err != nil {
			t.Fatal(err)
		}
		check("replaced")
	}
}

// TestRemake checks that Remake keeps the files of a slot and drops all others.
func TestRemake(t *testing.T) {
	img := mustMake(t, sample())
	want := slices.Clone(img)
	l := newLaptop(t, img)
	disktest.Oracle(t, "mmd", "-i", l.img, "::EFI")
	l.put("EFI/x", "loader")
	l.put("notes.txt", "mine")
	f, err := os.Open(l.img)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := AsMade(f); err == nil || !strings.Contains(err.Error(), "another program") {
		t.Errorf("%v", err)
	}
	got, err := Remake(f)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("the slot without these files differs")
	}
}

// TestStrays checks that no file can have a second name by which firmware could find it.
func TestStrays(t *testing.T) {
	node := func(name string) tree.Node {
		return tree.Node{Path: name, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, Data: tree.Bytes([]byte("x"))}}
	}
	made := func(names ...string) []byte {
		m := mem(make([]byte, ondisk.SlotSize))
		var nodes []tree.Node
		for _, n := range append(names, ondisk.SlotSite) {
			nodes = append(nodes, node(n))
		}
		if err := fat.Write(m, nodes, nil, fat.Options{Type: 16, Label: ondisk.LabelSlot, Size: ondisk.SlotSize}); err != nil {
			t.Fatal(err)
		}
		return m
	}
	as := func(long string) []byte {
		b := made("EFI/BOOT/BOOTX64.EFI")
		disktest.Disguise(t, b, "EFI        ", long)
		return b
	}
	volume := made("EFI/BOOT/BOOTX64.EFI")
	volume[bytes.Index(volume, []byte("EFI        \x10"))+11] |= 0x08
	script := made("STARTUP.NSH")
	disktest.Disguise(t, script, "STARTUP NSH", "report.txt")
	twice := made("report.txt")
	copy(twice[bytes.Index(twice, []byte("REPORT  TXT")):], "SITE~1  YAM")
	for _, tc := range []struct {
		img  []byte
		want string
	}{
		{made(), ""},
		{made("System Volume Information/x", ".DS_Store", "._site.yaml"), ""},
		{as("files"), `"files", also named "EFI"`},
		{as("pki"), `"pki", also named "EFI"`},
		{as("x/y"), oddUnusable},
		{as("."), "(an entry . or .. in"},
		{as("a\x01:"), "a\\x01:"},
		{as(".Trashes"), `".Trashes", also named "EFI"`},
		{as("..."), `"..."`},
		{volume, "(a volume label that is a directory"},
		{script, `"report.txt", also named "STARTUP.NSH"`},
		{twice, "(a name that another entry also has)"},
	} {
		err := Strays(bytes.NewReader(tc.img))
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("got %v, want %q", err, tc.want)
		}
	}
}

const oddUnusable = `"x/y" (an invalid file name)`
