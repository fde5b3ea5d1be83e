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

// All copies of an image have the GUIDs that were built into it. A disk that
// was flashed has its own: a random one, and for each partition one that
// follows from it. The boot entries on the ESP (for boards without UEFI the
// kernel's command line there), which alone name partitions
// (docs/decisions/0014), are changed with them, in place, since a GUID is as
// long as another. The golden digest is that of the entries as they were
// built; what was built is known from image.json, so both ways lead back.

// edit replaces bytes of the disk by as many others.
type edit struct {
	off int64
	b   []byte
	was []byte // nil: whatever was there
}

// overlap returns the part of an edit that falls into b, the bytes of the disk
// at off: those bytes, and where it begins and ends in the edit.
func (e edit) overlap(b []byte, off int64) (in []byte, from, to int64) {
	begin, end := max(e.off, off), min(e.off+int64(len(e.b)), off+int64(len(b)))
	if begin >= end {
		return nil, 0, 0
	}
	return b[begin-off : end-off], begin - e.off, end - e.off
}

// apply carries out what falls into b, the bytes of the disk at off, and
// reports whether anything did.
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

// undone is the edits that take edits back.
func undone(edits []edit) []edit {
	out := make([]edit, len(edits))
	for i, e := range edits {
		out[i] = edit{off: e.off, b: e.was, was: e.b}
	}
	return out
}

// replaces reports whether b, the bytes of the disk at off, has what the edits
// are to replace there.
func replaces(edits []edit, b []byte, off int64) bool {
	for _, e := range edits {
		if in, from, to := e.overlap(b, off); in != nil && !bytes.Equal(in, e.was[from:to]) {
			return false
		}
	}
	return true
}

// builtGUID is the GUID that a partition was built with.
func (m *image) builtGUID(label string) string {
	for _, p := range m.info.Partitions {
		if p.Label == label {
			return p.GUID
		}
	}
	return ""
}

// ownGUIDs reports whether the disk has GUIDs of its own.
func (m *image) ownGUIDs() bool {
	for _, p := range m.table.Partitions {
		if p.GUID != disk.PartitionGUID(m.table.GUID, p.Name) {
			return false
		}
	}
	return len(m.table.Partitions) > 0
}

// asBuilt makes whoever reads the disk see the boot entries as they were built.
func (m *image) asBuilt() error {
	if !m.ownGUIDs() {
		return nil
	}
	built := map[string]string{}
	for _, p := range m.table.Partitions {
		built[p.GUID] = m.builtGUID(p.Name)
	}
	edits, _, err := m.rename(built)
	m.edits = edits
	return err
}

const entriesDir = "loader/entries"

// rename finds where the boot entries name one of the GUIDs, and says what to
// write there. named: the entry of the system on ROOT-A names its root so.
func (m *image) rename(guids map[string]string) (edits []edit, named bool, err error) {
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
		for from, to := range guids {
			if len(from) != len(to) || to == "" {
				return nil, false, errors.New(ondisk.ESPImageInfo + " names no GUID for one of its partitions: the image is damaged, copy or build it again")
			}
			for at := 0; ; at++ {
				i := strings.Index(string(text[at:]), from)
				if i < 0 {
					break
				}
				at += i
				edits = append(edits, place(extents, esp.Start, int64(at), from, to)...)
				named = named || from == root || to == root
			}
		}
	}
	return edits, named, nil
}

// bootEntries are the files that name partitions: systemd-boot's, and the command
// line of each system where a board's own firmware reads it. None: another boot
// chain.
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

// place says where on the disk the bytes at an offset of a file are, which
// become text.
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
