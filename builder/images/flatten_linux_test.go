package images

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/imagetest"
)

// TestFlattenAsTheKernelShowsIt checks that tree.Flatten, which is used for a base, merges layers
// in the same way as overlayfs.
func TestFlattenAsTheKernelShowsIt(t *testing.T) {
	desk.NeedRoot(t, "it mounts overlayfs")
	dir := func(name string) tar.Header { return imagetest.Dir(name, 0o755, 0, 0) }
	file := func(name string) any { return imagetest.File(name, 0o644, 0, 0, name) }
	link := imagetest.Symlink
	merged := []any{dir("usr"), dir("usr/lib"), file("usr/lib/libc"), link("lib", "usr/lib")}
	for name, layers := range map[string][][]any{
		"a directory over a link to one":                 {merged, {dir("lib"), file("lib/new")}},
		"an opaque directory over a link to one":         {merged, {dir("lib"), file("lib/.wh..wh..opq"), file("lib/new")}},
		"a whiteout in a directory over a link to one":   {merged, {dir("lib"), file("lib/.wh.libc"), file("lib/new")}},
		"a link taken away and a directory in its place": {merged, {file(".wh.lib"), dir("lib"), file("lib/new")}},
		"a directory over a link to a file":              {{file("f"), link("a", "f")}, {dir("a"), file("a/new")}},
		"a directory over a link to nothing":             {{link("a", "/run/b")}, {dir("a"), file("a/new")}},
		"a directory over a file":                        {{file("a")}, {dir("a"), file("a/b")}},
		"a whiteout below a lower file":                  {{file("a")}, {dir("a"), file("a/.wh.b")}},
		"an opaque directory over a file":                {{file("a")}, {dir("a"), file("a/.wh..wh..opq"), file("a/x")}},
		"a file below a lower file":                      {{file("a")}, {file("a/b")}},
		"a directory over a link deeper down":            {append(slices.Clone(merged), link("usr/l", "lib")), {dir("usr"), dir("usr/l"), dir("usr/l/d"), file("usr/l/d/.wh..wh..opq"), file("usr/l/d/x")}},
		"a link over a directory":                        {{dir("a"), file("a/b")}, {link("a", "c")}},
		"three layers":                                   {merged, {dir("lib"), file("lib/new")}, {dir("usr"), dir("usr/lib"), file("usr/lib/.wh.libc"), dir("lib"), file("lib/.wh.new"), file("lib/newer")}},
	} {
		t.Run(name, func(t *testing.T) { flattensLikeOverlayfs(t, layers) })
	}
	t.Run("random layers", func(t *testing.T) {
		for seed := range uint64(150) {
			r := rand.New(rand.NewPCG(seed, 1))
			var layers [][]any
			for range 2 + r.IntN(2) {
				layers = append(layers, randomLayer(r, file, dir, link))
			}
			if flattensLikeOverlayfs(t, layers); t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
	})
}

// randomLayer returns the entries of a random layer, each directory before its contents.
func randomLayer(r *rand.Rand, file func(string) any, dir func(string) tar.Header, link func(_, _ string) tar.Header) []any {
	var out []any
	var fill func(in string, depth int)
	fill = func(in string, depth int) {
		if r.IntN(4) == 0 && in != "" {
			out = append(out, file(in+".wh..wh..opq"))
		}
		for _, base := range []string{"a", "b", "c"} {
			name := in + base
			if r.IntN(4) == 0 {
				out = append(out, file(in+".wh."+base))
			}
			switch r.IntN(6) {
			case 0:
				out = append(out, file(name))
			case 1:
				out = append(out, link(name, []string{"a", "../b", "/c", "/a/b", "nowhere"}[r.IntN(5)]))
			case 2, 3:
				out = append(out, dir(name))
				if depth < 2 {
					fill(name+"/", depth+1)
				}
			}
		}
	}
	fill("", 0)
	return out
}

func flattensLikeOverlayfs(t *testing.T, layers [][]any) {
	t.Helper()
	c := newCache(t)
	defer c.Close()
	work := t.TempDir()
	var top *snapshot
	var flat []tree.Layer
	lower := filepath.Join(work, "bottom") // overlayfs requires at least two lower layers
	if err := os.Mkdir(lower, 0o755); err != nil {
		t.Fatal(err)
	}
	for n, steps := range layers {
		var b bytes.Buffer
		tw := tar.NewWriter(&b)
		if err := errors.Join(imagetest.Script(steps...).Tar(&imagetest.Writer{Writer: tw}), tw.Close()); err != nil {
			t.Fatal(err)
		}
		sha, _, err := c.Put(t.Context(), "", bytes.NewReader(b.Bytes()))
		if err != nil {
			t.Fatal(err)
		}
		if top, err = applyLayer(t.Context(), c, sectionOf(b.Bytes()), sha, top, time.Unix(99, 0), newBudget(&Options{})); err != nil {
			t.Fatal(err)
		}
		if err := imagetest.Materialize(work, top.nodes(fmt.Sprint(n), "", nil), c); err != nil {
			t.Fatal(err)
		}
		lower = filepath.Join(work, fmt.Sprint(n)) + ":" + lower
		nodes, err := tree.FromTar(bytes.NewReader(b.Bytes()), int64(b.Len()), sha, fmt.Sprint(n))
		if err != nil {
			t.Fatal(err)
		}
		flat = append(flat, tree.Layer{Name: fmt.Sprint(n), Nodes: nodes})
	}
	mnt := filepath.Join(work, "merged")
	if err := os.Mkdir(mnt, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("overlay", mnt, "overlay", unix.MS_RDONLY, "lowerdir="+lower); err != nil {
		desk.Lacks(t, "mounting overlayfs: %v", err)
	}
	defer unix.Unmount(mnt, 0)
	var want []string
	err := filepath.WalkDir(mnt, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == mnt {
			return err
		}
		if _, err := os.Lstat(p); errors.Is(err, fs.ErrNotExist) {
			return nil // a whiteout that hides nothing is listed, but cannot be opened
		}
		what := strings.TrimPrefix(p, mnt+"/")
		switch {
		case d.IsDir():
			what += "/"
		case d.Type() == fs.ModeSymlink:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			what += " -> " + to
		}
		want = append(want, what)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	nodes, err := tree.Flatten(flat, time.Unix(99, 0))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range nodes {
		switch {
		case n.Path == ".":
		case n.IsDir():
			got = append(got, n.Path+"/")
		case n.IsSymlink():
			got = append(got, n.Path+" -> "+n.Target)
		default:
			got = append(got, n.Path)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("Flatten has %q, overlayfs shows %q of %v", got, want, layers)
	}
}
