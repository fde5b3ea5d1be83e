package mint

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestNewMintingOfSomebodyElse checks a parent directory in which others can write: if another user
// made a link or a file at the path of the temporary directory, minting fails and changes nothing.
func TestNewMintingOfSomebodyElse(t *testing.T) {
	for name, tt := range map[string]struct {
		plant func(t *testing.T, victim, work string)
		want  string
	}{
		"link": {func(t *testing.T, victim, work string) {
			if err := os.Symlink(victim, work); err != nil {
				t.Fatal(err)
			}
		}, "is not a directory"},
		"file": {func(t *testing.T, victim, work string) {
			if err := os.WriteFile(work, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, "is not a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			parent, victim := t.TempDir(), t.TempDir()
			if err := os.WriteFile(filepath.Join(victim, "letter"), []byte("dear"), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(victim, 0o755); err != nil {
				t.Fatal(err)
			}
			tt.plant(t, victim, filepath.Join(parent, ".shops.minting"))
			_, err := newOf(filepath.Join(parent, "shops"), document, Options{Now: now()})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Error(err)
			}
			if got := contents(t, victim); len(got) != 1 {
				t.Errorf("the victim's files: %v", got)
			}
			if fi, err := os.Stat(victim); err != nil || fi.Mode().Perm() != 0o755 {
				t.Error(fi.Mode(), err)
			}
		})
	}
}

// TestOwner checks that another user's directory is rejected as not secret, whatever its mode.
func TestOwner(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	mustNew(t, dir, document)
	other := os.Geteuid() + 1
	if err := checkModes(dir, other); err == nil || !strings.Contains(err.Error(), "ca.key belongs to another user") {
		t.Error(err)
	}
	if err := leftOver(dir, other); err == nil || !strings.Contains(err.Error(), "belongs to another user") {
		t.Error(err)
	}
	if err := leftOver(dir, os.Geteuid()); err != nil {
		t.Error(err)
	}
}

// TestWritingToAFullDisk checks that the error about a full disk has the fix, and the name of the
// file instead of its temporary name.
func TestWritingToAFullDisk(t *testing.T) {
	err := writing("shops", "pki/ca.key", &fs.PathError{Op: "write", Path: "/srv/.shops.minting/pki/.new-1", Err: syscall.ENOSPC})
	if want := "writing shops/pki/ca.key: no space left on device; free some space and run the command again"; err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	// A file in place of the parent directory stays, and no other file is left next to it.
	parent := t.TempDir()
	if err := os.WriteFile(filepath.Join(parent, "shops"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := newOf(filepath.Join(parent, "shops", "berlin"), document, Options{Now: now()}); err == nil {
		t.Error("minting into a path below a file succeeded")
	}
	if got := contents(t, parent); len(got) != 1 {
		t.Errorf("%v", got)
	}
}

// TestLockFollowsNoLink checks that lock does not follow a symbolic link, which may have replaced
// the directory since hold resolved its path.
func TestLockFollowsNoLink(t *testing.T) {
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	if held, err := lock(link); err == nil {
		held.Close()
		t.Error("the target of a symbolic link was locked")
	}
}

// TestUpdateLocksBeforeItReads checks that the record is not read while another run has the lock,
// because that run may be writing it.
func TestUpdateLocksBeforeItReads(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	mustNew(t, dir, document)
	held, err := lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := os.WriteFile(filepath.Join(dir, fileRecord), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := newOf(dir, document, Options{Now: now()}); err == nil || !strings.Contains(err.Error(), "is in use by another edgebake") {
		t.Error(err)
	}
}

// TestNewSweeps checks that the next run after a power cut removes partial files, and tokens that
// are not in the record, and nothing else.
func TestNewSweeps(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	mustNew(t, dir, document)
	for _, name := range []string{"tokens/gone.yaml", "tokens/gone.yaml.age", "tokens/.new-1", "pki/etcd/.new-2", ".new-3", "tokens/notes.txt"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if c := mustNew(t, dir, document); !c.Nothing() {
		t.Errorf("%+v", c)
	}
	is := contents(t, dir)
	for _, name := range []string{"tokens/gone.yaml", "tokens/gone.yaml.age", "tokens/.new-1", "pki/etcd/.new-2", ".new-3"} {
		if _, there := is[name]; there {
			t.Errorf("%s is still there", name)
		}
	}
	for _, name := range []string{"tokens/a.yaml", "tokens/b.yaml", "tokens/notes.txt", "pki/ca.key"} {
		if is[name] == "" {
			t.Errorf("%s is gone", name)
		}
	}
}

// TestDrawTokenAgain checks that no two tokens have the same ID, since the cluster would know only
// one of them.
func TestDrawTokenAgain(t *testing.T) {
	draws := []string{"aaaaaa.1", "bbbbbb.2", "cccccc.3"}
	draw := func() (id, secret string) {
		id, secret, _ = strings.Cut(draws[0], ".")
		draws = draws[1:]
		return id, secret
	}
	if id, secret := drawToken([]Token{{ID: "aaaaaa"}, {ID: "bbbbbb"}}, draw); id != "cccccc" || secret != "3" {
		t.Error(id, secret)
	}
}
