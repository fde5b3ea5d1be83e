package update

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// StoreRoot is containerd's root directory on the DATA partition, which is mounted on /var.
const StoreRoot = "lib/containerd"

// ErrArchives means that the image has its container images as archives, not unpacked.
var ErrArchives = errors.New("the container images are archives, which an update cannot use: build the image without imageStore.mode: import")

// Lacks returns the references of those container images in next that are missing in now, the
// system that the machine runs.
func Lacks(now, next ondisk.ImageInfo) (refs []string) {
	for _, i := range next.Images {
		if !slices.ContainsFunc(now.Images, func(x ondisk.ImageRef) bool { return x.Ref == i.Ref && x.Digest == i.Digest }) {
			refs = append(refs, i.Ref)
		}
	}
	return refs
}

// StoreFiles returns Files for the store on a DATA partition.
func StoreFiles(r *ext4.Reader) store.Files {
	return store.Files{
		Stat:    r.Stat,
		ReadDir: r.ReadDir,
		Open: func(name string) (io.ReadCloser, error) {
			f, err := r.OpenFile(name)
			if err != nil {
				return nil, err
			}
			return io.NopCloser(io.NewSectionReader(f, 0, f.Size())), nil
		},
	}
}

// Images is containerd's store on the DATA partition of an image.
type Images struct {
	State *store.State
	fs    *ext4.Reader
}

// ReadImages reads the databases of the store.
func ReadImages(data io.ReaderAt) (*Images, error) {
	r, err := ext4.Open(data)
	if err != nil {
		return nil, err
	}
	s, err := store.ReadFrom(StoreFiles(r), StoreRoot)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrArchives
	}
	if err != nil {
		return nil, err
	}
	return &Images{State: s, fs: r}, nil
}

// Walk calls f for the files that a machine needs if its store lacks the records in lack: the
// databases, and the files of blobs and snapshots. Paths are relative to containerd's root
// directory. Parents come before children.
func (i *Images) Walk(lack *store.State, f func(tree.Node) error) error {
	blobs, snapshots := store.ContentDir+"/blobs/sha256", store.SnapshotterDir+"/snapshots"
	whole := []string{store.MetaDB, store.SnapshotterDB}
	for _, b := range lack.Blobs {
		whole = append(whole, store.BlobPath(b.Digest))
	}
	for _, s := range lack.Snapshots {
		whole = append(whole, store.SnapshotDir(s.ID))
	}
	parents := map[string]bool{}
	for _, p := range append([]string{blobs + "/x", snapshots + "/x"}, whole...) {
		for p = path.Dir(p); p != "."; p = path.Dir(p) {
			parents[p] = true
		}
	}
	for _, p := range slices.Sorted(maps.Keys(parents)) {
		n, err := i.fs.Stat(path.Join(StoreRoot, p))
		if err != nil {
			return err
		}
		if !n.IsDir() {
			return fmt.Errorf("%s is not a directory", n.Path)
		}
		n.Path = p
		if err := f(n); err != nil {
			return err
		}
	}
	for _, p := range whole {
		from := "" // the path with symbolic links resolved
		err := i.fs.WalkBelow(path.Join(StoreRoot, p), func(n tree.Node) error {
			if from == "" {
				from = n.Path
			}
			n.Path = p + n.Path[len(from):]
			return f(n)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// OpenBlob opens the content of a node that Walk passed to its function.
func (i *Images) OpenBlob(name string) (tree.BlobFile, error) { return i.fs.OpenBlob(name) }

// Chunks returns the numbers of the chunks that contain the files that Walk visits, and the disk
// space in bytes that these files need.
func (i *Images) Chunks(p *chunk.Part, lack *store.State) (chunks []int, size int64, err error) {
	const block, maxImages = 4096, 1 << 44 // far more than a disk has
	v, found, seen := NewView(p, nil), map[int]bool{}, map[*tree.Inode]bool{}
	err = i.Walk(lack, func(n tree.Node) error {
		if seen[n.Inode] {
			return nil
		}
		seen[n.Inode] = !n.IsDir()
		size += 2*block + n.Data.Size // one more block for the inode and the name, and one for the rest of the last block
		if size > maxImages {
			return fmt.Errorf("%s and the files before it have more than %d bytes", n.Path, int64(maxImages))
		}
		if n.Data.Blob == "" {
			return nil
		}
		b, err := i.fs.OpenBlob(n.Data.Blob)
		if err != nil {
			return err
		}
		for _, x := range b.(*ext4.File).Ranges() {
			v.each(x.Off, x.Len, func(k int) { found[k] = true })
		}
		return nil
	})
	return slices.Sorted(maps.Keys(found)), size, err
}
