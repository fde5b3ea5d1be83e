package images

import (
	"context"
	"fmt"
	"sync"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs"
)

// sources opens each layout, archive and registry once for all the layers
// that come from it.
type sources struct {
	cache   *fetch.Cache
	options *Options

	large sync.Mutex // see unpacker

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

// fetch brings layer j of an image into the cache. Nothing is opened where
// the cache has it already.
func (s *sources) fetch(ctx context.Context, p *Pinned, j int, keep bool, limit sizeLimit) error {
	l := p.Layers[j]
	// As it is in the cache or, where that has it uncompressed alone, as it would be: a
	// damaged one, which Has removes, says nothing of the image.
	whole := s.cache.Has(l.Digest.Hex())
	cached := s.cache.Has(l.DiffID.Hex()) && (whole || !keep)
	var sizeErr error
	if whole {
		sizeErr = checkCached(s.cache, l.Descriptor)
	}
	if cached && sizeErr == nil {
		return nil
	}
	src, err := s.get(ctx, p.Source)
	if err != nil {
		return fmt.Errorf("image %s: %w", p.Ref, err)
	}
	if cached {
		return badBlob(fmt.Sprintf("layer %d of %d", j+1, len(p.Layers)), l.Descriptor, p.Ref, src, sizeErr)
	}
	u := unpacker{limit, &s.large}
	if err := u.fetchLayer(ctx, s.cache, src, p.Ref, l, keep); err != nil {
		return blobError(fmt.Sprintf("layer %d of %d", j+1, len(p.Layers)), l.Descriptor, p.Ref, src, err)
	}
	return nil
}
