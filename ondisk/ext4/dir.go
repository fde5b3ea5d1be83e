package ext4

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// A directory of one block is a list of names. A larger one also has a hash index, with which the
// kernel finds a name among 20,000 by reading two blocks ("Hash Tree Directories"): first the root
// of the index in block 0, then further index blocks if needed, then the names, ordered by hash.
// Software that does not support indexes reads index blocks as empty blocks of names.

const (
	direntHeader = 8
	// direntTail is the size of the nameless entry at the end of a block, which has the checksum.
	direntTail = 12
	leafRoom   = blockSize - direntTail
	dotEntries = 2 * 12 // "." and ".."

	halfMD4Version = 1
	// Index entries follow the dot entries and the parameters in the first block, and one empty
	// entry in other index blocks. An index entry and the checksum have eight bytes each.
	indexRootAt   = 0x20
	indexNodeAt   = 8
	indexEntry    = 8
	indexTail     = 8
	indexRootRoom = (blockSize - indexRootAt - indexTail) / indexEntry
	indexNodeRoom = (blockSize - indexNodeAt - indexTail) / indexEntry
)

// fileTypes maps st_mode>>12 to the type byte of a directory entry.
var fileTypes = [16]byte{
	tree.ModeRegular >> 12: 1, tree.ModeDir >> 12: 2, tree.ModeChar >> 12: 3, tree.ModeBlock >> 12: 4,
	tree.ModeFIFO >> 12: 5, tree.ModeSocket >> 12: 6, tree.ModeSymlink >> 12: 7,
}

// direntSize returns the size in bytes of the entry for name.
func direntSize(name string) int { return direntHeader + pad4(len(name)) }

// measure decides whether d needs an index, sorts its entries accordingly, and sets its number of
// blocks.
func (d *directory) measure(seed [16]byte) error {
	size := dotEntries
	for _, e := range d.entries {
		size += direntSize(e.name)
	}
	if d.number == lostInode && size <= leafRoom {
		d.blocks = lostBlocks
		return nil
	}
	if size <= leafRoom {
		d.blocks = 1
		return nil
	}
	d.indexed = true
	hashes := make([]hashedEntry, len(d.entries))
	for i, e := range d.entries {
		hashes[i] = hashedEntry{nameHash(seed, e.name), e}
	}
	slices.SortFunc(hashes, func(a, b hashedEntry) int {
		return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.name, b.name))
	})
	for i, h := range hashes {
		d.entries[i] = h.entry
	}
	leaves := int64(len(d.leaves(seed)))
	d.blocks = 1 + leaves
	if leaves > indexRootRoom {
		nodes := ceilDiv(leaves, indexNodeRoom)
		d.blocks += nodes
		if nodes > indexRootRoom {
			return fmt.Errorf("directory %q has %d entries, more than its index can hold: spread them over several directories", d.path, len(d.entries))
		}
	}
	return nil
}

type hashedEntry struct {
	hash uint32
	entry
}

// leafBlock is one block of names. It holds the entries [first, end) of its directory.
type leafBlock struct {
	first, end int
	hash       uint32 // hash of the first name, as stored in the index
}

// leaves divides the entries, which are sorted by hash, into blocks.
func (d *directory) leaves(seed [16]byte) []leafBlock {
	var out []leafBlock
	room := 0
	for i, e := range d.entries {
		n := direntSize(e.name)
		if n > room {
			h := nameHash(seed, e.name)
			if i > 0 && nameHash(seed, d.entries[i-1].name) == h {
				h |= 1 // the previous block has names of the same hash
			}
			out = append(out, leafBlock{first: i, hash: h})
			room = leafRoom
		}
		room -= n
		out[len(out)-1].end = i + 1
	}
	return out
}

// direntBlock encodes directory entries into one block.
type direntBlock struct {
	b    []byte
	pos  int
	last int
}

