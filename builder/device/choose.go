package device

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Chosen is the disk, or the file used as one, to which an image will be written.
type Chosen struct {
	Path string // as the person wrote it
	Disk *Disk
	Out  *Target // nil if the disk must not be overwritten
}

// Choose finds a disk or file and opens it. If it must not be overwritten, Choose does not open it,
// and the result contains the reasons.
func Choose(ctx context.Context, path string) (*Chosen, error) {
	d, err := find(ctx, path)
	if err != nil {
		return nil, fmt.Errorf("flashing %s: %w", path, err)
	}
	c := &Chosen{Path: path, Disk: d}
	var errs []error
	for _, r := range d.Refusals {
		errs = append(errs, fmt.Errorf("flashing %s: %s", d, r))
	}
	if len(errs) > 0 { // opening it would only report the same reasons
		return c, errors.Join(errs...)
	}
	out, err := Open(d.Path)
	if err != nil {
		return c, fmt.Errorf("flashing %s: %w", d, err)
	}
	if isFile := d.Sector == 0; out.IsFile() != isFile {
		err = ErrChanged // the path was checked as a file but is now a disk, or the reverse
	} else {
		d.Size, d.Sector = out.Size, out.Sector
		err = out.stillIs(ctx, d)
	}
	if err != nil {
		out.Close()
		return c, fmt.Errorf("flashing %s: %w", d, err)
	}
	c.Out = out
	return c, nil
}

// Close closes the disk if it was opened.
func (c *Chosen) Close() {
	if c.Out != nil {
		c.Out.Close()
	}
}

func find(ctx context.Context, path string) (*Disk, error) {
	isFile, err := IsFile(path)
	if err != nil {
		return nil, err
	}
	if isFile {
		fi, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		return &Disk{Path: path, Size: fi.Size()}, nil
	}
	found, err := List(ctx)
	if err != nil {
		return nil, err
	}
	return found.Find(path)
}

// stillIs checks that the opened disk is the listed one: between listing and opening, another disk
// may have been plugged in. An open disk cannot be replaced.
func (t *Target) stillIs(ctx context.Context, d *Disk) error {
	if t.IsFile() {
		return nil
	}
	found, err := List(ctx)
	if err != nil {
		return err
	}
	now, err := found.Find(d.Path)
	if err != nil {
		return err
	}
	if !d.Same(now) {
		return fmt.Errorf("the disk is now %s: %w", now, ErrChanged)
	}
	return Users("/proc", d.Path)
}
