package images

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// checkXattr reports whether an entry keeps an extended attribute from its layer. containerd sets
// each with lsetxattr(2). It ignores unknown namespaces, and fails if the kernel rejects the value.
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
		// With trusted.*, a layer could control overlayfs. The remaining namespaces belong to other
		// systems.
		return false, nil
	case rest == "":
		return false, errors.New("there is no name after the namespace")
	case name == xattrCaps:
		return true, tree.CheckCapability(name, value)
	case namespace == "user":
		return e.IsRegular() || e.IsDir(), nil // the kernel does not allow user attributes on other types
	}
	return true, nil
}

// Tags of the entries of an ACL: see acl(5).
const (
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20
)

// checkACL checks an ACL as the kernel does (posix_acl_from_xattr, posix_acl_valid).
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
		return false, nil // unknown version, which the kernel ignores
	case len(b)%8 != 4:
		return false, fmt.Errorf("the value of %d bytes is not a POSIX ACL", len(b))
	case len(b) == 4:
		return false, nil
	case name == xattrDefault && !e.IsDir():
		return false, errors.New("only a directory can have a default ACL")
	}
	return true, validACL(b[4:])
}

// validACL checks the entries of an ACL and their order: owner, users, group, groups, mask, others.
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

// aclWithMode gives an ACL the permissions of a mode, as chmod(2) does; containerd calls chmod
// last. If the ACL has a mask, the group's permissions change the mask.
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
