package builder

import (
	"bytes"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder/disk"
)

// Digests of the chunks of a raw image are remembered by what the chunks are composed
// of, so that a build after a small change hashes little. They are notes: a build
// without them gives the same image. One with --locked trusts nothing and has none.

func (b *build) sumsKey() string { return "chunks 1 " + b.plan.Arch + " " + b.plan.Name }

// knownSums are those of the last build of this image; nil: none are to be used.
func (b *build) knownSums() disk.Sums {
	if b.Locked || strings.HasSuffix(b.Output, ".zst") {
		return nil
	}
	return decodeSums(b.Cache.Kept(b.sumsKey()))
}

// encodeSums puts pairs of digests one behind the other, sorted.
func encodeSums(s disk.Sums) []byte {
	pairs := make([][]byte, 0, len(s))
	for made, sum := range s {
		pairs = append(pairs, slices.Concat(made[:], sum[:]))
	}
	slices.SortFunc(pairs, bytes.Compare)
	return slices.Concat(pairs...)
}

func decodeSums(b []byte) disk.Sums {
	s := disk.Sums{}
	if len(b)%64 != 0 {
		return s
	}
	for pair := range slices.Chunk(b, 64) {
		s[[32]byte(pair)] = [32]byte(pair[32:])
	}
	return s
}
