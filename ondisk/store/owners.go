package store

import (
	"path"
	"slices"
	"strings"
)

// Owners maps each directory and file of a store to the names of the images that use it. It omits
// files that belong to no image. Paths are relative to root.
func Owners(f Files, root string) (map[string][]string, error) {
	v := &verifier{Files: f, root: root}
	state, err := v.read()
	if err != nil {
		return nil, err
	}
	blobs, snapshots := map[string]*Blob{}, map[string]*Snapshot{}
	for i := range state.Blobs {
		blobs[state.Blobs[i].Digest] = &state.Blobs[i]
	}
	for i := range state.Snapshots {
		snapshots[state.Snapshots[i].Key] = &state.Snapshots[i]
	}
	owners := map[string][]string{}
	own := func(p, name string) {
		if p = path.Join(root, p); !slices.Contains(owners[p], name) {
			owners[p] = append(owners[p], name)
		}
	}
	seen := map[string]bool{} // protects against loops in damaged labels
	var follow func(digest, name string)
	follow = func(digest, name string) {
		b := blobs[digest]
		if b == nil || seen[digest+" "+name] {
			return
		}
		seen[digest+" "+name] = true
		own(BlobPath(digest), name)
		for label, to := range b.Labels {
			switch {
			case strings.HasPrefix(label, "containerd.io/gc.ref.content."):
				follow(to, name)
			case label == LabelGCSnapshot:
				for s, n := snapshots[to], 0; s != nil && n < maxLayers; s, n = snapshots[s.Parent], n+1 {
					own(SnapshotDir(s.ID), name)
				}
			}
		}
	}
	names := state.Names()
	for _, img := range state.Images {
		if slices.Contains(names, img.Name) {
			follow(img.Digest, img.Name)
		}
	}
	for p := range owners {
		slices.Sort(owners[p])
	}
	return owners, nil
}
