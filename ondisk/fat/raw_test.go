package fat

import (
	"bytes"
	"slices"
	"testing"

	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/disktest"
)

// TestEachNames checks that EachNames returns the names that any reader could find, and Each only
// those that this package's reader finds.
func TestEachNames(t *testing.T) {
	img := memory(make([]byte, 16<<20))
	nodes := append([]tree.Node{folder("EFI"), folder("sub"), regular("sub/a long file name.txt", nil)}, regular("AAA", nil), regular("BBB", nil), regular("a long file name.txt", nil), regular("ZZZ", nil))
	if err := Write(img, nodes, nil, Options{Type: 16, Label: "X", Size: int64(len(img))}); err != nil {
		t.Fatal(err)
	}
	names := func(dir string) (all []string, known []string) {
		r, err := Open(bytes.NewReader(img))
		if err != nil {
			t.Fatal(err)
		}
		d, err := r.Stat(dir)
		if err != nil {
			t.Fatal(err)
		}
		err = r.EachNames(d, func(n Names) bool {
			all = append(all, n.Long+"|"+n.Short+"|"+n.Odd)
			return true
		})
		if err != nil {
			t.Fatal(err)
		}
		list, err := r.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list {
			known = append(known, e.Name())
		}
		return all, known
	}
	if all, _ := names("."); !slices.Equal(all, []string{"AAA|AAA|", "BBB|BBB|", "EFI|EFI|", "ZZZ|ZZZ|", "a long file name.txt|ALONGF~1.TXT|", "sub|SUB|"}) {
		t.Errorf("%q", all)
	}
	if all, _ := names("sub"); !slices.Equal(all, []string{"a long file name.txt|ALONGF~1.TXT|"}) {
		t.Errorf("below: %q", all)
	}
	disktest.Disguise(t, img, "EFI        ", "x/y")
	at := func(short string) []byte {
		i := bytes.Index(img, []byte(short))
		if i < 0 {
			t.Fatal(short)
		}
		return img[i:]
	}
	at("AAA        ")[0] = 0xe5         // mark as deleted
	at("BBB        ")[11] |= attrVolume // a second volume label
	at("ALONGF~1TXT")[8] = 'B'          // so that the long name belongs to no file
	all, known := names(".")
	want := []string{"BBB|BBB|" + oddVolume, "x/y||" + oddName, "ZZZ|ZZZ|", "ALONGF~1.BXT||" + oddPart, "ALONGF~1.BXT|ALONGF~1.BXT|", "sub|SUB|"}
	if !slices.Equal(all, want) {
		t.Errorf("%q", all)
	}
	if !slices.Equal(known, []string{"ZZZ", "ALONGF~1.BXT", "sub"}) {
		t.Errorf("known: %q", known)
	}
}
