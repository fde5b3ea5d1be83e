package images

import (
	"context"
	"fmt"
	"sync"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs"
)

// sources opens each layout and archive only once, and one source for all registries.
type sources struct {
	cache   *fetch.Cache
	options *Options

	large sync.Mutex // see unpacker.large

	mu   sync.Mutex
	open map[configs.ContainerImage]func() (source, error)
}

func newSources(c *fetch.Cache, o *Options) *sources {
	return &sources{cache: c, options: o, open: map[configs.ContainerImage]func() (source, error){}}
}

func (s *sources) get(ctx context.Context, img configs.ContainerImage) (source, error) {
	// Images from the same layout or archive share a source. All images from registries share one.
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

// fetch stores layer j of an image in the cache. If the cache has the layer, it opens no source.
func (s *sources) fetch(ctx context.Context, p *Pinned, j int, keep bool, limit sizeLimit) error {
	l, what := p.Layers[j], fmt.Sprintf("layer %d of %d", j+1, len(p.Layers))
	u := unpacker{limit, &s.large}
	cached, cachedErr := u.cached(s.cache, l, keep)
	if cached && cachedErr == nil {
		return nil
	}
	src, err := s.get(ctx, p.Source)
	if err != nil {
		return fmt.Errorf("image %s: %w", p.Ref, err)
	}
	if cachedErr == nil && s.cache.Has(l.Digest.Hex()) {
		cachedErr = checkCached(s.cache, l.Descriptor)
	}
	if cachedErr != nil {
		return badBlob(what, l.Descriptor, p.Ref, src, cachedErr)
	}
	if err := u.fetchLayer(ctx, s.cache, src, p.Ref, l, keep); err != nil {
		return blobError(what, l.Descriptor, p.Ref, src, err)
	}
	return nil
}
