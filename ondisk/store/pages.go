package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
)

// bbolt maps its file into memory and trusts the contents, which a power cut may damage. A wrong
// page number causes a fault that recover does not catch. A page that refers to itself causes an
// endless loop. Opening for writing may panic in another goroutine.
//
// Therefore this package reads databases itself and checks each page. Only databases that passed
// this check are opened by bbolt, for writing.

// The format is defined in bbolt's internal/common. Integers have the byte order of the machine,
// which is little-endian on all supported machines.
const (
	boltMagic   = 0xED0CDAED
	boltVersion = 2

	pageHeader  = 16 // id, flags, count, overflow
	metaSize    = 64
	elementSize = 16 // of a branch: offset and size of the key, page number;
	//                    of a leaf: flags, offset and size of the key, size of the value
	bucketHeader = 16 // root page, sequence

	flagBranch   = 0x01
	flagLeaf     = 0x02
	flagFreelist = 0x10
	flagBucket   = 0x01 // flag of an element in a leaf

	noFreelist = 1<<64 - 1

	// maxDatabase is the maximum size of a database in bytes, far more than containerd needs on a
	// node. It limits how much is read because of a damaged length.
	maxDatabase = 1 << 30
	// maxNesting limits the depth of nested buckets and of page trees.
	maxNesting = 64
)

// pages is the state while a database file is read.
type pages struct {
	file     io.ReaderAt
	size     int64
	pageSize int64
	used     uint64          // number of pages in the file, including free ones
	seen     map[uint64]bool // pages already read: each page may be referred to only once
}

// readDatabase reads and checks a whole database.
func readDatabase(file io.ReaderAt, size int64) (*bucket, error) {
	if size > maxDatabase {
		return nil, fmt.Errorf("the database has %d bytes, at most %d are supported", size, maxDatabase)
	}
	p := &pages{file: file, size: size, seen: map[uint64]bool{0: true, 1: true}}
	meta, err := p.meta()
	if err != nil {
		return nil, err
	}
	p.used = meta.used
	if int64(p.used) < 0 || int64(p.used) > p.size/p.pageSize {
		return nil, fmt.Errorf("the database is truncated: %d pages are in use, but it has only %d bytes", p.used, p.size)
	}
	root := &bucket{sequence: meta.sequence}
	if err := p.tree(meta.root, root, keys{}, 0); err != nil {
		return nil, err
	}
	if meta.freelist != noFreelist {
		if err := p.freelist(meta.freelist); err != nil {
			return nil, err
		}
	}
	return root, nil
}

// metaPage has the fields of a meta page.
type metaPage struct {
	pageSize                       uint32
	root, sequence, freelist, used uint64
	tx                             uint64
}

// meta returns the newer of the valid meta pages. The location of the second one depends on the
// page size, so all page sizes are tried.
func (p *pages) meta() (metaPage, error) {
	var found []metaPage
	var errs []error
	for _, at := range append([]int64{0}, pageSizes()...) {
		m, err := p.metaAt(at)
		switch {
		case err != nil && at == 0:
			errs = append(errs, err)
		case err == nil && (at == 0 || at == int64(m.pageSize)):
			found = append(found, m)
		}
	}
	if len(found) == 0 {
		return metaPage{}, fmt.Errorf("neither of its meta pages is valid: %w", errors.Join(errs...))
	}
	best := found[0]
	for _, m := range found[1:] {
		if m.pageSize != best.pageSize {
			return metaPage{}, fmt.Errorf("the meta pages have different page sizes, %d and %d", best.pageSize, m.pageSize)
		}
		if m.tx > best.tx {
			best = m
		}
	}
	p.pageSize = int64(best.pageSize)
	return best, nil
}

// pageSizes returns the page sizes that bbolt uses on any machine.
func pageSizes() []int64 {
	var sizes []int64
	for s := int64(1 << 10); s <= 64<<10; s <<= 1 {
		sizes = append(sizes, s)
	}
	return sizes
}

