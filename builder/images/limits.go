package images

import (
	"cmp"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/edgebake/edgebake/configs/bytesize"
)

// A small image can claim huge contents: a layer of 3 KiB can contain a file of many GiB, or
// millions of directories. Fields of imageStore raise the limits that a legitimate image may
// exceed.
const (
	// DefaultMaxLayer is the default limit for the uncompressed size of a layer, in bytes.
	DefaultMaxLayer = 8 << 30
	// DefaultMaxFiles is the default limit for the number of files and directories in all images.
	DefaultMaxFiles = 2_000_000

	// imageLayers is the limit for all layers of an image, as a multiple of the limit for one
	// layer.
	imageLayers = 4
	// holeShare limits the holes of sparse files, which add no bytes to an image. The holes of all
	// images together may be as large as 1/holeShare of a layer's limit.
	holeShare = 8
	// pathBytes is the largest average length of a path, in bytes.
	pathBytes = 256
	// stepsPerFile is the largest average number of elements in a path, including the targets of
	// its symbolic links.
	stepsPerFile = 200

	// maxLayers is the number of directories that overlayfs can stack (OVL_MAX_STACK). mountOptions
	// is the space for their names in the page of options of mount(2). The rest of the page is for
	// the container's own directories.
	maxLayers    = 500
	mountOptions = 4096 - 320
)

// LimitError means that an image exceeds a limit.
type LimitError struct {
	What  string // such as "its uncompressed size is more than 8.0 GiB"
	Field string // the field that raises the limit, or ""
}

func (e *LimitError) Error() string {
	if e.Field == "" {
		return e.What
	}
	return e.What + ": use a smaller image or, if this is intended, raise " + e.Field
}

const (
	fieldMaxLayer = "imageStore.maxLayerSize"
	fieldMaxFiles = "imageStore.maxFiles"
)

func (o *Options) maxLayer() int64 { return cmp.Or(o.MaxLayer, DefaultMaxLayer) }

// budget counts the cost of unpacking all images of a store, and limits it.
type budget struct {
	maxFiles, maxHoles              int64
	files, pathLength, steps, holes int64
}

func newBudget(o *Options) *budget {
	return &budget{maxFiles: cmp.Or(o.MaxFiles, DefaultMaxFiles), maxHoles: o.maxLayer() / holeShare}
}

// name counts a file whose path has the given length.
func (b *budget) name(length int) error {
	b.files++
	b.pathLength += int64(length)
	if b.files > b.maxFiles {
		return &LimitError{fmt.Sprintf("the images have more than %d files and directories", b.maxFiles), fieldMaxFiles}
	}
	if b.pathLength > b.maxFiles*pathBytes {
		return &LimitError{fmt.Sprintf("the paths of the images' files have more than %d bytes in total", b.maxFiles*pathBytes), fieldMaxFiles}
	}
	return nil
}

// step counts one path element.
func (b *budget) step() error {
	if b.steps++; b.steps > b.maxFiles*stepsPerFile {
		return &LimitError{fmt.Sprintf("the paths of the images' files have more than %d elements in total", b.maxFiles*stepsPerFile), fieldMaxFiles}
	}
	return nil
}

// hole counts the holes of a sparse file of size bytes.
func (b *budget) hole(size int64) error {
	if size < 0 || size > b.maxHoles-b.holes {
		return &LimitError{fmt.Sprintf("it is a sparse file of %s, and the sparse files of all images may have at most %s together", bytesize.Human(size), bytesize.Human(b.maxHoles)), fieldMaxLayer}
	}
	b.holes += size
	return nil
}

// sizeLimit limits the uncompressed size of a layer, and of all layers of its image.
type sizeLimit struct {
	layer int64
	image *atomic.Int64 // bytes that the image's layers may still have
}

func newSizeLimit(o *Options) sizeLimit {
	left := &atomic.Int64{}
	left.Store(imageLayers * o.maxLayer())
	return sizeLimit{o.maxLayer(), left}
}

// add counts a layer that is already uncompressed in the cache.
func (s sizeLimit) add(size int64) error {
	l := limitedReader{limit: s}
	return l.count(size)
}

// limitedReader is a reader that fails when a layer exceeds its limit.
type limitedReader struct {
	r     io.Reader
	limit sizeLimit
	n     int64
	taken int64 // bytes counted against the image's limit
}

// giveBack subtracts the bytes of a failed layer from the count of the image.
func (l *limitedReader) giveBack() {
	if l.limit.image != nil {
		l.limit.image.Add(l.taken)
		l.taken = 0
	}
}

func (l *limitedReader) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if err := l.count(int64(n)); err != nil {
		return 0, err
	}
	return n, err
}

// count counts n more bytes for the layer and for its image.
func (l *limitedReader) count(n int64) error {
	l.n += n
	if l.n > l.limit.layer {
		return &LimitError{"its uncompressed size is more than " + bytesize.Human(l.limit.layer), fieldMaxLayer}
	}
	if l.limit.image == nil {
		return nil
	}
	l.taken += n
	if l.limit.image.Add(-n) < 0 {
		return &LimitError{fmt.Sprintf("the uncompressed layers of the image have more than %s (%d times the limit of one layer)", bytesize.Human(imageLayers*l.limit.layer), imageLayers), fieldMaxLayer}
	}
	return nil
}
