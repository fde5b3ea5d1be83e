package media

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/fat"
)

// All copies of an image have the GUIDs that were built into it. A disk that
// was flashed has its own: a random one, and for each partition one that
// follows from it. The boot entries on the ESP, which alone name partitions
// (docs/decisions/0014), are changed with them, in place, since a GUID is as
// long as another. The golden digest is that of the entries as they were
// built; what was built is known from image.json, so both ways lead back.

// edit replaces bytes of the disk.
type edit struct {
	off int64
	b   []byte
}

// apply carries out what falls into b, the bytes of the disk at off, and
// reports whether anything did.
func apply(edits []edit, b []byte, off int64) bool {
	did := false
	for _, e := range edits {
		from, to := max(e.off, off), min(e.off+int64(len(e.b)), off+int64(len(b)))
		if from < to {
			copy(b[from-off:to-off], e.b[from-e.off:])
			did = true
		}
	}
	return did
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
	entries, err := fsys.ReadDir(entriesDir)
	if err != nil {
		return nil, false, nil // another boot chain
	}
	root := m.builtGUID(ondisk.LabelRootA)
	for _, e := range entries {
		if e.Dir {
			continue
		}
		name := path.Join(entriesDir, e.Name())
		text, err := fsys.ReadFile(name)
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
				edits = append(edits, place(extents, esp.Start, int64(at), to)...)
				named = named || from == root || to == root
			}
		}
	}
	return edits, named, nil
}

// place says where on the disk the bytes at an offset of a file are.
func place(extents []fat.Extent, start, at int64, text string) (out []edit) {
	for _, x := range extents {
		if at >= x.Len {
			at -= x.Len
			continue
		}
		n := min(x.Len-at, int64(len(text)))
		out = append(out, edit{start + x.Off + at, []byte(text[:n])})
		if text = text[n:]; text == "" {
			break
		}
		at = 0
	}
	return out
}
