package fetch

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// spoil changes a blob without using the cache. If quiet is set, it also records the new state as
// verified, as if the disk itself had changed the bytes.
func spoil(t *testing.T, c *Cache, sha, to string, quiet bool) {
	t.Helper()
	p := c.BlobPath(sha)
	if err := errors.Join(os.Chmod(p, 0o644), os.WriteFile(p, []byte(to), 0o644)); err != nil {
		t.Fatal(err)
	}
	if quiet {
		fi, err := os.Lstat(p)
		if err != nil {
			t.Fatal(err)
		}
		c.saveVerified(sha, fi)
	}
}

func TestDamagedBlobs(t *testing.T) {
	const text = "kubelet"
	for _, tt := range []struct {
		name           string
		to             string
		quiet, hashAll bool
		found          bool
	}{
		{"one byte", "kubelex", false, false, true},
		{"cut to nothing", "", false, false, true},
		{"touched, not changed", text, false, false, false},
		{"by the disk itself", "kubelex", true, false, false}, // not found: the recorded state matches
		{"by the disk itself, all hashed", "kubelex", true, true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			maker, err := Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			recipe := func(_ context.Context, w io.Writer) error {
				_, err := io.WriteString(w, text)
				return err
			}
			sha, err := maker.Make(t.Context(), "key", recipe)
			if err != nil {
				t.Fatal(err)
			}
			spoil(t, maker, sha, tt.to, tt.quiet)
			maker.Close()

			c, err := Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			var told []string
			c.OnDamage(func(sha string) { told = append(told, sha) })
			if tt.hashAll {
				c.HashAll()
			}
			if c.Has(sha) == tt.found {
				t.Fatalf("Has returned %v", !tt.found)
			}
			if f, err := c.OpenBlob(sha); (err != nil) != tt.found {
				t.Errorf("OpenBlob: %v", err)
			} else if err == nil {
				f.Close()
			} else if !strings.Contains(err.Error(), "run the build again") {
				t.Errorf("the error of OpenBlob has no fix: %v", err)
			}
			if (len(told) == 1 && told[0] == sha) != tt.found {
				t.Errorf("OnDamage was called with %v", told)
			}
			if !tt.found {
				return
			}
			// A damaged blob is made again.
			if again, err := c.Make(t.Context(), "key", recipe); err != nil || again != sha || !c.Has(sha) {
				t.Errorf("made again: %s, %v", again, err)
			}
			if b, err := os.ReadFile(c.BlobPath(sha)); err != nil || string(b) != text {
				t.Errorf("the cache has %q, %v", b, err)
			}
		})
	}
}

