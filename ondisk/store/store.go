// Package store reads and writes containerd's store on disk: the places of its files, and
// the contents of its two databases as plain values. builder/images writes a baked store with
// it, Verify checks one, and firstboot merges one into a store in use.
//
// The databases are bbolt files:
//
//   - meta.db is containerd's: images, content blobs and snapshots by chain
//     ID, one namespace ("k8s.io" is the kubelet's) below another.
//   - metadata.db is the overlayfs snapshotter's: the same snapshots under
//     names of its own ("k8s.io/<n>/<chainID>"), each with the number of its
//     directory.
//
// Invariants of a store that containerd accepts and keeps, all checked by
// Check:
//
//   - every image's target, that target's config, and what their labels refer
//     to exist; the garbage collector walks labels, nothing else;
//   - a snapshot's parent exists in both databases, and each database's list
//     of children agrees with it;
//   - both snapshot sequences are at least the highest number in use, or the
//     next snapshot would be given a directory that is taken.
package store

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	// Root is containerd's root directory, relative to the node's root.
	Root = "var/lib/containerd"
	// Namespace is the one the kubelet's images live in.
	Namespace = "k8s.io"

	// ContentDir holds blobs/<algorithm>/<hex>, relative to Root.
	ContentDir = "io.containerd.content.v1.content"
	// MetaDir holds meta.db, relative to Root.
	MetaDir = "io.containerd.metadata.v1.bolt"
	// MetaDB is containerd's database, relative to Root.
	MetaDB = MetaDir + "/meta.db"

	// SchemaVersion is the version of a baked meta.db. containerd 1.7 has 3; 2.x migrates it
	// to 4 when it first opens it, which 1.7 still reads.
	SchemaVersion = 3
	// NewestSchema is the highest version of meta.db this package can read.
	NewestSchema = 4
)

// Labels that containerd, its CRI plugin and edgebake attach.
const (
	LabelGCConfig     = "containerd.io/gc.ref.content.config"
	LabelGCManifest   = "containerd.io/gc.ref.content.m." // + number
	LabelGCLayer      = "containerd.io/gc.ref.content.l." // + number
	LabelGCSnapshot   = "containerd.io/gc.ref.snapshot."  // + snapshotter
	LabelUncompressed = "containerd.io/uncompressed"
	LabelSnapshotRef  = "containerd.io/snapshot.ref"
	// containerd 2.3 and later attach these too; older versions keep them.
	LabelSnapshotDiff   = "containerd.io/snapshot/diff-id"
	LabelSnapshotParent = "containerd.io/snapshot/parent-chain-id"
	// LabelManaged marks an image as the CRI plugin's.
	LabelManaged = "io.cri-containerd.image"
	// LabelPinned keeps an image from the kubelet's garbage collection.
	LabelPinned = "io.cri-containerd.pinned"
	// LabelBaked marks the images that came with the disk image. Only these
	// are ever released by a merge.
	LabelBaked = "edgebake.io/baked"
)

// SnapshotterDir is the snapshotter's directory, relative to Root.
func SnapshotterDir(snapshotter string) string {
	return "io.containerd.snapshotter.v1." + snapshotter
}

// SnapshotterDB is the snapshotter's database, relative to Root.
func SnapshotterDB(snapshotter string) string {
	return SnapshotterDir(snapshotter) + "/metadata.db"
}

// SnapshotDir is the directory of the snapshot with that number, relative to
// Root. The files are in its "fs".
func SnapshotDir(snapshotter string, id uint64) string {
	return SnapshotterDir(snapshotter) + "/snapshots/" + strconv.FormatUint(id, 10)
}

// BlobPath is the file of a blob, relative to Root.
func BlobPath(digest string) string {
	alg, hex, _ := strings.Cut(digest, ":")
	return path.Join(ContentDir, "blobs", alg, hex)
}

// BackendName is the snapshotter's name of a snapshot, as containerd's
// metadata layer makes it from a running number.
func BackendName(seq uint64, chainID string) string {
	return fmt.Sprintf("%s/%d/%s", Namespace, seq, chainID)
}

// ChainID names the snapshot of a layer on top of parent ("" for none), as
// the OCI image specification defines it.
func ChainID(parent, diffID string) string {
	if parent == "" {
		return diffID
	}
	sum := sha256.Sum256([]byte(parent + " " + diffID))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Image is one image record: a name that points at a manifest or index.
type Image struct {
	Name             string
	MediaType        string
	Digest           string
	Size             int64
	Labels           map[string]string
	Created, Updated time.Time
}

// Blob is the record of a file in the content store.
type Blob struct {
	Digest           string
	Size             int64
	Labels           map[string]string
	Created, Updated time.Time
}

// Snapshot is one committed snapshot, as both databases have it.
type Snapshot struct {
	// Key is the chain ID for snapshots of image layers.
	Key    string
	Parent string // key of the parent; "" for a first layer
	// Backend is the snapshotter's name of it; ID numbers its directory.
	Backend string
	ID      uint64
	Kind    byte // as in containerd's snapshots.Kind
	// Size and Inodes are what it takes on disk.
	Size, Inodes     int64
	Labels           map[string]string
	Created, Updated time.Time
}

// KindCommitted is containerd's snapshots.KindCommitted.
const KindCommitted = 3

// State is what both databases say about one namespace.
type State struct {
	Schema    int64 // minor version of meta.db
	Images    []Image
	Blobs     []Blob
	Snapshots []Snapshot
	// MetaSequence and BackendSequence are the last numbers given out by
	// meta.db (in backend names) and metadata.db (in directories).
	MetaSequence, BackendSequence uint64
}

// Sort orders everything by name, so that equal states are equal values.
func (s *State) Sort() {
	slices.SortFunc(s.Images, func(a, b Image) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Blobs, func(a, b Blob) int { return cmp.Compare(a.Digest, b.Digest) })
	slices.SortFunc(s.Snapshots, func(a, b Snapshot) int { return cmp.Compare(a.ID, b.ID) })
}

// Lacks returns what of another store this one lacks: the records of images that it does
// not have as they are there, blobs and snapshots.
func (s *State) Lacks(other *State) *State {
	images, blobs, snapshots := map[string]Image{}, map[string]bool{}, map[string]bool{}
	for _, i := range s.Images {
		images[i.Name] = i
	}
	for _, b := range s.Blobs {
		blobs[b.Digest] = true
	}
	for _, sn := range s.Snapshots {
		snapshots[sn.Key] = true
	}
	out := &State{Schema: other.Schema}
	for _, i := range other.Images {
		if have, ok := images[i.Name]; !ok || have.Digest != i.Digest || !maps.Equal(have.Labels, i.Labels) {
			out.Images = append(out.Images, i)
		}
	}
	for _, b := range other.Blobs {
		if !blobs[b.Digest] {
			out.Blobs = append(out.Blobs, b)
		}
	}
	for _, sn := range other.Snapshots {
		if !snapshots[sn.Key] {
			out.Snapshots = append(out.Snapshots, sn)
		}
	}
	return out
}

// RecordNames are the names the CRI plugin gives an image: its reference, its
// repository by digest, and the digest of its config.
func RecordNames(repo, tag, digest, configDigest string) []string {
	var names []string
	if tag != "" {
		names = append(names, repo+":"+tag)
	}
	return append(names, repo+"@"+digest, configDigest)
}
