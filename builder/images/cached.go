package images

import "github.com/edgebake/edgebake/builder/fetch"

// DocumentsCached reports whether the cache still has, undamaged, every
// manifest, index and config that pinning these images read. Layers do not
// count: baking fetches those that are missing.
func DocumentsCached(c *fetch.Cache, pinned []Pinned) bool {
	for _, p := range pinned {
		for _, d := range []Descriptor{p.Target, p.Manifest, p.Config} {
			if sha, err := shaOf(d.Digest); err != nil || !c.Has(sha) {
				return false
			}
		}
	}
	return true
}
