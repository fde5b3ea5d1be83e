package file

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	for i, write := range []func(string, []byte) error{Replace, Swap, Replace} {
		text := string(rune('a' + i))
		if err := write(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != text {
			t.Errorf("%q, %v", got, err)
		}
	}
	if st, err := os.Stat(path); err != nil || st.Mode() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	// A directory cannot be replaced, and no temporary file remains.
	if err := os.Mkdir(filepath.Join(dir, "d"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Replace(filepath.Join(dir, "d"), nil); err == nil {
		t.Error("a directory was replaced")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("%v, %v", entries, err)
	}
	missing := filepath.Join(dir, "missing", "a")
	if err := Replace(missing, nil); err == nil || err.Error() != "write "+missing+": no such file or directory" {
		t.Errorf("writing into a directory that does not exist: %v", err)
	}
	if err := Replace(filepath.Join(dir, "d"), nil); err == nil || strings.Contains(err.Error(), unfinished) {
		t.Errorf("an error without a known path: %v", err)
	}
}

func TestSHA256(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	if err := os.WriteFile(path, []byte("abc"), 0o600); err != nil {
		t.Fatal(err)
	}
	// This is the example in FIPS 180-2, B.1.
	if sum, err := SHA256(path); err != nil || sum != "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" {
		t.Errorf("%s, %v", sum, err)
	}
	if _, err := SHA256(path + "x"); err == nil {
		t.Error("a file that does not exist has a digest")
	}
}
