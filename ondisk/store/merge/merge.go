// Package merge adds the image store of a new system to the store in use, before containerd starts.
// `firstboot images merge` runs it. A/B updates need it: a new root file system brings new images,
// but the DATA partition stays.
//
// A merge that is killed at any point can simply be run again:
//
//   - Files are copied, or hard linked if both stores are on the same file system. The
//     source is not changed.
//   - Files are written and synced first, then the snapshotter's database, then meta.db,
//     each in one transaction. So no image record refers to a missing file.
//   - A killed run leaves only files and records to which no image refers. The next run
//     removes them, and so would containerd.
//
// A merge removes no image. When the new system is kept, the old system's images are unpinned, so
// that kubelet's garbage collection can remove them.
package merge

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/edgebake/edgebake/ondisk/store"
)

// Options are the arguments of a merge.
type Options struct {
	// From and Into are containerd's root directories (…/var/lib/containerd). From may lack layers
	// and blobs that Into has.
	From, Into string
	// Step, if set, is called before every change. If it returns an error, the merge stops.
	Step func(change string) error
}

// Report is the result of a merge.
type Report struct {
	Added []string `json:"added"` // names of the added image records
	// Snapshots and Blobs are the numbers of added snapshots and blobs. Shared is the number of
	// snapshots in From that Into already had.
	Snapshots int `json:"snapshots"`
	Blobs     int `json:"blobs"`
	Shared    int `json:"shared"`
}

// plan has the changes that a merge makes.
type plan struct {
	change store.Change
	// add lists the snapshots to create, parents first, with their new numbers. from has their
	// numbers in the source.
	add  []store.Snapshot
	from map[string]uint64
	// parents has every snapshot that may be the parent of a snapshot in add.
	parents  map[string]store.Snapshot
	sequence uint64 // sequence of metadata.db after the merge
	shared   int
}

// makePlan compares the two stores and returns the necessary changes.
func makePlan(from, into *store.State) (*plan, error) {
	p := &plan{from: map[string]uint64{}, parents: map[string]store.Snapshot{}}
	p.change.Schema = from.Schema
	for _, s := range into.Snapshots {
		p.parents[s.Key] = s
	}
	p.sequence, p.change.Sequence = into.BackendSequence, into.MetaSequence
	snaps := slices.Clone(from.Snapshots)
	slices.SortFunc(snaps, func(a, b store.Snapshot) int { return cmp.Compare(a.ID, b.ID) })
	for _, s := range snaps {
		if have, ok := p.parents[s.Key]; ok {
			if have.Kind != store.KindCommitted {
				return nil, fmt.Errorf("the store in use is damaged: its snapshot %s is not committed", s.Key)
			}
			p.shared++
			continue
		}
		if _, ok := p.parents[s.Parent]; s.Parent != "" && !ok {
			return nil, fmt.Errorf("the new store has snapshot %s before its parent %s", s.Key, s.Parent)
		}
		p.from[s.Key] = s.ID
		p.sequence++
		p.change.Sequence += 2 // containerd uses two numbers per snapshot: one to prepare and one to commit it
		s.ID = p.sequence
		s.Backend = store.BackendName(p.change.Sequence, s.Key)
		p.parents[s.Key] = s
		p.add = append(p.add, s)
	}
	p.change.Snapshots = p.add
	p.change.Blobs, p.change.Images = from.Blobs, into.Lacks(from).Images
	return p, nil
}
