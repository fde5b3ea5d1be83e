package images

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs"
)

// sources opens each layout, archive and registry once for all the layers
// that come from it.
type sources struct {
	cache   *fetch.Cache
	options *Options

	mu   sync.Mutex
	open map[configs.ContainerImage]func() (source, error)
}

func newSources(c *fetch.Cache, o *Options) *sources {
	return &sources{cache: c, options: o, open: map[configs.ContainerImage]func() (source, error){}}
}

func (s *sources) get(ctx context.Context, img configs.ContainerImage) (source, error) {
	// What distinguishes sources is where, not which image.
	key := configs.ContainerImage{Layout: img.Layout, Archive: img.Archive}
	s.mu.Lock()
	open := s.open[key]
	if open == nil {
		open = sync.OnceValues(func() (source, error) { return openSource(ctx, s.cache, img, s.options) })
		s.open[key] = open
	}
	s.mu.Unlock()
	return open()
}

func (s *sources) close() {
	for _, open := range s.open {
		if src, err := open(); err == nil {
			src.Close()
		}
	}
}

// attempts is how often a layer is asked for whose transfer breaks off.
const attempts = 3

// isBroken reports whether a transfer broke off, as opposed to having been
// refused or having brought wrong bytes.
func isBroken(err error) bool {
	return isTimeout(err) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// fetch brings layer j of an image into the cache. Nothing is opened where
// the cache has it already.
func (s *sources) fetch(ctx context.Context, p *Pinned, j int, keep bool) error {
	l := p.Layers[j]
	sha, err1 := shaOf(l.Digest)
	diff, err2 := shaOf(l.DiffID)
	if err1 == nil && err2 == nil && s.cache.Has(diff) && (!keep || s.cache.Has(sha)) {
		return nil
	}
	ref, err := ParseRef(p.Ref)
	if err != nil {
		return err
	}
	src, err := s.get(ctx, p.Source)
	if err != nil {
		return fmt.Errorf("image %s: %w", p.Ref, err)
	}
	for attempt := 1; ; attempt++ {
		err = fetchLayer(ctx, s.cache, src, ref, l, keep)
		r, remote := src.(*registry)
		if err == nil || !remote || attempt == attempts || !isBroken(err) || ctx.Err() != nil {
			break
		}
		// The client library repeats requests; a transfer that broke off in
		// the middle is ours to repeat.
		select {
		case <-ctx.Done():
		case <-time.After(r.wait * time.Duration(attempt)):
		}
	}
	if err != nil {
		return blobError(fmt.Sprintf("layer %d of %d", j+1, len(p.Layers)), l.Descriptor, ref, src, err)
	}
	return nil
}