func (p *pages) metaAt(at int64) (metaPage, error) {
	b := make([]byte, pageHeader+metaSize)
	if _, err := p.file.ReadAt(b, at); err != nil {
		return metaPage{}, fmt.Errorf("reading %d bytes at %d: %w", len(b), at, err)
	}
	b = b[pageHeader:]
	le := binary.LittleEndian
	h := fnv.New64a()
	h.Write(b[:metaSize-8])
	m := metaPage{
		pageSize: le.Uint32(b[8:]), root: le.Uint64(b[16:]), sequence: le.Uint64(b[24:]),
		freelist: le.Uint64(b[32:]), used: le.Uint64(b[40:]), tx: le.Uint64(b[48:]),
	}
	switch {
	case le.Uint32(b) != boltMagic:
		return m, errors.New("not a bbolt database")
	case le.Uint32(b[4:]) != boltVersion:
		return m, fmt.Errorf("the format is version %d, expected %d", le.Uint32(b[4:]), boltVersion)
	case le.Uint64(b[metaSize-8:]) != h.Sum64():
		return m, errors.New("a checksum is wrong")
	case m.pageSize < 1<<10 || m.pageSize > 64<<10 || m.pageSize&(m.pageSize-1) != 0:
		return m, fmt.Errorf("the page size %d is invalid", m.pageSize)
	}
	return m, nil
}

// page reads a page and its overflow pages. It returns an error if the page has been read before.
func (p *pages) page(id uint64) (flags uint16, count int, body []byte, err error) {
	if id < 2 || id >= p.used {
		return 0, 0, nil, fmt.Errorf("reference to page %d, but only pages 2 to %d exist", id, p.used-1)
	}
	head := make([]byte, pageHeader)
	if _, err := p.file.ReadAt(head, int64(id)*p.pageSize); err != nil {
		return 0, 0, nil, fmt.Errorf("reading page %d: %w", id, err)
	}
	le := binary.LittleEndian
	if got := le.Uint64(head); got != id {
		return 0, 0, nil, fmt.Errorf("the header of page %d has the number %d", id, got)
	}
	over := uint64(le.Uint32(head[12:]))
	if over >= p.used-id {
		return 0, 0, nil, fmt.Errorf("page %d and its %d overflow pages end beyond the last page", id, over)
	}
	for n := id; n <= id+over; n++ {
		if p.seen[n] {
			return 0, 0, nil, fmt.Errorf("two references lead to page %d", n)
		}
		p.seen[n] = true
	}
	body = make([]byte, int64(over+1)*p.pageSize)
	if _, err := p.file.ReadAt(body, int64(id)*p.pageSize); err != nil {
		return 0, 0, nil, fmt.Errorf("reading page %d: %w", id, err)
	}
	return le.Uint16(head[8:]), int(le.Uint16(head[10:])), body, nil
}

// keys is the range of keys that a page may contain. The parent pages define it, because bbolt uses
// their keys to search.
type keys struct {
	from  string
	until string // exclusive; "" means no end (no key is empty)
}

func (k keys) has(key string) bool { return key >= k.from && (k.until == "" || key < k.until) }

// tree adds everything in the tree below page id to a bucket.
func (p *pages) tree(id uint64, into *bucket, in keys, depth int) error {
	if depth > maxNesting {
		return fmt.Errorf("page %d is nested %d levels deep", id, depth)
	}
	flags, count, body, err := p.page(id)
	if err != nil {
		return err
	}
	switch flags {
	case flagBranch:
		err = p.branch(body, count, into, in, depth)
	case flagLeaf:
		err = p.leaf(body, count, into, in, depth)
	default:
		err = fmt.Errorf("unknown page type %#x", flags)
	}
	if err != nil && depth == 0 {
		err = fmt.Errorf("below page %d: %w", id, err)
	}
	return err
}

