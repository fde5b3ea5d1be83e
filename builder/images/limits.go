package images

import (
	"cmp"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/edgebake/edgebake/configs"
)

// A small image can claim to be of any size: a layer of 3 KiB can have a file
// of many GiB, or millions of directories. What a user may legitimately exceed
// is set in the Image (imageStore).
const (
	// DefaultMaxLayer is how many bytes a layer may have uncompressed.
	DefaultMaxLayer = 8 << 30
	// DefaultMaxFiles is how many files and directories all images may have.
	DefaultMaxFiles = 2_000_000

	// imageLayers: all layers of an image together may have as much as that
	// many of the largest.
	imageLayers = 4
	// holeShare: the holes of sparse files, which cost nothing to ship, may
	// take this part of a layer's limit, over all images.
	holeShare = 8
	// pathBytes is how long a path may be, on average.
	pathBytes = 256
	// stepsPerFile is how many elements a path may have, on average, with
	// those of the symbolic links on its way.
	stepsPerFile = 200

	// maxLayers is how many directories overlayfs stacks (OVL_MAX_STACK), and
	// mountOptions how many bytes they may take in the one page that mount(2)
	// reads; the rest of it is for the container's own.
	maxLayers    = 500
	mountOptions = 4096 - 320
)

// LimitError says that an image is larger than edgebake unpacks.
type LimitError struct {
	What  string // "uncompressed it has more than 8.0 GiB"
	Field string // that raises the limit, empty where none does
}

func (e *LimitError) Error() string {
	if e.Field == "" {
		return e.What
	}
	return e.What + ": use a smaller image or, if it is meant, raise " + e.Field
}

const (
	fieldMaxLayer = "imageStore.maxLayerSize"
	fieldMaxFiles = "imageStore.maxFiles"
)

func (o *Options) maxLayer() int64 { return cmp.Or(o.MaxLayer, DefaultMaxLayer) }

// budget bounds what unpacking all images of a store may take.
type budget struct {
	maxFiles, maxHoles              int64
	files, pathLength, steps, holes int64
}

func newBudget(o *Options) *budget {
	return &budget{maxFiles: cmp.Or(o.MaxFiles, DefaultMaxFiles), maxHoles: o.maxLayer() / holeShare}
}

// name counts a name whose path has that length.
func (b *budget) name(length int) error {
	b.files++
	b.pathLength += int64(length)
	if b.files > b.maxFiles {
		return &LimitError{fmt.Sprintf("with it the images have more than %d files and directories", b.maxFiles), fieldMaxFiles}
	}
	if b.pathLength > b.maxFiles*pathBytes {
		return &LimitError{fmt.Sprintf("with it the paths of the images' files have more than %d bytes together", b.maxFiles*pathBytes), fieldMaxFiles}
	}
	return nil
}

// step counts an element of a path that is followed.
func (b *budget) step() error {
	if b.steps++; b.steps > b.maxFiles*stepsPerFile {
		return &LimitError{fmt.Sprintf("with it the paths of the images' files have more than %d elements together", b.maxFiles*stepsPerFile), fieldMaxFiles}
	}
	return nil
}

// hole counts a sparse file.
func (b *budget) hole(size int64) error {
	if size < 0 || size > b.maxHoles-b.holes {
		return &LimitError{fmt.Sprintf("with its %s the sparse files of the images have more than %s", configs.HumanSize(size), configs.HumanSize(b.maxHoles)), fieldMaxLayer}
	}
	b.holes += size
	return nil
}

// sizeLimit bounds what a layer, and all of an image, have uncompressed.
type sizeLimit struct {
	layer int64
	image *atomic.Int64 // what is left for the image
}

func newSizeLimit(o *Options) sizeLimit {
	left := &atomic.Int64{}
	left.Store(imageLayers * o.maxLayer())
	return sizeLimit{o.maxLayer(), left}
}

// take counts a layer that the cache has uncompressed.
func (s sizeLimit) take(size int64) error {
	l := limited{limit: s}
	return l.count(size)
}

// limited ends a layer that is larger than it may be.
type limited struct {
	r     io.Reader
	limit sizeLimit
	n     int64
	taken int64 // of the image's limit
}

// giveBack forgets a layer that came to nothing and will be read again.
func (l *limited) giveBack() {
	if l.limit.image != nil {
		l.limit.image.Add(l.taken)
		l.taken = 0
	}
}

func (l *limited) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if err := l.count(int64(n)); err != nil {
		return 0, err
	}
	return n, err
}

// count adds n bytes to those of the layer and of its image.
func (l *limited) count(n int64) error {
	l.n += n
	if l.n > l.limit.layer {
		return &LimitError{"uncompressed it has more than " + configs.HumanSize(l.limit.layer), fieldMaxLayer}
	}
	if l.limit.image == nil {
		return nil
	}
	l.taken += n
	if l.limit.image.Add(-n) < 0 {
		return &LimitError{fmt.Sprintf("uncompressed the layers of the image have more than %s (%d times the limit of one)", configs.HumanSize(imageLayers*l.limit.layer), imageLayers), fieldMaxLayer}
	}
	return nil
}
