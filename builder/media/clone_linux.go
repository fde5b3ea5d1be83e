package media

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/ondisk/file"
)

// lock takes the image for as long as the file is open. Those that only read
// it share it. The error says what to do.
func lock(f *os.File, exclusive bool) error {
	err := file.Lock(f, exclusive)
	if errors.Is(err, file.ErrLocked) {
		return fmt.Errorf("another program is stamping it: try again (%w)", err)
	}
	return err
}

// isHole reports whether n bytes at off are known to be a hole. What is beyond the
// end, of a file that has become shorter too, is not a hole.
func isHole(f *os.File, off, n int64) bool {
	at, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) { // no data from there on
		at, err = unix.Seek(int(f.Fd()), 0, unix.SEEK_END)
	}
	return err == nil && at >= off+n
}

// allocate takes room for n bytes at off, which keep what they are. Where the
// file system cannot, writing finds out.
func allocate(f *os.File, off, n int64) error {
	err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, off, n)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("taking room for the slot: %w", err)
	}
	return nil
}

// clone makes dst a copy of src, of which size bytes are known: sharing its blocks
// where the file system can do that, else by copying what is not a hole.
func clone(ctx context.Context, dst, src *os.File, size int64) error {
	if unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) == nil {
		fi, err := dst.Stat()
		if err == nil && fi.Size() < size {
			err = shorter(src, size)
		}
		return err
	}
	if err := copySparse(ctx, dst, src, size); err != nil {
		return err
	}
	// Beyond the end of a file that was cut off there seems to be a hole.
	return checkLength(src, size)
}

func copySparse(ctx context.Context, dst, src *os.File, size int64) error {
	if err := dst.Truncate(size); err != nil {
		return err
	}
	for off := int64(0); off < size; {
		data, err := unix.Seek(int(src.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // only a hole is left
		}
		end := size
		if err != nil {
			data = off // no holes are known here
		} else if end, err = unix.Seek(int(src.Fd()), data, unix.SEEK_HOLE); err != nil {
			return err
		}
		if err := copyData(ctx, dst, src, data, min(end, size)-data); err != nil {
			return err
		}
		off = end
	}
	return nil
}

// sharesBlocks reports whether a copy of src in dir shares its blocks.
func sharesBlocks(src *os.File, dir string) bool {
	f, err := os.CreateTemp(dir, ".edgebake-*")
	if err != nil {
		return false
	}
	defer os.Remove(f.Name())
	defer f.Close()
	return unix.IoctlFileClone(int(f.Fd()), int(src.Fd())) == nil
}

// step is how much is copied between two looks at the context.
const step = 64 << 20

func copyData(ctx context.Context, dst, src *os.File, off, n int64) error {
	inKernel := true
	for n > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		part := min(n, step)
		if inKernel {
			in, out := off, off
			done, err := unix.CopyFileRange(int(src.Fd()), &in, int(dst.Fd()), &out, int(part), 0)
			if err == nil && done > 0 {
				off, n = off+int64(done), n-int64(done)
				continue
			}
			// Other file systems, old kernels, devices: the plain way, which
			// also meets whatever real error there is.
			inKernel = false
		}
		if err := copyRange(dst, src, off, part); err != nil {
			return err
		}
		off, n = off+part, n-part
	}
	return nil
}