func (p *pages) branch(body []byte, count int, into *bucket, in keys, depth int) error {
	le := binary.LittleEndian
	type child struct {
		key  string
		page uint64
	}
	var children []child
	for n := range count {
		key, _, e, err := element(body, n, count, false)
		if err != nil {
			return err
		}
		if n > 0 && key <= children[n-1].key || !in.has(key) {
			return fmt.Errorf("key %q is out of order", key)
		}
		children = append(children, child{key, le.Uint64(e[8:])})
	}
	if count == 0 {
		return errors.New("a branch without elements")
	}
	for n, c := range children {
		below := keys{c.key, in.until}
		if n+1 < count {
			below.until = children[n+1].key
		}
		if err := p.tree(c.page, into, below, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// leaf adds the pairs and buckets of a leaf page. body may also be the inline page of a bucket.
func (p *pages) leaf(body []byte, count int, into *bucket, in keys, depth int) error {
	last := ""
	for n := range count {
		key, value, e, err := element(body, n, count, true)
		if err != nil {
			return err
		}
		if key <= last || !in.has(key) { // this also rejects an empty key
			return fmt.Errorf("key %q is out of order", key)
		}
		last = key
		switch kind := binary.LittleEndian.Uint32(e); kind {
		case 0:
			into.put(key, value)
		case flagBucket:
			if err := p.bucket(key, value, into, depth); err != nil {
				return err
			}
		default:
			return fmt.Errorf("key %q is of unknown type %#x", key, kind)
		}
	}
	return nil
}

// bucket adds one bucket. Its content is a tree of pages, or an inline page after the bucket
// header.
func (p *pages) bucket(name string, value []byte, into *bucket, depth int) error {
	if len(value) < bucketHeader {
		return fmt.Errorf("bucket %q has %d bytes", name, len(value))
	}
	le := binary.LittleEndian
	child := into.at(name)
	child.sequence = le.Uint64(value[8:])
	if root := le.Uint64(value); root != 0 {
		return p.tree(root, child, keys{}, depth+1)
	}
	inline := value[bucketHeader:]
	if len(inline) < pageHeader || le.Uint16(inline[8:]) != flagLeaf || le.Uint32(inline[12:]) != 0 {
		return fmt.Errorf("bucket %q has no page", name)
	}
	if err := p.leaf(inline, int(le.Uint16(inline[10:])), child, keys{}, depth+1); err != nil {
		return fmt.Errorf("bucket %q: %w", name, err)
	}
	if len(child.children) > 0 {
		return fmt.Errorf("bucket %q is inline and has its own buckets", name)
	}
	return nil
}

// element returns element n of a page, with its key and value. Keys and values are stored after all
// elements.
func element(body []byte, n, count int, leaf bool) (key string, value, e []byte, err error) {
	at, data := pageHeader+n*elementSize, int64(pageHeader+count*elementSize)
	if data > int64(len(body)) {
		return "", nil, nil, fmt.Errorf("there is no room for %d elements", count)
	}
	e = body[at : at+elementSize]
	le := binary.LittleEndian
	pos, keySize, valueSize := le.Uint32(e), le.Uint32(e[4:]), uint32(0)
	if leaf {
		pos, keySize, valueSize = le.Uint32(e[4:]), le.Uint32(e[8:]), le.Uint32(e[12:])
	}
	from := int64(at) + int64(pos)
	mid := from + int64(keySize)
	end := mid + int64(valueSize)
	if from < data || end > int64(len(body)) {
		return "", nil, nil, fmt.Errorf("element %d is outside its page", n)
	}
	return string(body[from:mid]), body[mid:end:end], e, nil
}

// freelist checks the list of free pages. It must not contain pages that are in use.
func (p *pages) freelist(id uint64) error {
	flags, count, body, err := p.page(id)
	if err != nil {
		return fmt.Errorf("list of free pages: %w", err)
	}
	if flags != flagFreelist {
		return fmt.Errorf("page %d, the list of free pages, is of type %#x", id, flags)
	}
	le := binary.LittleEndian
	at, n := int64(pageHeader), uint64(count)
	if count == 0xffff { // the number does not fit in the header, so it is in the first word
		n = le.Uint64(body[at:])
		at += 8
	}
	if n > uint64(int64(len(body))-at)/8 {
		return fmt.Errorf("the list of free pages has %d entries, more than fit", n)
	}
	for i := range n {
		free := le.Uint64(body[at+int64(i)*8:])
		if free < 2 || free >= p.used || p.seen[free] {
			return fmt.Errorf("page %d is listed as free, but is in use or does not exist", free)
		}
		p.seen[free] = true
	}
	return nil
}
