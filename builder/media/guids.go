package media

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
)

// A flashed disk has its own GUIDs, so flashing edits the boot entries on the ESP, the only files
// that refer to partitions by GUID (docs/decisions/0019). The golden digest covers the entries as
// built; image.json has the GUIDs to revert the edits.

// edit replaces bytes at an offset of the disk or file with other bytes of the same length.
type edit struct {
	off int64
	b   []byte
	was []byte // the old bytes, or nil if they do not matter
}

// overlap returns the part of b that the edit replaces, and the corresponding range of e.b. b
// contains the bytes at off.
func (e edit) overlap(b []byte, off int64) (in []byte, from, to int64) {
	begin, end := max(e.off, off), min(e.off+int64(len(e.b)), off+int64(len(b)))
	if begin >= end {
		return nil, 0, 0
	}
	return b[begin-off : end-off], begin - e.off, end - e.off
}

// apply applies the edits to b, which contains the bytes at off. It reports whether b overlaps an
// edit.
func apply(edits []edit, b []byte, off int64) bool {
	did := false
	for _, e := range edits {
		if in, from, to := e.overlap(b, off); in != nil {
			copy(in, e.b[from:to])
			did = true
		}
	}
	return did
}

// undone returns the inverse edits.
func undone(edits []edit) []edit {
	out := make([]edit, len(edits))
	for i, e := range edits {
		out[i] = edit{off: e.off, b: e.was, was: e.b}
	}
	return out
}

// replaces reports whether b, which contains the bytes at off, still has the old bytes wherever an
// edit overlaps b.
func replaces(edits []edit, b []byte, off int64) bool {
	for _, e := range edits {
		if in, from, to := e.overlap(b, off); in != nil && !bytes.Equal(in, e.was[from:to]) {
			return false
		}
	}
	return true
}

// builtGUID returns the GUID that the build gave a partition.
func (m *Image) builtGUID(label string) string {
	for _, p := range m.info.Partitions {
		if p.Label == label {
			return p.GUID
		}
	}
	return ""
}

// ownGUIDs reports whether the disk has its own GUIDs instead of the image's.
func (m *Image) ownGUIDs() bool {
	for _, p := range m.table.Partitions {
		if p.GUID != disk.PartitionGUID(m.table.GUID, p.Name) {
			return false
		}
	}
	return len(m.table.Partitions) > 0
}

// asBuilt makes later reads return the boot entries as they were built.
func (m *Image) asBuilt() error {
	if !m.ownGUIDs() {
		return nil
	}
	var built []guidChange
	for _, p := range m.table.Partitions {
		built = append(built, guidChange{p.Name, p.GUID, m.builtGUID(p.Name)})
	}
	edits, _, err := m.rename(built)
	m.edits = edits
	return err
}

const entriesDir = "loader/entries"

// guidChange replaces the GUID of a partition.
type guidChange struct{ partition, from, to string }

// rename returns the edits that replace GUIDs in the boot entries. named reports whether an entry
// names ROOT-A by GUID.
func (m *Image) rename(changes []guidChange) (edits []edit, named bool, err error) {
	esp, err := m.partition(ondisk.LabelESP)
	if err != nil {
		return nil, false, err
	}
	fsys, err := m.esp()
	if err != nil {
		return nil, false, err
	}
	root := m.builtGUID(ondisk.LabelRootA)
	names, err := bootEntries(fsys)
	if err != nil {
		return nil, false, err
	}
	for _, name := range names {
		text, err := m.espFile(name)
		if err != nil {
			return nil, false, fmt.Errorf("reading %s: %w", name, err)
		}
		extents, err := fsys.Extents(name)
		if err != nil {
			return nil, false, fmt.Errorf("reading %s: %w", name, err)
		}
		for _, c := range changes {
			if len(c.from) != len(c.to) || c.to == "" {
				return nil, false, fmt.Errorf("%s has no valid GUID for partition %s: the image is damaged, copy or build it again", ondisk.ESPImageInfo, c.partition)
			}
			for at := 0; ; at++ {
				i := strings.Index(string(text[at:]), c.from)
				if i < 0 {
					break
				}
				at += i
				edits = append(edits, place(extents, esp.Start, int64(at), c.from, c.to)...)
				named = named || c.from == root || c.to == root
			}
		}
	}
	return edits, named, nil
}

// bootEntries returns the names of the ESP's files that name partitions: entries of systemd-boot,
// or the kernel command lines for boards with their own firmware. With other boot loaders, there
// are none.
func bootEntries(esp *fat.Reader) ([]string, error) {
	var names []string
	entries, err := esp.ReadDir(entriesDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading %s: %w", entriesDir, err)
	}
	for _, e := range entries {
		if !e.Dir {
			names = append(names, path.Join(entriesDir, e.Name()))
		}
	}
	dir := path.Dir(ondisk.ESPImageInfo)
	systems, err := esp.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading %s: %w", dir, err)
	}
	for _, s := range systems {
		if !s.Dir {
			continue
		}
		name := path.Join(dir, s.Name(), ondisk.ESPPiCommandLine)
		if _, err := esp.Stat(name); err == nil {
			names = append(names, name)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("reading %s: %w", name, err)
		}
	}
	return names, nil
}

// place returns the edits that replace the bytes was, at offset at of a file, with text. extents
// are the file's extents in the file system that starts at start.
func place(extents []fat.Extent, start, at int64, was, text string) (out []edit) {
	for _, x := range extents {
		if at >= x.Len {
			at -= x.Len
			continue
		}
		n := min(x.Len-at, int64(len(text)))
		out = append(out, edit{start + x.Off + at, []byte(text[:n]), []byte(was[:n])})
		if was, text = was[n:], text[n:]; text == "" {
			break
		}
		at = 0
	}
	return out
}
