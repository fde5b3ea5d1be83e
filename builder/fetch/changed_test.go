package fetch

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// change overwrites a blob with other bytes of the same size.
func change(t *testing.T, c *Cache, sha string) {
	t.Helper()
	p := c.BlobPath(sha)
	if err := os.Chmod(p, 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(p, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt([]byte("X"), 0)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, c *Cache, b []byte) string {
	t.Helper()
	sha, _, err := c.Put(t.Context(), "", bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	return sha
}

// TestChangedSinceAdmitted checks that it is an error until the end of the session if a blob
// changes after the session admitted it, even if another session repairs it.
func TestChangedSinceAdmitted(t *testing.T) {
	for _, how := range []string{"admitted", "put", "all hashed"} {
		t.Run(how, func(t *testing.T) {
			dir := t.TempDir()
			maker := open(t, dir)
			sha, other := put(t, maker, []byte("kubelet")), put(t, maker, []byte("kubeadm"))
			c := maker
			if how != "put" {
				c = open(t, dir)
			}
			if how == "all hashed" {
				c.HashAll()
			}
			for _, s := range []string{sha, other} {
				if !c.Has(s) {
					t.Fatal("the undamaged blob was rejected")
				}
			}
			if err := c.Unchanged(); err != nil {
				t.Fatal(err)
			}
			change(t, c, sha)
			repairer := open(t, dir)
			if repairer.Has(sha) {
				t.Fatal("no error for the damaged blob")
			}
			put(t, repairer, []byte("kubelet"))
			for _, when := range []string{"repaired", "verified again"} {
				err := c.Unchanged()
				if err == nil || !strings.Contains(err.Error(), sha) || strings.Contains(err.Error(), other) || !strings.Contains(err.Error(), "run the build again") {
					t.Errorf("%s: %v", when, err)
				}
				if f, err := c.OpenBlob(sha); err == nil {
					f.Close()
					t.Errorf("%s: the damaged blob can be opened", when)
				}
				if c.untouched(sha) || !c.untouched(other) {
					t.Errorf("%s: untouched", when)
				}
				if !c.Has(sha) {
					t.Errorf("%s: the repaired blob is not there", when)
				}
			}
			if _, err := c.ReadBlob(other); err != nil {
				t.Error(err)
			}
			if next := open(t, dir); !next.Has(sha) || next.Unchanged() != nil {
				t.Error("the next session reports the damage again")
			}
		})
	}
}

// TestSessionsShareBlobs checks that sessions that use a valid blob at the same time do not report
// it as changed.
func TestSessionsShareBlobs(t *testing.T) {
	dir := t.TempDir()
	content := make([]byte, 16<<20)
	if _, err := rand.Read(content); err != nil {
		t.Fatal(err)
	}
	sha := put(t, open(t, dir), content)
	var wg sync.WaitGroup
	for i := range 12 {
		c := open(t, dir)
		if i%2 == 0 {
			c.HashAll()
		}
		wg.Go(func() {
			time.Sleep(time.Duration(i) * 3 * time.Millisecond)
			for range 3 {
				f, err := c.OpenBlob(sha)
				if err != nil {
					t.Error(err)
					return
				}
				f.Close()
				if i%3 == 0 {
					if _, _, err := c.Put(context.Background(), sha, bytes.NewReader(content)); err != nil {
						t.Error(err)
					}
				}
			}
			if _, err := c.Verify(context.Background(), false, nil); err != nil {
				t.Error(err)
			}
			if err := c.Unchanged(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// TestSessionsRepairABlob checks that sessions that find a damaged blob at the same time all get a
// valid one.
func TestSessionsRepairABlob(t *testing.T) {
	dir := t.TempDir()
	content := bytes.Repeat([]byte("base"), 1<<20)
	maker := open(t, dir)
	sha := put(t, maker, content)
	change(t, maker, sha)
	var wg sync.WaitGroup
	var removed atomic.Int32
	for i := range 8 {
		c := open(t, dir)
		c.OnDamage(func(string) { removed.Add(1) })
		wg.Go(func() {
			time.Sleep(time.Duration(i) * time.Millisecond)
			if !c.Has(sha) {
				if _, _, err := c.Put(context.Background(), sha, bytes.NewReader(content)); err != nil {
					t.Error(err)
				}
			}
			if b, err := c.ReadBlob(sha); err != nil || !bytes.Equal(b, content) {
				t.Errorf("session %d: %v", i, err)
			}
			if err := c.Unchanged(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := removed.Load(); n != 1 {
		t.Errorf("%d sessions have removed the damaged blob, want 1", n)
	}
}

// writing repeatedly writes a blob's own content to it, until stop is called.
func writing(t *testing.T, c *Cache, sha string) (stop func()) {
	t.Helper()
	p := c.BlobPath(sha)
	if err := os.Chmod(p, 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(p, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	end, ended := make(chan bool), make(chan bool)
	old := make([]byte, 1)
	if _, err := f.ReadAt(old, 0); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(ended)
		for {
			select {
			case <-end:
				return
			default:
				_, _ = f.WriteAt(old, 0)
				time.Sleep(time.Millisecond)
			}
		}
	}()
	return func() {
		close(end)
		<-ended
		f.Close()
	}
}

// TestHashedWhileWrittenTo checks that a blob is neither accepted nor removed if a program writes
// to it while it is hashed.
func TestHashedWhileWrittenTo(t *testing.T) {
	dir := t.TempDir()
	maker := open(t, dir)
	sha := put(t, maker, bytes.Repeat([]byte("0123456789abcdef"), 4<<20))
	if err := os.Remove(maker.verifiedPath(sha)); err != nil {
		t.Fatal(err)
	}
	stop := writing(t, maker, sha)
	c := open(t, dir)
	if v, err := c.Verify(t.Context(), false, nil); !errors.Is(err, errChanges) || v.Sound.Blobs != 0 || len(v.Damaged) != 0 {
		t.Errorf("Verify: %+v, %v", v, err)
	}
	if f, err := c.OpenBlob(sha); !errors.Is(err, errChanges) {
		t.Errorf("OpenBlob: %v", err)
		if err == nil {
			f.Close()
		}
	}
	if _, err := os.Stat(c.verifiedPath(sha)); err == nil {
		t.Error("the blob is recorded as verified while a program writes to it")
	}
	stop()
	if v, err := c.Verify(t.Context(), false, nil); err != nil || v.Sound.Blobs != 1 {
		t.Errorf("Verify, afterwards: %+v, %v", v, err)
	}
	if !c.Has(sha) {
		t.Error("the blob is missing")
	}
}

// TestMarkOfUseIsNoChange checks that using a blob does not change its file, but that Prune takes
// the use into account. An older edgebake recorded the last use in the time of the blob's file:
// Prune must respect that too.
func TestMarkOfUseIsNoChange(t *testing.T) {
	dir := t.TempDir()
	maker := open(t, dir)
	used, idle := put(t, maker, []byte("used")), put(t, maker, []byte("idle"))
	recent, older := put(t, maker, []byte("recent")), put(t, maker, []byte("older"))
	for _, sha := range []string{used, idle} {
		age(t, maker, sha, 48*time.Hour)
	}
	// An older edgebake records the last use in the file of the blob itself.
	at := time.Now().Add(-48 * time.Hour)
	if err := errors.Join(os.Remove(maker.markPath(recent)), os.Remove(maker.markPath(older)), os.Chtimes(maker.BlobPath(older), at, at)); err != nil {
		t.Fatal(err)
	}
	maker.Close()
	c := open(t, dir)
	before, err := os.Lstat(c.BlobPath(used))
	if err != nil {
		t.Fatal(err)
	}
	if !c.Has(used) {
		t.Fatal("the blob is missing")
	}
	if after, err := os.Lstat(c.BlobPath(used)); err != nil || !sameState(before, after) {
		t.Errorf("the recorded state differs: %v", err)
	}
	prune(t, open(t, dir), Limits{UsedSince: time.Now().Add(-24 * time.Hour)})
	for sha, want := range map[string]bool{used: true, recent: true, idle: false, older: false} {
		if there(c, sha) != want {
			t.Errorf("%s: blob exists: %v", sha, !want)
		}
	}
}

// TestDamagedProgram checks that a damaged copy of a program is replaced.
func TestDamagedProgram(t *testing.T) {
	const text = "#!/bin/sh\necho it runs\n"
	dir := t.TempDir()
	c := open(t, dir)
	sha := put(t, c, []byte(text))
	path, err := c.Program(sha, "it")
	if err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func() error{
		"untouched":       func() error { return nil },
		"cut to nothing":  func() error { return os.Truncate(path, 0) },
		"zeros":           func() error { return os.WriteFile(path, make([]byte, len(text)), 0o755) },
		"gone":            func() error { return os.Remove(path) },
		"not executable":  func() error { return os.Chmod(path, 0o644) },
		"a directory":     func() error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o755)) },
		"a link to zeros": func() error { return errors.Join(os.Remove(path), os.Symlink("/dev/zero", path)) },
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		got, err := open(t, dir).Program(sha, "it")
		if err != nil || got != path {
			t.Fatalf("%s: %s, %v", name, got, err)
		}
		if out, err := exec.Command(got).Output(); err != nil || string(out) != "it runs\n" {
			t.Errorf("%s: the program printed %q, %v", name, out, err)
		}
	}
}
