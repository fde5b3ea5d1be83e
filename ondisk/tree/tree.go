// Package tree represents the root file system of an image during a build: a list of nodes in
// memory whose contents refer to blobs. Owners, modes, extended attributes, devices and hard links
// are only data, so a build needs no root and changes no metadata on the host.
//
// Each source (a base tar, the layers of a container image, overlays) becomes one Layer. Merge
// combines the layers into the tree from which file systems are written. Do not change a Node; copy
// it.
package tree

import (
	"io"
	"time"
)

// File types and permission bits of Inode.Mode, as in st_mode (see inode(7)).
const (
	ModeType    = 0o170000
	ModeSocket  = 0o140000
	ModeSymlink = 0o120000
	ModeRegular = 0o100000
	ModeBlock   = 0o060000
	ModeDir     = 0o040000
	ModeChar    = 0o020000
	ModeFIFO    = 0o010000
	ModeSetUID  = 0o004000
	ModeSetGID  = 0o002000
	ModeSticky  = 0o001000
)

// Node is one name in the tree. Hard links are nodes that share an *Inode.
type Node struct {
	// Path is relative to the root and clean ("usr/bin/kubelet"). The root itself is ".".
	Path string
	// Layer names the source of this node, for messages and reports. If it is empty, Merge sets it.
	Layer string
	*Inode
}

// Inode is a file without its name or names.
type Inode struct {
	// Mode is st_mode: file type and permission bits.
	Mode     uint32
	UID, GID uint32
	// Major and Minor are the device numbers of block and character devices.
	Major, Minor uint32
	// MTime is the modification time, with nanoseconds.
	MTime time.Time
	// Xattrs maps raw names ("security.capability", "trusted.overlay.opaque")
	// to raw values.
	Xattrs map[string]string
	// Target is the target of a symbolic link.
	Target string
	// Data is a regular file's content.
	Data Content
}

// Content is the content of a regular file: a range of an uncompressed blob or, for small generated
// files, the bytes themselves.
type Content struct {
	// Blob names an uncompressed blob in the cache by its SHA-256 in hexadecimal. It is empty if
	// the bytes are in Inline.
	Blob string
	// Off and Size are the range in bytes. Size is also set if the bytes are in Inline.
	Off, Size int64
	Inline    []byte
}

// Bytes returns the Content of a small generated file.
func Bytes(b []byte) Content { return Content{Size: int64(len(b)), Inline: b} }

// Blobs opens blobs for reading. Builds use the cache of builder/fetch; tests use a map.
type Blobs interface {
	// OpenBlob opens the uncompressed blob with this SHA-256 in hexadecimal. The caller must close
	// it.
	OpenBlob(sha256 string) (BlobFile, error)
}

// BlobFile is an open blob, for example an *os.File.
type BlobFile interface {
	io.ReaderAt
	io.Closer
}

// IsDir reports whether the inode is a directory.
func (i *Inode) IsDir() bool { return i.Mode&ModeType == ModeDir }

// IsRegular reports whether the inode is a regular file.
func (i *Inode) IsRegular() bool { return i.Mode&ModeType == ModeRegular }

// IsSymlink reports whether the inode is a symbolic link.
func (i *Inode) IsSymlink() bool { return i.Mode&ModeType == ModeSymlink }

// Layer has the nodes of one source, in any order.
type Layer struct {
	Name  string
	Nodes []Node
	// Replace allows the files of this layer to replace those of earlier layers. Without it, a path
	// that is in two layers is an error, unless both are directories.
	Replace bool
	// Remove lists paths of earlier layers that this layer removes, including everything below
	// them.
	Remove []string
}
