package installer

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/builder/media"
)

// FuzzVolume reads the name of an ISO 9660 volume from a device of any content.
func FuzzVolume(f *testing.F) {
	head := append([]byte("\x01CD001\x01\x00"+strings.Repeat(" ", 32)+"EDGEBAKE_0123456789ABCDEF"), bytes.Repeat([]byte(" "), 7)...)
	f.Add(head)
	f.Add(append(bytes.Clone(head), make([]byte, 2048)...))
	f.Add([]byte("\x01CD001"))
	f.Add([]byte{})
	dev := filepath.Join(f.TempDir(), "sr0")
	f.Fuzz(func(t *testing.T, descriptor []byte) {
		if err := os.WriteFile(dev, append(make([]byte, 16*2048), descriptor...), 0o600); err != nil {
			t.Fatal(err)
		}
		name := volumeOf(dev)
		if len(name) > 32 || strings.HasSuffix(name, " ") || name != "" && (len(descriptor) < 2048 || !bytes.Contains(descriptor, []byte(name))) {
			t.Errorf("%q", name)
		}
	})
}

// FuzzBootNext checks that BootNext names an entry that starts the installed disk, and that
// existing entries stay, whatever variables the firmware shows.
func FuzzBootNext(f *testing.F) {
	found := media.DiskContent{ESPNumber: 1, ESP: gpt.Partition{GUID: "0fc63daf-8483-4772-8e79-3d69d8477de4", Start: 1 << 20, Size: 64 << 20}, Sector: 512}
	option, err := loadOption(found, "amd64")
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte("\x07\x00\x00\x00\x01"), append([]byte{7, 0, 0, 0}, option...))
	f.Add([]byte{}, []byte{7})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		dir := t.TempDir()
		name := func(v string) string { return filepath.Join(dir, v+"-"+efiGlobal) }
		for v, b := range map[string][]byte{"Boot0000": first, "Boot0001": second} {
			if err := os.WriteFile(name(v), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := bootNext(dir, "amd64", found); err != nil {
			t.Fatal(err)
		}
		next, err := os.ReadFile(name("BootNext"))
		if err != nil || len(next) != 6 || next[4] > 2 || next[5] != 0 {
			t.Fatalf("%x %v", next, err)
		}
		entry, err := os.ReadFile(name("Boot000" + string('0'+rune(next[4]))))
		if err != nil || len(entry) < 4 || !bytes.Equal(entry[4:], option) {
			t.Errorf("BootNext names the entry %x, %v; want %x", entry, err, option)
		}
		for v, b := range map[string][]byte{"Boot0000": first, "Boot0001": second} {
			if now, err := os.ReadFile(name(v)); err != nil || !bytes.Equal(now, b) {
				t.Errorf("%s was %x, is %x %v", v, b, now, err)
			}
		}
	})
}

// FuzzGUID checks that an accepted GUID gives sixteen bytes.
func FuzzGUID(f *testing.F) {
	f.Add("0fc63daf-8483-4772-8e79-3d69d8477de4")
	f.Add("-")
	f.Fuzz(func(t *testing.T, s string) {
		if b, err := efiGUID(s); err == nil && len(b) != 16 {
			t.Errorf("%x", b)
		}
		if b := ucs2(s); len(b)%2 != 0 || len(b) < 2 || utf8.ValidString(s) && len(b) < 2*utf8.RuneCountInString(s)+2 {
			t.Errorf("%x", b)
		}
	})
}