func (w *direntBlock) add(number uint32, fileType byte, name string) {
	p := w.b[w.pos:]
	n := direntSize(name)
	le.PutUint32(p, number)
	le.PutUint16(p[4:], uint16(n))
	p[6], p[7] = byte(len(name)), fileType
	copy(p[direntHeader:], name)
	w.last = w.pos
	w.pos += n
}

// finish extends the last entry to the end of the block and adds the checksum.
func (w *direntBlock) finish(seed uint32) {
	le.PutUint16(w.b[w.last+4:], uint16(leafRoom-w.last))
	t := w.b[leafRoom:]
	le.PutUint16(t[4:], direntTail)
	t[7] = 0xde
	le.PutUint32(t[8:], checksum(seed, w.b[:leafRoom]))
}

// emitDir encodes the blocks of a directory in order. next returns the memory of each block.
func (v *volume) emitDir(d *directory, next func() []byte) {
	seed := inodeSeed(v.seed, d.number, 0)
	names := func(w *direntBlock, entries []entry) {
		for _, e := range entries {
			w.add(e.number, fileTypes[v.inodes[e.number-1].node.Mode>>12], e.name)
		}
	}
	if !d.indexed {
		w := &direntBlock{b: next()}
		w.add(d.number, fileTypes[tree.ModeDir>>12], ".")
		w.add(d.parent, fileTypes[tree.ModeDir>>12], "..")
		names(w, d.entries)
		w.finish(seed)
		for range d.blocks - 1 {
			(&direntBlock{b: next()}).finish(seed)
		}
		return
	}

	leaves := d.leaves(v.opts.HashSeed)
	nodes := int(d.blocks) - 1 - len(leaves)
	index := make([]indexLine, len(leaves))
	for i, l := range leaves {
		index[i] = indexLine{l.hash, uint32(1 + nodes + i)}
	}
	root := next()
	w := &direntBlock{b: root}
	w.add(d.number, fileTypes[tree.ModeDir>>12], ".")
	w.add(d.parent, fileTypes[tree.ModeDir>>12], "..")
	le.PutUint16(root[12+4:], blockSize-12)
	info := root[dotEntries:]
	info[4] = halfMD4Version
	info[5] = 8 // length of these parameters
	if nodes > 0 {
		info[6] = 1 // levels of the index below this one
		above := make([]indexLine, nodes)
		for i := range above {
			above[i] = indexLine{index[i*indexNodeRoom].hash, uint32(1 + i)}
		}
		putIndex(root, indexRootAt, indexRootRoom, above, seed)
		for i := range nodes {
			b := next()
			le.PutUint16(b[4:], blockSize) // one empty entry
			putIndex(b, indexNodeAt, indexNodeRoom, index[i*indexNodeRoom:min((i+1)*indexNodeRoom, len(index))], seed)
		}
	} else {
		putIndex(root, indexRootAt, indexRootRoom, index, seed)
	}
	for _, l := range leaves {
		w := &direntBlock{b: next()}
		names(w, d.entries[l.first:l.end])
		w.finish(seed)
	}
}

// indexLine is an index entry: block contains the names whose hash is at least this hash.
type indexLine struct{ hash, block uint32 }

// putIndex encodes index lines. The first line has no hash: its place holds the capacity and the
// number of lines.
func putIndex(b []byte, at, room int, lines []indexLine, seed uint32) {
	for i, l := range lines {
		le.PutUint32(b[at+i*indexEntry:], l.hash)
		le.PutUint32(b[at+i*indexEntry+4:], l.block)
	}
	le.PutUint16(b[at:], uint16(room))
	le.PutUint16(b[at+2:], uint16(len(lines)))
	c := checksum(seed, b[:at+len(lines)*indexEntry])
	// The checksum is computed as if the tail's own checksum field were zero.
	c = checksum(c, make([]byte, indexTail))
	le.PutUint32(b[at+room*indexEntry+4:], c)
}
