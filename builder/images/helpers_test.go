package images

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"iter"
	"maps"
	"testing"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/ondisk/tree"
)

func sectionOf(b []byte) *io.SectionReader {
	return io.NewSectionReader(bytes.NewReader(b), 0, int64(len(b)))
}

func keysOf(m map[string]string) iter.Seq[string] { return maps.Keys(m) }

func sha(s string) [32]byte { return sha256.Sum256([]byte(s)) }

type nodeType = tree.Node

func openCache(t testing.TB, dir string) *fetch.Cache {
	t.Helper()
	c, err := fetch.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func fetchAndBake(ctx context.Context, c *fetch.Cache, pinned []Pinned, o Options) (*Result, error) {
	if err := Fetch(ctx, c, pinned, o); err != nil {
		return nil, err
	}
	return Bake(ctx, c, pinned, o)
}

func fetchAndArchive(ctx context.Context, c *fetch.Cache, pinned []Pinned, o Options) (*Result, error) {
	o.KeepLayers = true
	if err := Fetch(ctx, c, pinned, o); err != nil {
		return nil, err
	}
	return Archives(ctx, c, pinned, o)
}
