package ext4

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"
)

const (
	xattrMagic = 0xea020000
	// xattrHeader is the size of the header of an attribute block, and xattrEntry that of an entry
	// without its name.
	xattrHeader = 32
	xattrEntry  = 16
	// inodeXattrs is the offset of the attributes in an inode. They follow the fields: the original
	// 128 bytes and extraSize more.
	inodeXattrs = 128 + extraSize
	extraSize   = 32
	// A list of entries ends with four zero bytes.
	xattrEnd = 4
)

// xattrPrefixes are the prefixes that are stored as numbers ("Extended Attributes", name indexes).
// An ACL's name is only the prefix. Index 7, "system.", is not supported: the only such attribute
// that the kernel stores, system.data, is file content.
var xattrPrefixes = [...]struct {
	index  byte
	prefix string
}{
	{1, "user."},
	{2, aclAccess},
	{3, aclDefault},
	{4, "trusted."},
	{6, "security."},
}

const (
	aclAccess  = "system.posix_acl_access"
	aclDefault = "system.posix_acl_default"
)

// xattr is an attribute in the form in which it is stored.
type xattr struct {
	index byte
	name  string // without the prefix
	value string
}

// size returns the size of the entry and of its value, each padded to four bytes.
func (x xattr) size() int { return xattrEntry + pad4(len(x.name)) + pad4(len(x.value)) }

func pad4(n int) int { return (n + 3) &^ 3 }

// planXattrs divides attributes between the inode, where they cost nothing to read, and a block for
// those that do not fit in the inode.
func planXattrs(raw map[string]string) (inInode, inBlock []xattr, err error) {
	if len(raw) == 0 {
		return nil, nil, nil
	}
	all := make([]xattr, 0, len(raw))
	for _, name := range slices.Sorted(maps.Keys(raw)) {
		x, err := storedXattr(name, raw[name])
		if err != nil {
			return nil, nil, err
		}
		all = append(all, x)
	}
	// The kernel expects the entries of a block in this order.
	slices.SortFunc(all, func(a, b xattr) int {
		return cmp.Or(cmp.Compare(a.index, b.index), cmp.Compare(len(a.name), len(b.name)), cmp.Compare(a.name, b.name))
	})
	room := inodeSize - inodeXattrs - 4 - xattrEnd // 4 bytes are for the magic number
	total := xattrHeader + xattrEnd
	for _, x := range all {
		if n := x.size(); n <= room {
			inInode = append(inInode, x)
			room -= n
		} else {
			inBlock = append(inBlock, x)
			total += n
		}
	}
	if total > blockSize {
		return nil, nil, fmt.Errorf("extended attributes need %d bytes, ext4 has space for %d: make them smaller", total, blockSize)
	}
	return inInode, inBlock, nil
}

// storedXattr converts an attribute's name and value to the stored form.
func storedXattr(name, value string) (xattr, error) {
	for _, p := range xattrPrefixes {
		rest, ok := strings.CutPrefix(name, p.prefix)
		if !ok {
			continue
		}
		acl := p.prefix == aclAccess || p.prefix == aclDefault
		if acl != (rest == "") || len(rest) > 255 || strings.ContainsRune(rest, 0) {
			continue
		}
		if acl {
			v, err := storedACL(value)
			if err != nil {
				return xattr{}, fmt.Errorf("extended attribute %s: %w", name, err)
			}
			value = v
		}
		return xattr{p.index, rest, value}, nil
	}
	return xattr{}, fmt.Errorf("extended attribute %q: supported are the prefixes user., trusted. and security., and the two system.posix_acl_* attributes", name)
}

// rawXattr is the inverse of storedXattr.
func rawXattr(x xattr) (name, value string, err error) {
	for _, p := range xattrPrefixes {
		if p.index != x.index {
			continue
		}
		value = x.value
		if p.index == 2 || p.index == 3 {
			if value, err = rawACL(value); err != nil {
				return "", "", err
			}
		}
		return p.prefix + x.name, value, nil
	}
	return "", "", fmt.Errorf("extended attribute with the unknown name index %d", x.index)
}

