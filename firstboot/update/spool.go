package update

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/update"
)

// spool is a file on DATA with the downloaded chunks of one part, each at its offset in the part.
type spool struct {
	fetch  *fetcher
	part   *chunk.Part
	dev    machine.Device
	starts []int64
	whole  map[int]bool // cached results of has, by chunk index
}

func newSpool(e *machine.Env, f *fetcher, p *chunk.Part, file string) (*spool, error) {
	dev, err := e.OpenDevice(file, true)
	if err != nil {
		return nil, err
	}
	s := &spool{fetch: f, part: p, dev: dev, whole: map[int]bool{}}
	at := int64(0)
	for _, c := range p.Chunks {
		s.starts = append(s.starts, at)
		at += c.Size
	}
	return s, nil
}

func (s *spool) close() error { return s.dev.Close() }

// has reports whether chunk k is in the file.
func (s *spool) has(k int) bool {
	if _, known := s.whole[k]; !known {
		there, err := s.fetch.inPlace(s.dev, s.starts[k], s.part.Chunks[k])
		s.whole[k] = there && err == nil
	}
	return s.whole[k]
}

// view reads the part from this machine's disk, from the spool or from the source.
func (s *spool) view(ctx context.Context) *update.View {
	return update.NewView(s.part, func(k int) ([]byte, error) {
		c := s.part.Chunks[k]
		if b, ok := s.fetch.local(c); ok {
			return bytes.Clone(b), nil
		}
		b := make([]byte, c.Size)
		if s.has(k) {
			if _, err := s.dev.ReadAt(b, s.starts[k]); err != nil {
				return nil, fmt.Errorf("reading %s: %w", s.dev.Name(), err)
			}
			if sha256.Sum256(b) != c.Sum {
				return nil, fmt.Errorf("reading %s at %d: %w", s.dev.Name(), s.starts[k], errReadBack)
			}
			return b, nil
		}
		err := s.fetch.fetch(ctx, s.part, []int{k}, func(_ int, got []byte) error {
			copy(b, got)
			return s.put(k, got)
		})
		return b, err
	})
}

func (s *spool) put(k int, b []byte) error {
	_, err := s.dev.WriteAt(b, s.starts[k])
	s.whole[k] = err == nil
	return err
}

// missing returns the chunks that are neither in the spool nor elsewhere on this machine's disk.
func (s *spool) missing(chunks []int) (out []int) {
	for _, k := range chunks {
		if _, ok := s.fetch.local(s.part.Chunks[k]); !ok && !s.has(k) {
			out = append(out, k)
		}
	}
	return out
}

// fill downloads the missing chunks to the spool.
func (s *spool) fill(ctx context.Context, chunks []int) error {
	need := s.missing(chunks)
	s.fetch.expect(s.part, need)
	return s.fetch.fetch(ctx, s.part, need, s.put)
}
