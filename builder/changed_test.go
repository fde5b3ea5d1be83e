package builder

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/test/buildtest"
)

// damage changes a file's content inside the cached tar of the base, but not the tar's size or
// headers. It returns the original bytes of the tar.
func damage(t *testing.T, path string) (sound []byte) {
	t.Helper()
	sound, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b := bytes.Clone(sound)
	for at := 0; at+512 <= len(b); at += 512 {
		if bytes.HasPrefix(b[at:], []byte("initrd\x00")) {
			copy(b[at:], "BROKEN")
		}
	}
	if bytes.Equal(b, sound) {
		t.Fatal("the base has no initrd, so the test checks nothing")
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(b, 0); err != nil {
		t.Fatal(err)
	}
	return sound
}

// TestInputChangesWhileBuilding checks that a build fails and leaves no image if a cached input
// changes after its check, even if another build has repaired the input meanwhile.
func TestInputChangesWhileBuilding(t *testing.T) {
	golden := "" // all builds must make this golden image
	for _, tt := range []struct {
		name, out, step  string
		locked, repaired bool
	}{
		{name: "raw", out: "x.raw", step: "write"},
		{name: "locked", out: "x.raw", step: "write", locked: true},
		{name: "compressed", out: "x.raw.zst", step: "write"},
		{name: "before it is merged", out: "x.raw", step: "merge"},
		{name: "repaired", out: "x.raw", step: "write", repaired: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newProject(t, buildtest.Base(), nil)
			pl, err := Resolve(t.Context(), p.image(t), p.options(""))
			if err != nil {
				t.Fatal(err)
			}
			base := pl.Inputs[inputBase].SHA256
			o := p.options(filepath.Join(t.TempDir(), tt.out))
			if tt.locked {
				o.Lock, o.Locked = pl.Lock(), true
			}
			var sound []byte
			repair := func() {
				c, err := fetch.Open(p.cache.Dir())
				if err != nil {
					t.Error(err)
					return
				}
				defer c.Close()
				if c.Has(base) {
					t.Error("the damage is not found")
				}
				if _, _, err := c.Put(context.Background(), base, bytes.NewReader(sound)); err != nil {
					t.Error(err)
				}
			}
			o.Events = func(e Event) {
				if e.Step == tt.step && e.State == StateStart && sound == nil {
					sound = damage(t, p.cache.BlobPath(base))
				}
				if e.Step == "write" && e.State == StateProgress && tt.repaired && sound != nil {
					repair()
					tt.repaired = false
				}
			}
			_, err = Build(t.Context(), p.image(t), o)
			if err == nil || !strings.Contains(err.Error(), base) || !strings.Contains(err.Error(), "changed while it was in use") || !strings.Contains(err.Error(), "run the build again") {
				t.Errorf("the build: %v", err)
			}
			if left, err := os.ReadDir(filepath.Dir(o.Output)); err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
			// The next build repairs the cache and makes the same image.
			if p.cache, err = fetch.Open(p.cache.Dir()); err != nil {
				t.Fatal(err)
			}
			defer p.cache.Close()
			o.Cache, o.Events = p.cache, nil
			r, err := Build(t.Context(), p.image(t), o)
			if err != nil {
				t.Fatal(err)
			}
			if golden == "" {
				golden = r.Report.Golden
			}
			if r.Report.Golden != golden {
				t.Errorf("the second build made image %s, want %s", r.Report.Golden, golden)
			}
		})
	}
}

// TestSourceChangesWhileRead changes a source file while it is read: the result must be an error or
// the complete old or new content.
func TestSourceChangesWhileRead(t *testing.T) {
	for name, path := range map[string]string{"file": "notes.txt", "overlay": "overlay/big", "base": "base.tar"} {
		t.Run(name, func(t *testing.T) {
			p := newProject(t, buildtest.Base(), nil)
			f, err := os.OpenFile(filepath.Join(p.dir, path), os.O_RDWR|os.O_CREATE, 0o644)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := f.Truncate(100 << 20); err != nil {
				t.Fatal(err)
			}
			end, ended := make(chan bool), make(chan bool)
			go func() {
				defer close(ended)
				for n := uint64(0); ; n++ {
					select {
					case <-end:
						return
					case <-time.After(time.Millisecond):
						_, _ = f.WriteAt(binary.BigEndian.AppendUint64(nil, n), 50<<20)
					}
				}
			}()
			_, err = Resolve(t.Context(), p.image(t), p.options(""))
			close(end)
			<-ended
			if err == nil || !strings.Contains(err.Error(), "changes while it is read") {
				t.Errorf("resolved: %v", err)
			}
		})
	}
}
