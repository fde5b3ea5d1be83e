package disktest

import (
	"os"
	"path/filepath"
	"testing"
)

func TestSum(t *testing.T) {
	sums := map[string]string{}
	for _, tt := range []struct {
		name  string
		zeros bool // written, where others have holes
		size  int64
		at    int64 // of one byte; -1: of none
		as    string
	}{
		{"empty", false, 0, -1, ""},
		{"holes", false, 1 << 20, -1, ""},
		{"zeros", true, 1 << 20, -1, "holes"},
		{"longer", false, 1<<20 + 1, -1, ""},
		{"a byte", false, 1 << 20, 300_000, ""},
		{"a byte among zeros", true, 1 << 20, 300_000, "a byte"},
		{"the next one", false, 1 << 20, 300_001, ""},
		{"one far away", false, 1 << 20, 1<<20 - 1, ""},
		{"the last of an odd size", true, 1<<20 + 1, 1 << 20, ""},
	} {
		path := filepath.Join(t.TempDir(), "f")
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := f.Truncate(tt.size); err != nil {
			t.Fatal(err)
		}
		if tt.zeros {
			if _, err := f.WriteAt(make([]byte, tt.size), 0); err != nil {
				t.Fatal(err)
			}
		}
		if tt.at >= 0 {
			if _, err := f.WriteAt([]byte{1}, tt.at); err != nil {
				t.Fatal(err)
			}
		}
		sum := Sum(t, path)
		if as, ok := sums[sum]; as != tt.as || ok != (tt.as != "") {
			t.Errorf("%s: its sum is that of %q, want %q", tt.name, as, tt.as)
		}
		if tt.as == "" {
			sums[sum] = tt.name
		}
	}
}
