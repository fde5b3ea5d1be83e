package media

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// SlotExtension is the extension of a slot file: a file system of 16 MiB with one Site, for the
// partition EDGEBAKE of a disk or for a USB stick.
const SlotExtension = ".slot"

// Slot returns the slot that stamping would write for a Site or an Inventory (ondisk.SlotSize
// bytes). It rejects a Site that the image does not support.
func (m *Image) Slot(s Site, o StampOptions) ([]byte, error) {
	c, err := m.slotOf(s, o)
	if err != nil {
		return nil, m.stamping(err)
	}
	return slot.Make(c)
}

// Named is a Site with the base name of its output.
type Named struct {
	Name string
	Site
}

// ManyOptions configures StampMany.
type ManyOptions struct {
	StampOptions
	// Source is the Inventory that contains the Sites.
	Source SiteSource
	// Slots means that only slots are written, instead of copies of the image.
	Slots bool
}

// maxShown and maxExist limit the Sites and the existing files that errors of StampMany list.
const (
	maxShown = 20
	maxExist = 3
)

// StampMany writes one output for each Site: a stamped copy of the image, DIR/NAME.raw or .raw.zst,
// or only the slot, DIR/NAME.slot. It checks all Sites before it writes anything.
func StampMany(ctx context.Context, path string, sites []Named, dir string, o ManyOptions) ([]string, error) {
	m, err := openLocked(path, os.O_RDONLY, false)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	ending := SlotExtension
	if !o.Slots {
		ending = "." + m.format
	}
	outputs := make([]string, len(sites))
	var errs, exist []error
	probs := make([]configs.Problems, len(sites))
	for i, s := range sites {
		outputs[i] = filepath.Join(dir, s.Name+ending)
		var err error
		if probs[i], err = m.serves(s.Site); err != nil {
			errs = append(errs, fmt.Errorf("Site %s: %w", s.Name, err))
		} else if file.Same(path, outputs[i]) {
			errs = append(errs, fmt.Errorf("Site %s: %w: choose another directory", s.Name, errIsImage(outputs[i])))
		} else if _, err := os.Lstat(outputs[i]); err == nil && !o.Force {
			exist = append(exist, fmt.Errorf("Site %s: %s exists: choose another directory, or --force to replace it", s.Name, outputs[i]))
		}
	}
	if n := len(exist); n > maxExist {
		exist = []error{fmt.Errorf("directory %s already has the files of %d of the %d Sites: choose another directory, or --force to replace them", dir, n, len(sites))}
	}
	errs = append(errs, exist...)
	if n := len(errs); n > maxShown {
		errs = append(errs[:maxShown], fmt.Errorf("and %s cannot be stamped", configs.Count(n-maxShown, "more Site")))
	}
	bad := o.Source.inventory(probs)
	if n := len(bad); n > maxShown {
		bad = append(bad[:maxShown], configs.Problem{File: o.Source.Name, Msg: configs.Count(n-maxShown, "more problem")})
	}
	if len(bad) > 0 {
		errs = append(errs, bad)
	}
	if len(errs) > 0 {
		return nil, m.stamping(errors.Join(errs...))
	}
	if err := m.spaceForAll(sites, outputs, o); err != nil {
		return nil, m.stamping(err)
	}
	undo, err := file.MakeDirectory(dir)
	if err != nil {
		return nil, m.stamping(err)
	}
	defer undo()
	var mu sync.Mutex
	var complete []string
	err = disk.Parallel(ctx, len(sites), func() func(int) error {
		return func(i int) error {
			if err := m.stampOne(ctx, sites[i], outputs[i], o); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			complete = append(complete, outputs[i])
			return nil
		}
	})
	if err != nil {
		return complete, fmt.Errorf("%w (%d of %d are complete)", err, len(complete), len(sites))
	}
	return outputs, nil
}

// spaceForAll returns an error if the outputs of StampMany do not fit on the disk. It assumes that
// every slot file needs as much space as the first one.
func (m *Image) spaceForAll(sites []Named, outputs []string, o ManyOptions) error {
	var copies error
	if !o.Slots {
		if copies = m.spaceForCopies(outputs, false); copies == nil {
			return nil
		}
	}
	_, img, err := m.encodeSlot(sites[0].Site, o.StampOptions)
	if err != nil {
		return fmt.Errorf("Site %s: %w", sites[0].Name, err)
	}
	var each int64
	for b := range slices.Chunk(img, disk.SparseBlock) {
		if !seekable.IsZero(b) {
			each += disk.SparseBlock
		}
	}
	if copies != nil {
		return fmt.Errorf("%w; or write only the slots, %s in total: --slots instead of --each (edgebake stamp DISK --slot FILE writes one to a disk)",
			copies, bytesize.Human(each*int64(len(sites))))
	}
	return checkSpace(outputs, each, "slot")
}

// stampOne writes the output for one Site.
func (m *Image) stampOne(ctx context.Context, s Named, output string, o ManyOptions) error {
	_, img, err := m.encodeSlot(s.Site, o.StampOptions)
	if err != nil {
		return fmt.Errorf("stamping Site %s: %w", s.Name, err)
	}
	if o.Slots {
		return writeSlotFile(output, img, o.Force)
	}
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		return fmt.Errorf("stamping Site %s: %w", s.Name, err)
	}
	one := o.StampOptions
	one.Output = output
	return m.stampCopy(ctx, p, img, one)
}

// writeSlotFile writes a slot as a sparse file. Only its owner may read it, since it contains
// secrets.
func writeSlotFile(path string, img []byte, force bool) error {
	out, err := file.Create(path, 0o600, force)
	if err != nil {
		return err
	}
	defer out.Discard()
	if err := writeSparse(out.File, img); err != nil {
		return fmt.Errorf("writing %s: %w", path, file.Explain(err, filepath.Dir(path)))
	}
	return out.Commit()
}

func writeSparse(f *os.File, img []byte) error {
	if err := f.Truncate(ondisk.SlotSize); err != nil {
		return err
	}
	return disk.WriteSparse(f, img, 0)
}

// ReadSlotFile reads a slot file. It is an error if the slot has no Site.
func ReadSlotFile(path string) (*slot.Contents, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: edgebake stamp --slots makes slots", err)
	}
	if err != nil {
		return nil, fmt.Errorf("opening the slot: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err == nil && st.Mode().IsRegular() && st.Size() != ondisk.SlotSize {
		err = fmt.Errorf("the file has %d bytes, but a slot has %d: name a file that edgebake stamp --slots made", st.Size(), ondisk.SlotSize)
	}
	if err != nil {
		return nil, fmt.Errorf("reading slot %s: %w", path, err)
	}
	c, err := slot.Read(f)
	if err != nil {
		return nil, fmt.Errorf("reading slot %s: %w", path, err)
	}
	return c, nil
}

// Each returns the Sites of an Inventory as separate Sites with their names.
func (s *Site) Each() []Named {
	var out []Named
	spread := configs.DefaultSpread(len(s.Inventory.Sites))
	for i := range s.Inventory.Sites {
		one := &s.Inventory.Sites[i]
		out = append(out, Named{Name: one.Name, Site: Site{Doc: &one.Site, Files: s.Files, DefaultSpread: spread}})
	}
	return out
}
