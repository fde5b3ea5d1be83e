package fetch

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// aged stores a blob whose last use was some time ago, and returns its digest.
func aged(t *testing.T, c *Cache, text string, ago time.Duration) string {
	t.Helper()
	sha, err := c.Make(t.Context(), text, func(_ context.Context, w io.Writer) error {
		_, err := io.WriteString(w, text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	age(t, c, sha, ago)
	return sha
}

func age(t *testing.T, c *Cache, sha string, ago time.Duration) {
	t.Helper()
	at := time.Now().Add(-ago)
	if err := os.Chtimes(c.markPath(sha), at, at); err != nil {
		t.Fatal(err)
	}
}

func prune(t *testing.T, c *Cache, l Limits) Pruned {
	t.Helper()
	p, err := c.Prune(l)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// there reports whether a blob exists. Unlike Has, it does not mark the blob as used.
func there(c *Cache, sha string) bool {
	_, err := os.Stat(c.BlobPath(sha))
	return err == nil
}

func TestPrune(t *testing.T) {
	const day = 24 * time.Hour
	keep := func(n int64) *int64 { return &n }
	// The blobs have 4, 3, 3 and 3 bytes. The first was used most recently, and the last one
	// longest ago.
	for _, tt := range []struct {
		name   string
		limits Limits
		want   string // blobs left
	}{
		{"no limit", Limits{}, "0123"},
		{"age", Limits{UsedSince: time.Now().Add(-25 * day)}, "01"},
		{"size", Limits{Keep: keep(10)}, "012"},
		{"size, all fit", Limits{Keep: keep(13)}, "0123"},
		{"size, nothing fits", Limits{Keep: keep(0)}, ""},
		{"age and size", Limits{UsedSince: time.Now().Add(-25 * day), Keep: keep(4)}, "0"},
		{"dry run", Limits{Keep: keep(0), DryRun: true}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			maker, err := Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			var shas []string
			for i, text := range []string{"four", "one", "two", "six"} {
				shas = append(shas, aged(t, maker, text, time.Duration(i)*20*day))
			}
			if err := maker.Close(); err != nil {
				t.Fatal(err)
			}
			c := open(t, dir)
			list, err := c.List()
			if err != nil || len(list) != 4 || list[0].SHA256 != shas[0] || list[0].Size != 4 || list[3].SHA256 != shas[3] {
				t.Fatalf("List: %+v, %v", list, err)
			}
			p := prune(t, c, tt.limits)
			left := ""
			for i, sha := range shas {
				if there(c, sha) != (tt.limits.DryRun || strings.Contains(tt.want, fmt.Sprint(i))) {
					t.Errorf("blob %d exists: %v", i, there(c, sha))
				}
				if _, err := os.Stat(filepath.Join(dir, "keys", sum([]byte([]string{"four", "one", "two", "six"}[i])))); (err == nil) != there(c, sha) {
					t.Errorf("blob %d and its key: %v", i, err)
				}
				if strings.Contains(tt.want, fmt.Sprint(i)) {
					left += fmt.Sprint(i)
				}
			}
			if p.Left.Blobs != len(left) || p.Freed.Blobs != 4-len(left) || p.Left.Bytes+p.Freed.Bytes != 13 || p.InUse.Blobs != 0 {
				t.Errorf("reported %+v", p)
			}
		})
	}
}

// TestPruneBesideABuild prunes while another session is open. Blobs that the session has used must
// stay. Others may be removed, and are made again.
func TestPruneBesideABuild(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir)
	used, opened, idle := aged(t, c, "used", time.Hour), aged(t, c, "opened", time.Hour), aged(t, c, "idle", time.Hour)
	running := open(t, dir)
	if _, ok := running.Lookup("used"); !ok {
		t.Fatal("a blob is not there")
	}
	f, err := running.OpenBlob(opened)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	none := int64(0)
	p := prune(t, c, Limits{Keep: &none})
	if p.InUse != (Amount{2, 10}) || p.Freed != (Amount{1, 4}) || !there(c, used) || !there(c, opened) || there(c, idle) {
		t.Errorf("%+v", p)
	}
	if sha, err := running.Make(t.Context(), "idle", func(_ context.Context, w io.Writer) error {
		_, err := io.WriteString(w, "idle")
		return err
	}); err != nil || sha != idle || !there(c, idle) {
		t.Errorf("made again: %s, %v", sha, err)
	}
	// The session of another user cannot mark this user's blobs as used.
	other := session{started: time.Now().Add(time.Hour), owner: 12345}
	if !other.mayUse(Stored{owners: []uint32{54321}}) || other.mayUse(Stored{owners: []uint32{12345}}) || !other.mayUse(Stored{owners: []uint32{12345, 54321}}) {
		t.Error("mayUse ignores the owners of the blob")
	}
	if err := running.Close(); err != nil {
		t.Fatal(err)
	}
	if p := prune(t, c, Limits{Keep: &none}); p.Left.Blobs != 0 || p.Freed.Blobs != 3 {
		t.Errorf("once the build has ended: %+v", p)
	}
}

// TestPruneRaces uses blobs while other goroutines prune. A blob must stay until the end of the
// session for which Has has returned true.
func TestPruneRaces(t *testing.T) {
	dir := t.TempDir()
	maker := open(t, dir)
	var shas []string
	for i := range 200 {
		shas = append(shas, aged(t, maker, fmt.Sprint("blob ", i), time.Hour))
	}
	var wg sync.WaitGroup
	begin := make(chan bool)
	for i := range 4 {
		c := open(t, dir)
		wg.Go(func() {
			<-begin
			for n := range shas {
				sha := shas[(n*(2*i+1))%len(shas)]
				if !c.Has(sha) {
					continue
				}
				if f, err := c.OpenBlob(sha); err != nil {
					t.Errorf("a blob that Prune kept is missing: %v", err)
				} else {
					f.Close()
				}
			}
		})
	}
	pruner := open(t, dir)
	wg.Go(func() {
		<-begin
		for _, keep := range []int64{1500, 1000, 500, 0} {
			if _, err := pruner.Prune(Limits{Keep: &keep}); err != nil {
				t.Error(err)
			}
		}
	})
	close(begin)
	wg.Wait()
}

// TestPruneTakesAllThatBelongsToABlob checks that all files of the cache are counted, and that
// pruning everything leaves no file.
func TestPruneTakesAllThatBelongsToABlob(t *testing.T) {
	dir := t.TempDir()
	c, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	old, fresh := aged(t, c, "kubeadm", 48*time.Hour), aged(t, c, "kubectl", 0)
	var paths []string
	for _, sha := range []string{old, fresh} {
		path, err := c.Program(sha, "it")
		if err != nil {
			t.Fatal(err)
		}
		again, err := c.Program(sha, "it")
		if fi, statErr := os.Stat(path); err != nil || again != path || statErr != nil || fi.Mode().Perm() != 0o755 {
			t.Fatalf("%v, %v, %s", err, statErr, again)
		}
		paths = append(paths, path)
	}
	age(t, c, old, 48*time.Hour)
	if err := os.WriteFile(filepath.Join(dir, "programs", "stranger-0123456789ab"), []byte("x"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if c, err = Open(dir); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	blobs, err := c.List()
	if err != nil || len(blobs) != 2 || blobs[0].Size != 14 || blobs[1].Size != 14 {
		t.Errorf("counted: %v, %+v", err, blobs)
	}
	if n, err := c.Notes(); err != nil || n < 2*64 {
		t.Errorf("notes: %d bytes, %v", n, err)
	}
	p := prune(t, c, Limits{UsedSince: time.Now().Add(-24 * time.Hour)})
	if p.Freed.Bytes != 14 {
		t.Errorf("freed %+v", p.Freed)
	}
	if _, err := os.Stat(paths[0]); err == nil {
		t.Error("the program of a pruned blob stays")
	}
	if _, err := os.Stat(paths[1]); err != nil {
		t.Errorf("the program of a blob that stays: %v", err)
	}
	none := int64(0)
	prune(t, c, Limits{Keep: &none})
	var left []string
	err = filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() && !strings.HasPrefix(path, c.session) {
			left = append(left, path)
		}
		return err
	})
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %q", err, left)
	}
}
