package mint

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// In a parent that others can write to, the name of the minting may be a link
// or a directory that somebody else put there: nothing of it is touched.
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

// A directory whose owner is another user is not taken for a secret one,
// whatever its mode.
func TestOwner(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	mustNew(t, dir, document)
	other := os.Geteuid() + 1
	if err := checkModes(dir, other); err == nil || !strings.Contains(err.Error(), "ca.key is of another user") {
		t.Error(err)
	}
	if err := leftOver(dir, other); err == nil || !strings.Contains(err.Error(), "is of another user") {
		t.Error(err)
	}
	if err := leftOver(dir, os.Geteuid()); err != nil {
		t.Error(err)
	}
}

// A full disk is said of the file that a person knows, with what to do, and
// without the name that it had so far.
func TestWritingToAFullDisk(t *testing.T) {
	err := writing("shops", "pki/ca.key", &fs.PathError{Op: "write", Path: "/srv/.shops.minting/pki/.new-1", Err: syscall.ENOSPC})
	if want := "writing shops/pki/ca.key: no space left on device: make room there and run the command again"; err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	// What is in the way is somebody's: it stays, and nothing is left beside it.
	parent := t.TempDir()
	if err := os.WriteFile(filepath.Join(parent, "shops"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := newOf(filepath.Join(parent, "shops", "berlin"), document, Options{Now: now()}); err == nil {
		t.Error("minted below a file")
	}
	if got := contents(t, parent); len(got) != 1 {
		t.Errorf("%v", got)
	}
}

// The lock follows no link, whatever becomes of the name in between.
func TestLockFollowsNoLink(t *testing.T) {
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	if held, err := lock(link); err == nil {
		held.Close()
		t.Error("locked what a link names")
	}
}

// While another run has the lock, its record is not read: it may be writing it.
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

// A power cut between the record and the removal of a token leaves a secret
// that nothing names, and one in a write a half file: the next run takes both
// away, and nothing else.
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

// No two tokens have one id: the cluster would know one of them only.
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
