// Package store reads and writes containerd's store on disk: the paths of its files, and the
// contents of its two databases as plain values. builder/images uses it to write a store, Verify
// checks a store, and firstboot merges one into the store in use.
//
// The databases are bbolt files:
//
//   - meta.db belongs to containerd. Per namespace (the kubelet uses "k8s.io"), it has
//     images, content blobs, and snapshots by chain ID.
//   - metadata.db belongs to the overlayfs snapshotter. It has the same snapshots under
//     other names ("k8s.io/<n>/<chainID>"), each with the number of its directory.
//
// Verify checks that a store has the properties with which containerd accepts and keeps it:
//
//   - The target and config of every image exist, and so do all objects to which their labels
//     refer. (The garbage collector follows only labels.)
//   - The parent of a snapshot exists in both databases, and agrees with the list of
//     children in each of them.
//   - Both sequences for snapshots are at least the highest number in use. Otherwise the
//     next snapshot would get a directory that is in use.
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

	// SchemaVersion is the version of meta.db that this package writes. containerd 1.7 uses 3.
	// containerd 2.x migrates it to 4, which 1.7 can still read.
	SchemaVersion = 3
	// NewestSchema is the highest version of meta.db that this package can read.
	NewestSchema = 4

	// Snapshotter is the name of containerd's snapshotter. Layers are unpacked for it.
	Snapshotter = "overlayfs"
	// SnapshotterDir is the snapshotter's directory, relative to Root.
	SnapshotterDir = "io.containerd.snapshotter.v1." + Snapshotter
	// SnapshotterDB is the snapshotter's database, relative to Root.
	SnapshotterDB = SnapshotterDir + "/metadata.db"
)

// Labels that containerd, its CRI plugin and edgebake set.
const (
	LabelGCConfig     = "containerd.io/gc.ref.content.config"
	LabelGCManifest   = "containerd.io/gc.ref.content.m." // followed by a number
	LabelGCLayer      = "containerd.io/gc.ref.content.l." // followed by a number
	LabelGCSnapshot   = "containerd.io/gc.ref.snapshot." + Snapshotter
	LabelUncompressed = "containerd.io/uncompressed"
	LabelSnapshotRef  = "containerd.io/snapshot.ref"
	// containerd 2.3 and later set these labels too; older versions keep them.
	LabelSnapshotDiff   = "containerd.io/snapshot/diff-id"
	LabelSnapshotParent = "containerd.io/snapshot/parent-chain-id"
	// LabelManaged marks an image of the CRI plugin.
	LabelManaged = "io.cri-containerd.image"
	// LabelPinned protects an image from the kubelet's garbage collection.
	LabelPinned = "io.cri-containerd.pinned"
	// LabelBaked marks the images that are part of the disk image. A merge unpins only these.
	LabelBaked = "edgebake.io/baked"
)

// SnapshotDir returns the directory of the snapshot with number id, relative to Root. The files of
// the layer are in its subdirectory "fs".
func SnapshotDir(id uint64) string {
	return SnapshotterDir + "/snapshots/" + strconv.FormatUint(id, 10)
}

// BlobPath returns the path of a blob, relative to Root.
func BlobPath(digest string) string {
	alg, hex, _ := strings.Cut(digest, ":")
	return path.Join(ContentDir, "blobs", alg, hex)
}

// BackendName returns the snapshotter's name of a snapshot, which containerd's metadata layer makes
// from a sequence number.
func BackendName(seq uint64, chainID string) string {
	return fmt.Sprintf("%s/%d/%s", Namespace, seq, chainID)
}

// ChainID returns the name of the snapshot of a layer on top of parent, as defined by the OCI image
// specification. parent is "" for the first layer.
func ChainID(parent, diffID string) string {
	if parent == "" {
		return diffID
	}
	sum := sha256.Sum256([]byte(parent + " " + diffID))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Image is one image record: a name and the manifest or index that it refers to.
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

// Snapshot is one committed snapshot, with its data from both databases.
type Snapshot struct {
	// Key is the name in meta.db; for a layer of an image, it is the chain ID.
	Key    string
	Parent string // key of the parent; "" for the first layer
	// Backend is the snapshotter's name of the snapshot. ID is the number of its directory.
	Backend string
	ID      uint64
	Kind    byte // as in containerd's snapshots.Kind
	// Size is its disk usage in bytes, and Inodes the number of its inodes.
	Size, Inodes     int64
	Labels           map[string]string
	Created, Updated time.Time
}

// KindCommitted is containerd's snapshots.KindCommitted.
const KindCommitted = 3

// State is the content of both databases, for one namespace.
type State struct {
	Schema    int64 // minor version of meta.db
	Images    []Image
	Blobs     []Blob
	Snapshots []Snapshot
	// MetaSequence is the last number that meta.db has used, for backend names. BackendSequence is
	// the last one that metadata.db has used, for directories.
	MetaSequence, BackendSequence uint64
}

// Sort sorts all records, so that equal states are also deeply equal.
func (s *State) Sort() {
	slices.SortFunc(s.Images, func(a, b Image) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Blobs, func(a, b Blob) int { return cmp.Compare(a.Digest, b.Digest) })
	slices.SortFunc(s.Snapshots, func(a, b Snapshot) int { return cmp.Compare(a.ID, b.ID) })
}

// Lacks returns the records of other that s lacks: blobs, snapshots, and images, including images
// that s has with another digest or other labels.
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

// RecordNames returns the names under which the CRI plugin records an image: its reference, its
// repository with the digest, and its config's digest.
func RecordNames(repo, tag, digest, configDigest string) []string {
	var names []string
	if tag != "" {
		names = append(names, repo+":"+tag)
	}
	return append(names, repo+"@"+digest, configDigest)
}
