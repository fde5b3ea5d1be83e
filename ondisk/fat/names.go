package fat

import (
	"fmt"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// shortName is a name in the form of a directory entry: eight bytes and three bytes, padded with
// spaces.
type shortName [11]byte

const shortChars = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'()-@^_`{}~"

// checkName returns an error for a file name that Windows rejects, because Windows has the strictest
// rules.
func checkName(s string) error {
	switch {
	case s == "" || s == "." || s == "..":
		return fmt.Errorf("is not a file name")
	case !utf8.ValidString(s):
		return fmt.Errorf("has a name that is not UTF-8")
	case len(utf16.Encode([]rune(s))) > 255:
		return fmt.Errorf("has a name longer than 255 characters")
	case strings.HasSuffix(s, ".") || strings.HasSuffix(s, " "):
		return fmt.Errorf("has a name that ends with a dot or a space")
	}
	for _, c := range s {
		if c < ' ' || c == 0x7f || strings.ContainsRune(`"*/:<>?\|`, c) {
			return fmt.Errorf("has the character %q in its name", c)
		}
	}
	return nil
}

// foldName returns the same string for names that FAT considers equal.
func foldName(s string) string { return strings.ToLower(strings.ToUpper(s)) }

// shortNames chooses unique short names for one directory. A generated name never equals another
// file's own name, because a search for that name would find two files.
type shortNames struct {
	used map[shortName]bool
	own  map[string]bool // the files' own names, folded
	next map[string]int  // next number to try, by beginning of the name
}

// newShortNames returns shortNames for a directory's files, by folded name.
func newShortNames(files map[string]*file) *shortNames {
	own := make(map[string]bool, len(files))
	for name := range files {
		own[name] = true
	}
	return &shortNames{map[shortName]bool{}, own, map[string]int{}}
}

// take returns the short name for a file's name, and whether the entry also
// needs the long name.
func (n *shortNames) take(name string) (short shortName, long bool) {
	// The algorithm is that of fatgen103, "Generating 8.3 names".
	up := strings.ToUpper(strings.TrimLeft(name, ". "))
	base, ext := up, ""
	if i := strings.LastIndexByte(up, '.'); i >= 0 {
		base, ext = up[:i], up[i+1:]
	}
	clean := func(s string) (string, bool) {
		var b strings.Builder
		lossy := false
		for _, c := range s {
			switch {
			case c == ' ' || c == '.':
				lossy = true
			case c < 128 && strings.ContainsRune(shortChars, c):
				b.WriteRune(c)
			default:
				b.WriteByte('_')
				lossy = true
			}
		}
		return b.String(), lossy
	}
	b, lossyBase := clean(base)
	e, lossyExt := clean(ext)
	lossy := lossyBase || lossyExt || len(b) == 0 || len(b) > 8 || len(e) > 3 || up != strings.ToUpper(name)
	e = e[:min(len(e), 3)]
	fill := func(base string) shortName {
		s := shortName([]byte("           "))
		copy(s[:8], base)
		copy(s[8:], e)
		return s
	}
	if !lossy {
		if s := fill(b); !n.used[s] {
			n.used[s] = true
			return s, name != up
		}
	}
	key := b[:min(len(b), 2)] + "." + e
	for i := n.next[key] + 1; ; i++ {
		tail := fmt.Sprintf("~%d", i)
		s := fill(b[:min(len(b), 8-len(tail))] + tail)
		if !n.used[s] && !n.own[foldName(s.String())] {
			n.used[s] = true
			n.next[key] = i
			return s, true
		}
	}
}

// String returns the name in the usual form, NAME.EXT.
func (s shortName) String() string {
	base, ext := strings.TrimRight(string(s[:8]), " "), strings.TrimRight(string(s[8:]), " ")
	if ext != "" {
		return base + "." + ext
	}
	return base
}

// checksum returns the checksum that connects long name entries to their short
// one.
func (s shortName) checksum() (c byte) {
	for _, b := range s {
		c = c<<7 | c>>1
		c += b
	}
	return c
}

// charsPerEntry is the number of characters of a long name in one directory
// entry.
const charsPerEntry = 13

// longEntries returns the number of entries of a long name.
func longEntries(name string) int {
	return (len(utf16.Encode([]rune(name))) + charsPerEntry - 1) / charsPerEntry
}

// longOffsets are the offsets of the 13 characters in a long name entry.
var longOffsets = [charsPerEntry]int{1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30}

// putLong encodes the entries of a long name, last part first as the format
// requires, and returns their size in bytes.
func putLong(b []byte, name string, sum byte) int {
	u := utf16.Encode([]rune(name))
	n := longEntries(name)
	for i := range n {
		part := n - i // counted from 1
		e := b[i*entrySize:]
		e[0] = byte(part)
		if i == 0 {
			e[0] |= 0x40
		}
		e[11], e[13] = attrLongName, sum
		for j, at := range longOffsets {
			c := uint16(0xffff)
			switch x := (part-1)*charsPerEntry + j; {
			case x < len(u):
				c = u[x]
			case x == len(u):
				c = 0
			}
			le.PutUint16(e[at:], c)
		}
	}
	return n * entrySize
}
