package builder

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/disktest"
)

// TestBuildAfterAChange: after a change in an overlay the image is that of a build from
// nothing, whatever the cache remembers of the digests of its chunks.
func TestBuildAfterAChange(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	dir := t.TempDir()
	build := func(name string, cache *fetch.Cache, locked bool) (string, *Result) {
		t.Helper()
		o := p.options(filepath.Join(dir, name))
		o.Force, o.Cache = true, cache
		if locked {
			pl, err := Resolve(t.Context(), p.image(t), p.options(""))
			if err != nil {
				t.Fatal(err)
			}
			o.Lock, o.Locked = pl.Lock(), true
		}
		r, err := Build(t.Context(), p.image(t), o)
		if err != nil {
			t.Fatal(err)
		}
		return o.Output, r
	}
	fresh := func() *fetch.Cache {
		t.Helper()
		c, err := fetch.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	build("first.raw", p.cache, false)
	b, err := newBuild(t.Context(), p.image(t), p.options("x.raw"))
	if err != nil {
		t.Fatal(err)
	}
	if b.plan, err = Resolve(t.Context(), p.image(t), p.options("")); err != nil {
		t.Fatal(err)
	}
	key := b.sumsKey()
	note := p.cache.Kept(key)
	if n := len(decodeSums(note)); n < 3 || n*64 != len(note) {
		t.Fatalf("%d digests are remembered in %d bytes", n, len(note))
	}
	if err := os.WriteFile(filepath.Join(p.dir, "overlay/changed"), []byte("changed"), 0o644); err != nil {
		t.Fatal(err)
	}
	nothing, want := build("nothing.raw", fresh(), false)
	same := func(what string, cache *fetch.Cache, locked bool) {
		t.Helper()
		if _, r := build("again.raw", cache, locked); r.Report.Golden != want.Report.Golden {
			t.Errorf("%s: golden digest %s, from nothing %s", what, r.Report.Golden, want.Report.Golden)
		}
	}
	same("after a change", p.cache, false)
	if disktest.Sum(t, filepath.Join(dir, "again.raw")) != disktest.Sum(t, nothing) {
		t.Error("after a change: other bytes than from nothing")
	}
	same("unchanged", p.cache, false)
	p.cache.Keep(key, nil)
	same("nothing is remembered", p.cache, false)
	p.cache.Keep(key, []byte(strings.Repeat("x", 100)))
	same("not pairs", p.cache, false)

	// Memories that somebody has made up give an image that verify rejects, and count
	// for nothing with --locked.
	wrong := decodeSums(p.cache.Kept(key))
	for made, sum := range wrong {
		sum[0]++
		wrong[made] = sum
	}
	p.cache.Keep(key, encodeSums(wrong))
	if _, r := build("again.raw", p.cache, false); r.Report.Golden == want.Report.Golden {
		t.Error("nothing is remembered: the test is void")
	}
	same("locked", p.cache, true)
}
