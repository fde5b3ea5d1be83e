package images

import "github.com/edgebake/edgebake/builder/fetch"

// DocumentsCached reports whether the cache has an undamaged copy of every manifest, index and
// config of these images. It does not check layers, since Fetch fetches missing layers.
func DocumentsCached(c *fetch.Cache, pinned []Pinned) bool {
	for _, p := range pinned {
		for _, d := range []Descriptor{p.Target, p.Manifest, p.Config} {
			if d.Digest == "" || !c.Has(d.Digest.Hex()) {
				return false
			}
		}
		for _, l := range p.Layers {
			if l.Digest == "" || l.DiffID == "" {
				return false
			}
		}
	}
	return true
}
