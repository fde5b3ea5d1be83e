package fetch

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/desk"
)

// TestImportWhatChanges checks that Import stores only what two consecutive readings of a source
// have returned, and fails if the source changes each time.
func TestImportWhatChanges(t *testing.T) {
	for _, tt := range []struct {
		name     string
		readings []string // the last one is repeated
		want     string   // empty if Import fails
		reads    int
	}{
		{"it keeps still", []string{"a"}, "a", 2},
		{"saved between two readings", []string{"a", "b"}, "b", 4},
		{"saved in the middle of the second", []string{"a", "ab", "b"}, "b", 4},
		{"saved without end", []string{"a", "b", "c", "d", "e", "f"}, "", 6},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := open(t, t.TempDir())
			reads := 0
			sha, err := c.Import(t.Context(), func(_ context.Context, w io.Writer) error {
				_, err := io.WriteString(w, tt.readings[min(reads, len(tt.readings)-1)])
				reads++
				return err
			})
			if reads != tt.reads {
				t.Errorf("the file was read %d times, want %d", reads, tt.reads)
			}
			blobs, listErr := c.List()
			if listErr != nil {
				t.Fatal(listErr)
			}
			if tt.want == "" {
				if !errors.Is(err, errChanges) || len(blobs) != 0 {
					t.Errorf("%s, %v; %d blobs", sha, err, len(blobs))
				}
				return
			}
			if err != nil || sha != sum([]byte(tt.want)) || len(blobs) != 1 || blobs[0].SHA256 != sha {
				t.Errorf("%s, %v; %v", sha, err, blobs)
			}
		})
	}
	c := open(t, t.TempDir())
	broken := errors.New("broken")
	if _, err := c.Import(t.Context(), func(context.Context, io.Writer) error { return broken }); !errors.Is(err, broken) {
		t.Error(err)
	}
}

// TestImportKey checks that importKey returns no key for a file that was just written.
func TestImportKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("a"), 0o644); err != nil {
		t.Fatal(err)
	}
	stat := func() (os.FileInfo, time.Time) {
		t.Helper()
		fi, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		times := changedAt(fi)
		if len(times) == 0 {
			desk.Lacks(t, "states of files")
		}
		return fi, slices.MaxFunc(times, time.Time.Compare)
	}
	check := func(what string, after time.Duration, known bool) {
		t.Helper()
		fi, at := stat()
		if key := importKey(fi, at.Add(after)); (key != "") != known {
			t.Errorf("%s, %s later: key %q", what, after, key)
		}
	}
	check("written", 0, false)
	check("written", 5*time.Millisecond, false)
	check("written", -5*time.Millisecond, false)
	check("written", time.Second, true)
	// A program that sets back a file's modification time still changes its inode time.
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(path, old, old); err != nil {
		t.Fatal(err)
	}
	check("set back", 5*time.Millisecond, false)
	check("set back", time.Second, true)
}

// TestUnsettled checks for how long a later write might leave a time stamp unchanged.
func TestUnsettled(t *testing.T) {
	fine, whole := time.Unix(1767225600, 4000000), time.Unix(1767225600, 0)
	for _, tt := range []struct {
		at   time.Time
		age  time.Duration
		want time.Duration
	}{
		{fine, 0, 20 * time.Millisecond},
		{fine, 15 * time.Millisecond, 5 * time.Millisecond},
		{fine, 20 * time.Millisecond, 0},
		{fine, -5 * time.Millisecond, 25 * time.Millisecond},
		{fine, -time.Hour, 0},
		{whole, time.Second, time.Second},
		{whole, 2 * time.Second, 0},
	} {
		if got := unsettled(tt.at, tt.at.Add(tt.age)); got != tt.want {
			t.Errorf("%v, seen %v later: %v, want %v", tt.at, tt.age, got, tt.want)
		}
	}
}

// TestStoredBlobIsSettled checks that a write to a new blob always changes its state, even on a
// file system whose clock has coarse ticks.
func TestStoredBlobIsSettled(t *testing.T) {
	c := open(t, t.TempDir())
	before := time.Now().Add(-coarseStampTime)
	fi, err := os.Stat(c.BlobPath(put(t, c, []byte("kubelet"))))
	if err != nil {
		t.Fatal(err)
	}
	if at := fi.ModTime(); at.After(time.Now().Add(-coarseStampTime)) || at.Before(before.Add(-stampTime)) {
		t.Errorf("the blob is dated %v, %v ago", at, time.Since(at))
	}
}

// TestImportFile checks that an unchanged file is read only once, unless anew is set.
func TestImportFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, []byte("a"), 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c := open(t, filepath.Join(dir, "cache"))
	get := func(what, want string, anew bool) {
		t.Helper()
		if sha, err := c.ImportFile(t.Context(), f, anew); err != nil || sha != sum([]byte(want)) {
			t.Errorf("%s: %s, %v", what, sha, err)
		}
	}
	keys := func() int {
		t.Helper()
		entries, err := os.ReadDir(filepath.Join(c.Dir(), "keys"))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	// The time has whole seconds. Therefore, the file counts as new for longer than a busy machine
	// needs to reach the next line.
	date := func(at time.Time) {
		t.Helper()
		if err := os.Chtimes(path, time.Time{}, at); err != nil {
			t.Fatal(err)
		}
	}
	date(time.Now().Add(time.Second).Truncate(time.Second))
	get("just written", "a", false)
	if n := keys(); n != 0 {
		t.Errorf("a file that was just written is remembered: %d keys", n)
	}
	date(time.Now().Add(-time.Hour))
	time.Sleep(stampTime) // wait until the time of that change has settled
	get("later", "a", false)
	if n := keys(); n != 1 {
		t.Errorf("%d keys", n)
	}
	fi, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Remember(importKey(fi, time.Now()), put(t, c, []byte("other"))); err != nil {
		t.Fatal(err)
	}
	get("remembered", "other", false)
	get("read anew", "a", true)
}
