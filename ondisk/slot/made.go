package slot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// No digest covers the slot, and firmware may interpret it differently: it may open files by their
// short names, find partition tables inside partitions, or use the other copy of the allocation
// table. Therefore a signed image's slot must be byte for byte what this package writes for the
// same files.

// Remake returns a new slot with those files in r that belong in a slot. It returns the same bytes
// for a slot written by Make, Scrub or WriteReport.
func Remake(r io.ReaderAt) ([]byte, error) {
	b, err := remake(r)
	if err != nil {
		return nil, readError(err)
	}
	return b, nil
}

func remake(r io.ReaderAt) ([]byte, error) {
	in, err := open(r)
	if err != nil {
		return nil, err
	}
	in.withSystemFiles = true
	top, err := in.list(in.fat.Top())
	if err != nil {
		return nil, err
	}
	// Older versions of edgebake formatted the slots of 4Kn disks as FAT16.
	o := fat.Options{Type: in.fat.Type(), Label: ondisk.LabelSlot, Size: ondisk.SlotSize}
	for _, e := range top {
		name := strings.ToLower(e.Name())
		limit, read := SizeLimit(name), in.readOwn
		switch name {
		case ondisk.SlotMeta:
			limit, o.Time = maxInfo, e.MTime
		case ondisk.SlotReportText:
			limit = ReportTextSize
		case ondisk.SlotReportJSON:
			limit = ReportJSONSize
		case ondisk.SlotSignature:
			limit = maxSignature
		case ondisk.SlotClaims:
			limit = maxClaims * claimSize
		default:
			read = in.read
		}
		_, twice := in.files[name]
		switch {
		case !inContract(e):
		case twice:
			err = fmt.Errorf("%s exists twice", name)
		case e.Dir:
			err = in.dir(e, name)
		default:
			in.files[name], err = read(e, limit)
		}
		if err != nil {
			return nil, err
		}
	}
	head := make([]byte, 64)
	if _, err := r.ReadAt(head, 0); err != nil {
		return nil, err
	}
	o.SectorSize = int64(binary.LittleEndian.Uint16(head[11:]))
	o.VolumeID = binary.LittleEndian.Uint32(head[39:])
	var nodes []tree.Node
	for _, name := range slices.Sorted(maps.Keys(in.files)) {
		nodes = append(nodes, node(name, in.files[name]))
	}
	img := new(image)
	if err := fat.Write(img, nodes, nil, o); err != nil {
		return nil, err
	}
	out := make([]byte, ondisk.SlotSize)
	copy(out, img.b)
	return out, nil
}

// errOtherProgram means that a slot was not written by this package.
var errOtherProgram = errors.New("another program has changed the slot, which no signature covers: stamp the image again, or write it with edgebake flash")

// AsMade returns an error unless a slot is byte for byte as edgebake would write it.
func AsMade(r io.ReaderAt) error {
	want, err := Remake(r)
	if err != nil {
		return err
	}
	have := make([]byte, ondisk.SlotSize)
	if _, err := io.ReadFull(io.NewSectionReader(r, 0, ondisk.SlotSize), have); err != nil {
		return readError(err)
	}
	if !bytes.Equal(have, want) {
		return errOtherProgram
	}
	return nil
}
