package slot

import (
	"errors"
	"fmt"
	"io"

	"github.com/edgebake/edgebake/ondisk/fat"
)

// CopyFile copies the file name from the FAT file system on dev to w.
func CopyFile(dev io.ReaderAt, name string, w io.Writer) error {
	r, err := fat.Open(dev)
	if err != nil {
		return err
	}
	extents, err := r.Extents(name)
	if err != nil {
		return err
	}
	for _, x := range extents {
		if n, err := io.Copy(w, io.NewSectionReader(dev, x.Off, x.Len)); err != nil || n != x.Len {
			return errors.Join(fmt.Errorf("copying %s: %d of %d bytes were read", name, n, x.Len), err)
		}
	}
	return nil
}
