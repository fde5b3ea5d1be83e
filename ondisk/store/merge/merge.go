// Package merge adds the image store of a new system to the one in use, before
// containerd starts. `firstboot images merge` runs it; A/B updates need it, because a
// new root file system brings new images but the DATA partition stays.
//
// A merge that is killed at any point can be run again:
//
//   - what it adds is copied, or hard linked if both stores are on one file
//     system; the source is not changed;
//   - files are written and synced first, then the snapshotter's database, then
//     meta.db, each in one transaction: no image record refers to a missing file;
//   - a killed run leaves only files and records that no image refers to. The
//     next run removes them, and so would containerd.
//
// It removes no image. The images of a former system lose their pin once the new system is kept;
// then kubelet's garbage collection can remove them.
package merge

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/edgebake/edgebake/ondisk/store"
)

// Options are the arguments of a merge.
type Options struct {
	// From and Into are containerd roots (…/var/lib/containerd). From may lack layers and blobs
	// that Into has.
	From, Into string
	// Step, if set, is called before every change; the merge stops if it
	// returns an error.
	Step func(change string) error
}

// Report is the result of a merge.
type Report struct {
	Added []string `json:"added"` // image records
	// Snapshots and Blobs count added ones; Shared counts snapshots that
	// existed.
	Snapshots int `json:"snapshots"`
	Blobs     int `json:"blobs"`
	Shared    int `json:"shared"`
}

// plan describes the changes to make.
type plan struct {
	change store.Change
	// add lists the snapshots to create, parents first, with their new numbers;
	// from has their numbers in the source.
	add  []store.Snapshot
	from map[string]uint64
	// parents has every snapshot that may be the parent of one in add.
	parents  map[string]store.Snapshot
	sequence uint64 // of metadata.db, after the merge
	shared   int
}

// makePlan compares the two stores and returns the changes.
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
				return nil, fmt.Errorf("the store in use has %s, but not committed; it is damaged", s.Key)
			}
			p.shared++
			continue
		}
		if _, ok := p.parents[s.Parent]; s.Parent != "" && !ok {
			return nil, fmt.Errorf("the new store has snapshot %s before its parent %s", s.Key, s.Parent)
		}
		p.from[s.Key] = s.ID
		p.sequence++
		p.change.Sequence += 2 // containerd uses two numbers: prepare and commit
		s.ID = p.sequence
		s.Backend = store.BackendName(p.change.Sequence, s.Key)
		p.parents[s.Key] = s
		p.add = append(p.add, s)
	}
	p.change.Snapshots = p.add
	p.change.Blobs, p.change.Images = from.Blobs, into.Lacks(from).Images
	return p, nil
}
