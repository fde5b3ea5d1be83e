package ext4

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// fuzzImage is an image with every structure that the reader parses, and their locations.
type fuzzImage struct {
	b      []byte
	r      *Reader
	inodes uint32           // number of inodes in use
	blocks map[int64]uint32 // blocks of directories and extent trees, with their inodes
	xattrs []int64          // blocks of extended attributes
}

type sliceWriter []byte

func (s sliceWriter) WriteAt(b []byte, off int64) (int, error) { return copy(s[off:], b), nil }

func newFuzzImage(f *testing.F) *fuzzImage {
	add := func(nodes []tree.Node, path string, mode uint32, change func(*tree.Inode)) []tree.Node {
		in := &tree.Inode{Mode: mode, MTime: time.Unix(1e9, 0)}
		if change != nil {
			change(in)
		}
		return append(nodes, tree.Node{Path: path, Inode: in})
	}
	nodes := add(nil, "d", tree.ModeDir|0o755, nil)
	nodes = add(nodes, "d/small", tree.ModeRegular, func(in *tree.Inode) {
		in.Data = tree.Bytes([]byte("content"))
		in.Xattrs = map[string]string{"user.a": "b", "system.posix_acl_access": "\x02\x00\x00\x00\x01\x00\x07\x00\xff\xff\xff\xff"}
	})
	nodes = add(nodes, "d/tree", tree.ModeRegular, func(in *tree.Inode) { in.Data = tree.Bytes(bytes.Repeat([]byte{1}, 2*blockSize)) })
	nodes = add(nodes, "d/big", tree.ModeRegular, func(in *tree.Inode) {
		in.Xattrs = map[string]string{"user.big": strings.Repeat("v", 500), "trusted.x": strings.Repeat("w", 700)}
	})
	nodes = add(nodes, "d/long", tree.ModeSymlink, func(in *tree.Inode) { in.Target = strings.Repeat("t", 100) })
	nodes = add(nodes, "d/short", tree.ModeSymlink, func(in *tree.Inode) { in.Target = "long" })
	nodes = add(nodes, "d/null", tree.ModeChar, func(in *tree.Inode) { in.Major, in.Minor = 1, 3 })
	for i := range 100 {
		nodes = add(nodes, fmt.Sprintf("d/%0100d", i), tree.ModeDir, nil)
	}
	o := Options{UUID: [16]byte{1}, HashSeed: [16]byte{2}, Time: time.Unix(1e9, 0)}
	var err error
	if o.Size, err = Size(nodes, o); err != nil {
		f.Fatal(err)
	}
	img := &fuzzImage{b: make([]byte, o.Size), blocks: map[int64]uint32{}}
	if _, err := Write(sliceWriter(img.b), nodes, nil, o); err != nil {
		f.Fatal(err)
	}
	if img.r, err = Open(bytes.NewReader(img.b)); err != nil {
		f.Fatal(err)
	}
	img.inodes = uint32(img.r.info.Inodes - img.r.info.FreeInodes)
	for number := uint32(firstInode); number <= img.inodes; number++ {
		in, err := img.r.inode(number)
		if err != nil {
			f.Fatal(err)
		}
		if at := in.xattrBlock(); at != 0 {
			img.xattrs = append(img.xattrs, at)
		}
		extents, err := img.r.extents(in)
		if err != nil {
			continue // the inode has no attributes
		}
		switch {
		case in.mode()&tree.ModeType == tree.ModeDir:
			for i := range extents[0].n {
				img.blocks[extents[0].start+i] = number
			}
		case in.size() == 2*blockSize:
			// Turn the inode into a file with an extent tree: the first block becomes the node that
			// maps the second one.
			node := img.block(extents[0].start)
			clear(node)
			putExtents(node, []extent{{0, extents[0].start + 1, 1}}, nodeExtents, 0)
			root := img.inode(number)[0x28:0x64]
			putExtents(root, []extent{{0, extents[0].start, 0}}, rootExtents, 1)
			img.blocks[extents[0].start] = number
		}
	}
	img.seal()
	n := 0
	if r, err := Open(bytes.NewReader(img.b)); err != nil {
		f.Fatal(err)
	} else if err := r.Walk(func(tree.Node) error { n++; return nil }); err != nil || n != len(nodes)+2 {
		f.Fatalf("the image to begin with: %d nodes, %v", n, err)
	}
	return img
}

func (img *fuzzImage) block(at int64) []byte { return img.b[at*blockSize:][:blockSize] }

func (img *fuzzImage) inode(number uint32) []byte {
	return img.b[img.r.tables[0]*blockSize+int64(number-1)*inodeSize:][:inodeSize]
}

