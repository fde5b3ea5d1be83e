package file

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

func TestErrorsOfTheSystemComeWithACure(t *testing.T) {
	for err, want := range map[error]string{
		syscall.ENOSPC: "make room", syscall.EDQUOT: "make room",
		syscall.EACCES: "cannot be written by this user", syscall.EPERM: "cannot be written by this user",
		syscall.ENOENT: "make directory", syscall.EFBIG: "ulimit",
	} {
		got := explainOpen(&fs.PathError{Op: "open", Path: "x", Err: err}, "/some/folder")
		if !errors.Is(got, err) || !strings.Contains(got.Error(), want) || !strings.Contains(got.Error(), "/some/folder") {
			t.Errorf("%v: %v", err, got)
		}
	}
	if err := errors.New("other"); Explain(err, "x") != err {
		t.Error("an unknown error was changed")
	}
}

// TestNamedTemporaryFile uses named temporary files, as on systems without nameless files.
func TestNamedTemporaryFile(t *testing.T) {
	none := func(string, fs.FileMode) (*os.File, error) { return nil, errors.ErrUnsupported }
	for _, force := range []bool{false, true} {
		d := t.TempDir()
		path := filepath.Join(d, "x")
		a, err := create(path, 0o600, force, none)
		if err != nil {
			t.Fatal(err)
		}
		b, err := create(path, 0o600, force, none) // compression also has two outputs at once
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.WriteString("a"); err != nil {
			t.Fatal(err)
		}
		if err := a.Commit(); err != nil {
			t.Fatal(err)
		}
		a.Discard()
		if force {
			b.Discard()
		} else if err := b.Commit(); !errors.Is(err, fs.ErrExist) {
			t.Errorf("the second of two: %v", err)
		}
		if got := files(t, d); len(got) != 1 || got[0] != "x" {
			t.Errorf("force=%v: %v", force, got)
		}
		if c, err := os.ReadFile(path); err != nil || string(c) != "a" {
			t.Errorf("force=%v: %q %v", force, c, err)
		}
	}
}

// TestSyncedBeforeNamed checks that the contents are synced before the file gets its name, so that
// a power cut cannot leave an incomplete file.
func TestSyncedBeforeNamed(t *testing.T) {
	for _, force := range []bool{false, true} {
		for name, nameless := range map[string]func(string, fs.FileMode) (*os.File, error){
			"nameless": openNameless,
			"named":    func(string, fs.FileMode) (*os.File, error) { return nil, errors.ErrUnsupported },
		} {
			path := filepath.Join(t.TempDir(), "x")
			o, err := create(path, 0o600, force, nameless)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := o.WriteString("new"); err != nil {
				t.Fatal(err)
			}
			synced := false
			o.sync = func() error {
				if _, err := os.Lstat(path); err == nil {
					t.Errorf("%s, force %v: the file has its name before it is synced", name, force)
				}
				synced = true
				return o.File.Sync()
			}
			if err := o.Commit(); err != nil || !synced {
				t.Errorf("%s, force %v: synced %v, %v", name, force, synced, err)
			}
			o, err = create(filepath.Join(t.TempDir(), "y"), 0o600, force, nameless)
			if err != nil {
				t.Fatal(err)
			}
			o.sync = func() error { return syscall.EIO }
			if err := o.Commit(); !errors.Is(err, syscall.EIO) {
				t.Errorf("%s, force %v: a disk that fails: %v", name, force, err)
			}
			if left := files(t, filepath.Dir(o.path)); len(left) > 0 {
				t.Errorf("%s, force %v: left behind: %v", name, force, left)
			}
		}
	}
}

// TestContinueOfAnotherUser checks that another user's partial file is not continued, because that
// user would own the final file.
func TestContinueOfAnotherUser(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image.raw.zst")
	partial := filepath.Join(filepath.Dir(path), ".image.raw.zst.partial")
	for what, leave := range map[string]func() error{
		"a file": func() error {
			return errors.Join(os.WriteFile(partial, []byte("begun"), 0o666), os.Chown(partial, 65534, 65534))
		},
		"a pipe": func() error { return syscall.Mkfifo(partial, 0o666) },
		"a link": func() error {
			other := filepath.Join(t.TempDir(), "other")
			return errors.Join(os.WriteFile(other, []byte("begun"), 0o666), os.Symlink(other, partial))
		},
	} {
		if os.Geteuid() != 0 && what == "a file" {
			continue // only root can create another user's file
		}
		if err := leave(); err != nil {
			t.Fatal(err)
		}
		if o, err := Continue(path, 0o666, false); err == nil || !strings.Contains(err.Error(), partial) {
			t.Errorf("%s: %v", what, err)
			if err == nil {
				o.Discard()
			}
		}
		_ = os.Remove(partial)
	}
	// The user's own partial file is continued.
	if err := os.WriteFile(partial, []byte("begun"), 0o600); err != nil {
		t.Fatal(err)
	}
	o, err := Continue(path, 0o666, false)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := o.Stat(); err != nil || st.Size() != 5 {
		t.Errorf("%v %v", st, err)
	}
	if err := o.Commit(); err != nil {
		t.Error(err)
	}
}
