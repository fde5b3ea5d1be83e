// Package store reads and writes containerd's store on disk: the paths of its
// files, and the contents of its two databases as plain values. builder/images
// writes a store with it, Verify checks one, and firstboot merges one into the
// store in use.
//
// The databases are bbolt files:
//
//   - meta.db is containerd's: images, content blobs and snapshots by chain
//     ID, by namespace (the kubelet uses "k8s.io").
//   - metadata.db is the overlayfs snapshotter's: the same snapshots under
//     other names ("k8s.io/<n>/<chainID>"), each with the number of its
//     directory.
//
// Verify checks these invariants of a store that containerd accepts and keeps:
//
//   - every image's target and config, and everything that their labels refer
//     to, exist; the garbage collector follows only labels;
//   - a snapshot's parent exists in both databases, and each database's list
//     of children agrees with it;
//   - both snapshot sequences are at least the highest number in use; otherwise
//     the next snapshot would get a directory that is in use.
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
	// Namespace is the namespace of the kubelet's images.
	Namespace = "k8s.io"

	// ContentDir holds blobs/<algorithm>/<hex>, relative to Root.
	ContentDir = "io.containerd.content.v1.content"
	// MetaDir holds meta.db, relative to Root.
	MetaDir = "io.containerd.metadata.v1.bolt"
	// MetaDB is containerd's database, relative to Root.
	MetaDB = MetaDir + "/meta.db"

	// SchemaVersion is the version of meta.db that we write. containerd 1.7
	// uses 3; 2.x migrates it to 4, which 1.7 can still read.
	SchemaVersion = 3
	// NewestSchema is the highest version of meta.db that this package can
	// read.
	NewestSchema = 4

	// Snapshotter is containerd's snapshotter for which layers are unpacked.
	Snapshotter = "overlayfs"
	// SnapshotterDir is the snapshotter's directory, relative to Root.
	SnapshotterDir = "io.containerd.snapshotter.v1." + Snapshotter
	// SnapshotterDB is the snapshotter's database, relative to Root.
	SnapshotterDB = SnapshotterDir + "/metadata.db"
)

// Labels that containerd, its CRI plugin and edgebake set.
const (
	LabelGCConfig     = "containerd.io/gc.ref.content.config"
	LabelGCManifest   = "containerd.io/gc.ref.content.m." // + number
	LabelGCLayer      = "containerd.io/gc.ref.content.l." // + number
	LabelGCSnapshot   = "containerd.io/gc.ref.snapshot." + Snapshotter
	LabelUncompressed = "containerd.io/uncompressed"
	LabelSnapshotRef  = "containerd.io/snapshot.ref"
	// containerd 2.3 and later also set these; older versions keep them.
	LabelSnapshotDiff   = "containerd.io/snapshot/diff-id"
	LabelSnapshotParent = "containerd.io/snapshot/parent-chain-id"
	// LabelManaged marks an image of the CRI plugin.
	LabelManaged = "io.cri-containerd.image"
	// LabelPinned protects an image from the kubelet's garbage collection.
	LabelPinned = "io.cri-containerd.pinned"
	// LabelBaked marks the images that are part of the disk image. A merge
	// releases only these.
	LabelBaked = "edgebake.io/baked"
)

// SnapshotDir returns the directory of the snapshot with number id, relative to
// Root. Its files are in the subdirectory "fs".
func SnapshotDir(id uint64) string {
	return SnapshotterDir + "/snapshots/" + strconv.FormatUint(id, 10)
}

// BlobPath returns the path of a blob, relative to Root.
func BlobPath(digest string) string {
	alg, hex, _ := strings.Cut(digest, ":")
	return path.Join(ContentDir, "blobs", alg, hex)
}

// BackendName returns the snapshotter's name of a snapshot, which containerd's
// metadata layer makes from a sequence number.
func BackendName(seq uint64, chainID string) string {
	return fmt.Sprintf("%s/%d/%s", Namespace, seq, chainID)
}

// ChainID returns the name of the snapshot of a layer on top of parent ("" for
// none), as defined by the OCI image specification.
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

// Snapshot is one committed snapshot, with the data of both databases.
type Snapshot struct {
	// Key is the chain ID for snapshots of image layers.
	Key    string
	Parent string // key of the parent; "" for a first layer
	// Backend is the snapshotter's name for it; ID is the number of its
	// directory.
	Backend string
	ID      uint64
	Kind    byte // as in containerd's snapshots.Kind
	// Size and Inodes are its usage of the disk; Size is in bytes.
	Size, Inodes     int64
	Labels           map[string]string
	Created, Updated time.Time
}

// KindCommitted is containerd's snapshots.KindCommitted.
const KindCommitted = 3

// State is the content of both databases for one namespace.
type State struct {
	Schema    int64 // minor version of meta.db
	Images    []Image
	Blobs     []Blob
	Snapshots []Snapshot
	// MetaSequence and BackendSequence are the last numbers used by meta.db (in
	// backend names) and metadata.db (for directories).
	MetaSequence, BackendSequence uint64
}

// Sort sorts all records, so that equal states are equal values.
func (s *State) Sort() {
	slices.SortFunc(s.Images, func(a, b Image) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Blobs, func(a, b Blob) int { return cmp.Compare(a.Digest, b.Digest) })
	slices.SortFunc(s.Snapshots, func(a, b Snapshot) int { return cmp.Compare(a.ID, b.ID) })
}

// Lacks returns the records of other that s lacks: blobs, snapshots, and images
// that s does not have or has with another digest or labels.
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

// RecordNames returns the names that the CRI plugin gives an image: its
// reference, its repository with the digest, and the digest of its config.
func RecordNames(repo, tag, digest, configDigest string) []string {
	var names []string
	if tag != "" {
		names = append(names, repo+":"+tag)
	}
	return append(names, repo+"@"+digest, configDigest)
}
