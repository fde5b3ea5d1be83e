package disktest

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestSum checks Sum and Empty.
func TestSum(t *testing.T) {
	sums := map[string]string{}
	for _, tt := range []struct {
		name  string
		zeros bool // zeros are written where other files have holes
		size  int64
		at    int64 // offset of one byte; -1 for none
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
		if Empty(t, path) != (tt.at < 0) {
			t.Errorf("%s: Empty returns %v", tt.name, tt.at >= 0)
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

// TestCopies checks that Copy and Write keep the bytes, and that zeros become holes.
func TestCopies(t *testing.T) {
	b := make([]byte, 5<<20+7)
	copy(b[1<<20:], "text")
	copy(b[3<<20-2:], "across blocks")
	b[len(b)-1] = 1
	dir := t.TempDir()
	full, written, copied := filepath.Join(dir, "full"), filepath.Join(dir, "written"), filepath.Join(dir, "copied")
	if err := os.WriteFile(full, b, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(copied, bytes.Repeat([]byte("more"), 2<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	Write(t, written, b)
	Copy(t, full, copied)
	for _, path := range []string{written, copied} {
		got, err := os.ReadFile(path)
		if err != nil || !bytes.Equal(got, b) {
			t.Errorf("%s has other bytes: %v", path, err)
		}
		if st, err := os.Stat(path); err != nil || st.Sys().(*syscall.Stat_t).Blocks*512 > 1<<20 {
			t.Errorf("%s has no holes: %v", path, err)
		}
		for text, want := range map[string]bool{"text": true, "across blocks": true, "across blocksx": false, strings.Repeat("a", 3*blockSize): false, "\x01": true} {
			if Contains(t, path, text) != want {
				t.Errorf("%s has %.20q: %t", path, text, !want)
			}
		}
	}
}

// TestScratch checks that a killed run leaves its files only in the directory that `make unit`
// removes.
func TestScratch(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	if got := Scratch(t); filepath.Dir(got) != dir {
		t.Errorf("%s is not in %s", got, dir)
	}
}