// seal corrects all checksums, so that the parsers do not reject the changed bytes at once.
func (img *fuzzImage) seal() {
	seed := img.r.seed
	sb := img.b[superOffset:][:superSize]
	le.PutUint32(sb[0x270:], seed)
	le.PutUint32(sb[0x3fc:], checksum(^uint32(0), sb[:0x3fc]))
	d := img.block(1)[:descSize]
	le.PutUint16(d[0x1e:], 0)
	le.PutUint16(d[0x1e:], uint16(checksum(checksum(seed, make([]byte, 4)), d)))
	for number := uint32(1); number <= img.inodes; number++ {
		b := img.inode(number)
		le.PutUint16(b[0x7c:], 0)
		le.PutUint16(b[0x82:], 0)
		sum := checksum(inodeSeed(seed, number, le.Uint32(b[0x64:])), b)
		le.PutUint16(b[0x7c:], uint16(sum))
		le.PutUint16(b[0x82:], uint16(sum>>16))
	}
	for at, number := range img.blocks {
		b := img.block(at)
		inSeed := inodeSeed(seed, number, le.Uint32(img.inode(number)[0x64:]))
		if le.Uint16(b) == extentMagic {
			end := extentHeader * (1 + nodeExtents)
			le.PutUint32(b[end:], checksum(inSeed, b[:end]))
			continue
		}
		le.PutUint32(b[leafRoom+8:], checksum(inSeed, b[:leafRoom]))
		if le.Uint16(b[indexRootAt:]) == indexRootRoom {
			n := int(le.Uint16(b[indexRootAt+2:]))
			if n <= indexRootRoom {
				c := checksum(inSeed, b[:indexRootAt+n*indexEntry])
				le.PutUint32(b[blockSize-4:], checksum(c, make([]byte, indexTail)))
			}
		}
	}
	for _, at := range img.xattrs {
		b := img.block(at)
		le.PutUint32(b[16:], 0)
		le.PutUint32(b[16:], checksum(blockSeed(seed, at), b))
	}
}

// FuzzReader changes bytes of an image and corrects all checksums. The reader must not panic, run
// forever or use unlimited memory. The input is a list of changes: kind, structure, offset (two
// bytes), number of bytes, bytes.
func FuzzReader(f *testing.F) {
	img := newFuzzImage(f)
	pristine := bytes.Clone(img.b)
	f.Add([]byte{0, 0, 4, 0, 4, 0, 0, 0, 0})
	f.Add([]byte{1, 0, 8, 0, 2, 9, 9})
	f.Add([]byte{2, 12, 4, 0, 4, 0xff, 0xff, 0xff, 0x7f})
	f.Add([]byte{2, 14, 0x28, 0, 8, 0x0a, 0xf3, 1, 0, 4, 0, 5, 0})
	f.Add([]byte{2, 13, 0xa0, 0, 12, 0, 0, 2, 0xea, 4, 2, 0xff, 0, 0, 0, 0, 0})
	f.Add([]byte{3, 1, 0, 0, 6, 2, 0, 0, 0, 1, 0})
	f.Add([]byte{4, 0, 32, 0, 4, 255, 1, 0xff, 0xff})
	f.Add([]byte{3, 200, 0, 0, 8, 0x0a, 0xf3, 0xff, 0xff, 0x54, 1, 1, 0})
	var dirBlocks []int64
	for at := range int64(len(pristine) / blockSize) {
		if img.blocks[at] != 0 {
			dirBlocks = append(dirBlocks, at)
		}
	}
	f.Fuzz(func(t *testing.T, changes []byte) {
		copy(img.b, pristine)
		for len(changes) > 5 {
			what, which, at, n := changes[0]%5, int(changes[1]), int(le.Uint16(changes[2:])), int(changes[4])
			value := changes[5:min(5+n, len(changes))]
			changes = changes[5+len(value):]
			var b []byte
			switch what {
			case 0:
				b = img.b[superOffset:][:superSize]
			case 1:
				b = img.block(1)[:descSize]
			case 2:
				b = img.inode(1 + uint32(which)%img.inodes)
			case 3:
				b = img.block(dirBlocks[which%len(dirBlocks)])
			case 4:
				b = img.block(img.xattrs[which%len(img.xattrs)])
			}
			copy(b[at%len(b):], value)
		}
		img.seal()
		r, err := Open(bytes.NewReader(img.b))
		if err != nil {
			return
		}
		_ = r.Walk(func(n tree.Node) error {
			if n.Data.Blob != "" {
				if file, err := r.OpenBlob(n.Data.Blob); err == nil {
					_, _ = file.ReadAt(make([]byte, 10000), 0)
				}
			}
			return nil
		})
		_, _ = r.ReadFile("d/short")
	})
}
