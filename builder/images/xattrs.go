package images

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// checkXattr reports whether an entry keeps an extended attribute of its layer. containerd sets
// each with lsetxattr(2): it ignores unknown namespaces, and fails if the kernel rejects a value.
func (e *entry) checkXattr(name, value string) (keep bool, err error) {
	if name == "" || len(name) > maxName || strings.ContainsRune(name, 0) {
		return false, fmt.Errorf("the name has %d bytes: want 1 to %d, and no zero byte", len(name), maxName)
	}
	if len(value) > maxXattr {
		return false, fmt.Errorf("the value has %d bytes, more than the %d that Linux allows", len(value), maxXattr)
	}
	namespace, rest, _ := strings.Cut(name, ".")
	switch {
	case name == xattrACL || name == xattrDefault:
		return e.checkACL(name, value)
	case namespace != "user" && namespace != "security":
		// A layer could control overlayfs with trusted.*; the remaining namespaces belong to other
		// systems.
		return false, nil
	case rest == "":
		return false, errors.New("there is no name after the namespace")
	case name == xattrCaps:
		return true, tree.CheckCapability(name, value)
	case namespace == "user":
		return e.IsRegular() || e.IsDir(), nil // other types cannot have user attributes
	}
	return true, nil
}

// Tags of an ACL's entries, see acl(5).
const (
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20
)

// checkACL checks an ACL like the kernel (posix_acl_from_xattr, posix_acl_valid).
func (e *entry) checkACL(name, value string) (keep bool, err error) {
	b := []byte(value)
	switch {
	case e.IsSymlink():
		return false, nil // a symbolic link has no permissions
	case len(b) == 0:
		return false, nil
	case len(b) < 4:
		return false, fmt.Errorf("the value of %d bytes is not a POSIX ACL", len(b))
	case binary.LittleEndian.Uint32(b) != 2:
		return false, nil // another version: the kernel ignores it like an unknown namespace
	case len(b)%8 != 4:
		return false, fmt.Errorf("the value of %d bytes is not a POSIX ACL", len(b))
	case len(b) == 4:
		return false, nil
	case name == xattrDefault && !e.IsDir():
		return false, errors.New("only a directory can have a default ACL")
	}
	return true, validACL(b[4:])
}

// validACL checks the order of the entries: the owner, users, the group,
// groups, the mask, others.
func validACL(b []byte) error {
	last, named, mask := uint16(0), false, false
	seen := map[uint16]bool{}
	for ; len(b) > 0; b = b[8:] {
		tag, perm, id := binary.LittleEndian.Uint16(b), binary.LittleEndian.Uint16(b[2:]), binary.LittleEndian.Uint32(b[4:])
		many := tag == aclUser || tag == aclGroup
		switch {
		case !slices.Contains([]uint16{aclUserObj, aclUser, aclGroupObj, aclGroup, aclMask, aclOther}, tag):
			return fmt.Errorf("the ACL has an entry with the unknown tag %#x", tag)
		case perm&^7 != 0:
			return fmt.Errorf("the ACL has an entry with the permissions %#o", perm)
		case tag < last || tag == last && !many:
			return errors.New("the entries of the ACL are out of order")
		case many && id == noOwner:
			return errors.New("the ACL has an entry without a user or group")
		}
		last, named, mask = tag, named || many, mask || tag == aclMask
		seen[tag] = true
	}
	if !seen[aclUserObj] || !seen[aclGroupObj] || !seen[aclOther] || named && !mask {
		return errors.New("the ACL is incomplete")
	}
	return nil
}

// aclWithMode gives an ACL the permissions of a mode, as chmod(2) does, which containerd calls
// last. If there is a mask, the group's permissions go into it.
func aclWithMode(acl string, perm uint32) string {
	b := []byte(acl)
	hasMask := false
	for at := 4; at+8 <= len(b); at += 8 {
		hasMask = hasMask || binary.LittleEndian.Uint16(b[at:]) == aclMask
	}
	for at := 4; at+8 <= len(b); at += 8 {
		tag := binary.LittleEndian.Uint16(b[at:])
		shift := -1
		switch {
		case tag == aclUserObj:
			shift = 6
		case tag == aclMask, tag == aclGroupObj && !hasMask:
			shift = 3
		case tag == aclOther:
			shift = 0
		}
		if shift >= 0 {
			binary.LittleEndian.PutUint16(b[at+2:], uint16(perm>>shift&7))
		}
	}
	return string(b)
}