// TestFoldersInTheCache checks that a directory in place of a blob or a key does not make builds
// fail.
func TestFoldersInTheCache(t *testing.T) {
	c := open(t, t.TempDir())
	recipe := func(_ context.Context, w io.Writer) error {
		_, err := io.WriteString(w, "kubelet")
		return err
	}
	sha, err := c.Make(t.Context(), "key", recipe)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := filepath.Glob(filepath.Join(c.Dir(), "keys", "*"))
	if err != nil || len(keys) != 1 {
		t.Fatal(keys, err)
	}
	for _, p := range []string{keys[0], c.BlobPath(sha)} {
		if err := errors.Join(os.Remove(p), os.MkdirAll(filepath.Join(p, "x"), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	again := open(t, c.Dir())
	if got, err := again.Make(t.Context(), "key", recipe); err != nil || got != sha || !again.Has(sha) {
		t.Errorf("%s, %v", got, err)
	}
	if got, ok := again.Lookup("key"); !ok || got != sha {
		t.Errorf("the key: %s, %v", got, ok)
	}
}

// TestHashingEndsWithTheBuild checks that canceling ends the hashing, and that the blob then does
// not count as damaged.
func TestHashingEndsWithTheBuild(t *testing.T) {
	c := open(t, t.TempDir())
	sha, _, err := c.Put(t.Context(), "", strings.NewReader("kubelet"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	again, err := Open(c.Dir())
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	again.HashAll()
	again.Until(ctx)
	if again.Has(sha) {
		t.Error("hashed after the interrupt")
	}
	again.Until(t.Context())
	if !again.Has(sha) {
		t.Error("an interrupt removed the blob")
	}
}

// untouched reports whether the blob's file is still in the state in which this session admitted
// it.
func (c *Cache) untouched(sha string) bool {
	v := c.verdictOf(sha)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.look(c.BlobPath(sha))
	return v.valid != nil && !v.changed
}

// TestUntouched checks that a write after the verification is found.
func TestUntouched(t *testing.T) {
	c, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	sha, _, err := c.Put(t.Context(), "", strings.NewReader("kubelet"))
	if err != nil {
		t.Fatal(err)
	}
	if !c.untouched(sha) || !c.Has(sha) || !c.untouched(sha) {
		t.Error("an unchanged blob does not count as untouched")
	}
	spoil(t, c, sha, "kubelex", false)
	if c.untouched(sha) {
		t.Error("a changed blob counts as untouched")
	}
	if err := os.Remove(c.BlobPath(sha)); err != nil || c.untouched(sha) {
		t.Errorf("a removed blob counts as untouched (%v)", err)
	}
}

// TestMadeOfWhatChanged checks that a recipe's result is not stored for its key if an input blob
// changed while the recipe read it.
func TestMadeOfWhatChanged(t *testing.T) {
	dir := t.TempDir()
	made := func(meanwhile func(c *Cache, sha string)) (string, error) {
		t.Helper()
		c, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		sha, _, err := c.Put(t.Context(), "", strings.NewReader("kubelet"))
		if err != nil {
			t.Fatal(err)
		}
		out, err := c.Make(t.Context(), "made of it", func(_ context.Context, w io.Writer) error {
			f, err := c.OpenBlob(sha)
			if err != nil {
				return err
			}
			defer f.Close()
			meanwhile(c, sha)
			_, err = io.Copy(w, io.NewSectionReader(f, 0, 1<<62))
			return err
		})
		if err != nil {
			return "", err
		}
		b, err := c.ReadBlob(out)
		return string(b), err
	}
	if got, err := made(func(c *Cache, sha string) { spoil(t, c, sha, "kubelex", false) }); err == nil || !strings.Contains(err.Error(), "changed while it was in use") {
		t.Errorf("using a blob that changed gave %q, %v", got, err)
	}
	if got, err := made(func(*Cache, string) {}); err != nil || got != "kubelet" {
		t.Errorf("the second run gave %q, %v", got, err)
	}
}

func TestVerify(t *testing.T) {
	c, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var shas []string
	for _, text := range []string{"one", "two", "three"} {
		sha, _, err := c.Put(t.Context(), "", strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		shas = append(shas, sha)
	}
	spoil(t, c, shas[1], "tvo", true)
	for _, dry := range []bool{true, false} {
		v, err := c.Verify(t.Context(), dry, nil)
		if err != nil || v.Sound.Blobs != 2 || len(v.Damaged) != 1 || v.Damaged[0].SHA256 != shas[1] {
			t.Fatalf("dry run %v: %+v, %v", dry, v, err)
		}
		if there(c, shas[1]) != dry {
			t.Errorf("dry run %v, and the damaged blob is there: %v", dry, !dry)
		}
	}
	if v, err := c.Verify(t.Context(), false, nil); err != nil || v.Sound.Blobs != 2 || len(v.Damaged) != 0 {
		t.Errorf("afterwards: %+v, %v", v, err)
	}
}

// TestTurnedKey checks that with HashAll, a key that points to another valid blob is not used.
func TestTurnedKey(t *testing.T) {
	dir := t.TempDir()
	maker, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := z.Write([]byte("the base")); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	archive, _, err := maker.Put(t.Context(), "", &packed)
	if err != nil {
		t.Fatal(err)
	}
	good, err := Uncompressed(t.Context(), maker, archive, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	evil, _, err := maker.Put(t.Context(), "", strings.NewReader("another base"))
	if err != nil {
		t.Fatal(err)
	}
	keys, err := filepath.Glob(filepath.Join(dir, "keys", "*"))
	if err != nil || len(keys) != 1 {
		t.Fatalf("%v, %v", keys, err)
	}
	if err := os.WriteFile(keys[0], []byte(evil), 0o644); err != nil {
		t.Fatal(err)
	}
	maker.Close()
	c, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.HashAll()
	for range 2 {
		if got, err := Uncompressed(t.Context(), c, archive, 1<<20); err != nil || got != good {
			t.Errorf("the uncompressed base is %s, want %s; %v", got, good, err)
		}
	}
}
