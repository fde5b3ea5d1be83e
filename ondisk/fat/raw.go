package fat

import "strings"

// Names is a directory entry with both of its names. Operating systems use the long name; firmware
// can also open files by the short name.
type Names struct {
	Entry
	// Long is the name that the reader uses, as it is stored on the disk.
	Long string
	// Short is the 8.3 name in capitals.
	Short string
	// Odd is the reason why the reader ignores the entry, or why other readers may interpret it
	// differently. It is "" if there is no such reason.
	Odd string
}

const (
	oddPart   = "a part of a long name that belongs to no file"
	oddName   = "an invalid file name"
	oddVolume = "a volume label that is a directory, not the only one, or not in the top directory"
	oddDot    = "an entry . or .. in the wrong place"
	oddTwice  = "a name that another entry also has"
)

// EachNames calls fn for every used entry in d, in their order on the disk, until fn returns false.
// It skips only the volume label, "." and "..", so it shows everything that any reader could find.
func (r *Reader) EachNames(d Entry, fn func(Names) bool) error {
	top := d.Path == "."
	labels, at := 0, 0 // at counts entries
	taken := map[string]bool{}
	s := &scanner{r: r, dir: d}
	s.odd = func(name, what string) bool {
		if what == oddName && !top && at == 1 && name == ".." {
			at++
			return true
		}
		return fn(Names{Long: name, Odd: what})
	}
	s.fn = func(raw []byte, e Entry) bool {
		at++
		n := Names{Entry: e, Long: s.name, Short: decodeShort(append(append([]byte{}, raw[:12]...), 0))}
		long, short := foldName(s.name), foldName(n.Short)
		switch {
		case raw[11]&attrVolume != 0:
			if labels++; top && labels == 1 && raw[11]&attrDirectory == 0 {
				return true
			}
			n.Odd = oddVolume
		case raw[0] == '.' || long == "." || long == "..":
			if !top && at == 1 && long == "." && long == short && e.Dir {
				return true
			}
			n.Odd = oddDot
		case taken[long] || taken[short]:
			n.Odd = oddTwice
		case strings.ContainsAny(n.Short, "/\\\x00"):
			n.Odd = oddName
		}
		taken[long], taken[short] = true, true
		return fn(n)
	}
	return r.eachOfDir(d, s.run)
}