const (
	aclRawVersion    = 2
	aclStoredVersion = 1
	aclUser          = 0x02
	aclGroup         = 0x08
)

// storedACL converts an ACL from the format of getxattr(2) (version 2, eight bytes per entry) to
// ext4's (version 1, four bytes for an entry without an ID).
func storedACL(raw string) (string, error) {
	if len(raw) < 4 || len(raw)%8 != 4 || le.Uint32([]byte(raw)) != aclRawVersion {
		return "", fmt.Errorf("%d bytes that are not a POSIX ACL of version 2", len(raw))
	}
	out := le.AppendUint32(nil, aclStoredVersion)
	for b := []byte(raw[4:]); len(b) > 0; b = b[8:] {
		tag := le.Uint16(b)
		if !slices.Contains([]uint16{1, aclUser, 4, aclGroup, 0x10, 0x20}, tag) {
			return "", fmt.Errorf("POSIX ACL with the unknown tag %#x", tag)
		}
		out = append(out, b[:4]...)
		if tag == aclUser || tag == aclGroup {
			out = append(out, b[4:8]...)
		}
	}
	return string(out), nil
}

func rawACL(stored string) (string, error) {
	b := []byte(stored)
	if len(b) < 4 || le.Uint32(b) != aclStoredVersion {
		return "", fmt.Errorf("%d bytes that are not a stored ACL", len(b))
	}
	out := le.AppendUint32(nil, aclRawVersion)
	for b = b[4:]; len(b) > 0; {
		if len(b) < 4 {
			return "", fmt.Errorf("stored ACL is truncated")
		}
		tag := le.Uint16(b)
		out = append(out, b[:4]...)
		b = b[4:]
		if tag == aclUser || tag == aclGroup {
			if len(b) < 4 {
				return "", fmt.Errorf("stored ACL is truncated")
			}
			out = append(out, b[:4]...)
			b = b[4:]
		} else {
			out = binary.LittleEndian.AppendUint32(out, ^uint32(0))
		}
	}
	return string(out), nil
}

// hash returns the hash of an attribute. Only attributes in a block have a hash.
func (x xattr) hash() uint32 {
	var h uint32
	for i := range len(x.name) {
		h = h<<5 ^ h>>27 ^ uint32(x.name[i])
	}
	for v := x.value; len(v) > 0; {
		var word [4]byte
		v = v[copy(word[:], v):]
		h = h<<16 ^ h>>16 ^ le.Uint32(word[:])
	}
	return h
}

// putXattrs encodes attributes: entries from offset first on, values backwards from the end of b.
// The stored offsets of values are relative to base.
func putXattrs(b []byte, base, first int, list []xattr, hashed bool) {
	end := len(b)
	for _, x := range list {
		p := b[first:]
		p[0] = byte(len(x.name))
		p[1] = x.index
		if len(x.value) > 0 {
			end -= pad4(len(x.value))
			le.PutUint16(p[2:], uint16(end-base))
			copy(b[end:], x.value)
		}
		le.PutUint32(p[8:], uint32(len(x.value)))
		if hashed {
			le.PutUint32(p[12:], x.hash())
		}
		copy(p[xattrEntry:], x.name)
		first += xattrEntry + pad4(len(x.name))
	}
}

// putInodeXattrs encodes the attributes in an inode. The offsets of their values are relative to
// the end of the magic number.
func putInodeXattrs(inode []byte, list []xattr) {
	if len(list) == 0 {
		return
	}
	b := inode[inodeXattrs:]
	le.PutUint32(b, xattrMagic)
	putXattrs(b[4:], 0, 0, list, false)
}

// putXattrBlock encodes a block of attributes for location at.
func putXattrBlock(b []byte, list []xattr, seed uint32, at int64) {
	le.PutUint32(b, xattrMagic)
	le.PutUint32(b[4:], 1) // references
	le.PutUint32(b[8:], 1) // blocks
	var h uint32
	for _, x := range list {
		h = h<<16 ^ h>>16 ^ x.hash()
	}
	le.PutUint32(b[12:], h)
	putXattrs(b, 0, xattrHeader, list, true)
	le.PutUint32(b[16:], checksum(blockSeed(seed, at), b))
}
