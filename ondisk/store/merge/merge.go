// Package merge adds a baked image store to one that is in use, offline,
// before containerd starts, and releases the baked images that the new system
// no longer needs. `firstboot images merge` is its command; A/B updates need
// it, since a new root file system brings new images to a DATA partition that
// lives on.
//
// It can be killed at any moment, and is then simply run again:
//
//   - what it adds is copied, or hard linked where both stores share a file
//     system; the source stays as it is until the caller removes it;
//   - files come first, synced, then the snapshotter's database, then
//     meta.db, each in one transaction: until the last, no image record
//     refers to anything new; after it, everything they refer to is there;
//   - leftovers of a killed run are files and records no database refers to.
//     The next run removes them, and so would containerd.
//
// Images are released by taking their records away. What only they used is
// freed by containerd's own collector when it starts, since that alone knows
// what running containers hold. Images that the node pulled itself are never
// touched.
package merge

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/ondisk/store"
)

// Options say what is merged.
type Options struct {
	// From and Into are containerd roots (…/var/lib/containerd). From need not have the
	// layers and blobs that Into has.
	From, Into string
	// Snapshotter of both; empty: overlayfs.
	Snapshotter string
	// Keep lists references ("registry.example.com/pause:3.10") of baked images
	// that stay although From lacks them: those of the system one may have
	// to go back to.
	Keep []string
	// KeepAll: all stay.
	KeepAll bool
	// Step, if set, is told of every change before it is made; an error of
	// its own stops the merge there.
	Step func(change string) error
}

// Report says what a merge did.
type Report struct {
	Added    []string `json:"added"`    // image records
	Released []string `json:"released"` // image records
	// Snapshots and Blobs were added; Shared snapshots were there already.
	Snapshots int `json:"snapshots"`
	Blobs     int `json:"blobs"`
	Shared    int `json:"shared"`
}

// plan is what has to change: pure data.
type plan struct {
	change store.Change
	// add are the snapshots to make, parents first, with their new numbers;
	// from are their numbers in the source.
	add  []store.Snapshot
	from map[string]uint64
	// parents has every snapshot that one of add may stand on.
	parents  map[string]store.Snapshot
	sequence uint64 // of metadata.db, afterwards
	shared   int
}

// makePlan compares the two stores.
func makePlan(from, into *store.State, o Options) (*plan, error) {
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
		p.change.Sequence += 2 // as containerd counts: prepare and commit
		s.ID = p.sequence
		s.Backend = store.BackendName(p.change.Sequence, s.Key)
		p.parents[s.Key] = s
		p.add = append(p.add, s)
	}
	p.change.Snapshots = p.add
	p.change.Blobs, p.change.Images = from.Blobs, into.Lacks(from).Images
	if o.KeepAll {
		return p, nil
	}

	now := map[string]store.Image{}
	for _, i := range into.Images {
		now[i.Name] = i
	}
	stay := map[string]bool{}
	for _, i := range from.Images {
		stay[i.Name] = true
	}
	kept := map[string]bool{} // digests
	for _, ref := range o.Keep {
		if i, ok := now[ref]; ok {
			kept[i.Digest] = true
		} else if !stay[ref] {
			// A slip of the pen would release what somebody wants to keep.
			return nil, fmt.Errorf("%s is to be kept, but the store in use has no such image, only %s; correct the name", ref, strings.Join(into.Names(), ", "))
		}
	}
	for _, i := range into.Images {
		if !stay[i.Name] && i.Labels[store.LabelBaked] != "" && !kept[i.Digest] {
			p.change.RemoveImages = append(p.change.RemoveImages, i.Name)
		}
	}
	return p, nil
}
