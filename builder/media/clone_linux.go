package media

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/ondisk/file"
)

// lock locks the image until the file is closed. Readers share the lock. If another program holds
// it, the error advises to try again.
func lock(f *os.File, exclusive bool) error {
	err := file.Lock(f, exclusive)
	if errors.Is(err, file.ErrLocked) {
		return fmt.Errorf("%w because it is stamping or reading the image: try again", err)
	}
	return err
}

// isHole reports whether the n bytes at off are known to be a hole. It returns false for bytes
// after the end of the file.
func isHole(f *os.File, off, n int64) bool {
	at, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) { // no data from off on
		at, err = unix.Seek(int(f.Fd()), 0, unix.SEEK_END)
	}
	return err == nil && at >= off+n
}

// allocate reserves space for n bytes at off without changing them. If the file system does not
// support this, allocate does nothing, and a later write reports a full disk.
func allocate(f *os.File, off, n int64) error {
	err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, off, n)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("reserving space for the slot: %w", err)
	}
	return nil
}

// clone makes dst a copy of src, which must have at least size bytes. It shares blocks if the file
// system can, and otherwise copies everything except holes.
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
	// The missing end of a truncated file would look like a hole.
	return checkLength(src, size)
}

func copySparse(ctx context.Context, dst, src *os.File, size int64) error {
	if err := dst.Truncate(size); err != nil {
		return err
	}
	for off := int64(0); off < size; {
		data, err := unix.Seek(int(src.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // only a hole follows
		}
		end := size
		if err != nil {
			data = off // the file system does not report holes
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

// sharesBlocks reports whether a copy of src in the directory dir would share its blocks.
func sharesBlocks(src *os.File, dir string) bool {
	f, err := os.CreateTemp(dir, ".edgebake-*")
	if err != nil {
		return false
	}
	defer os.Remove(f.Name())
	defer f.Close()
	return unix.IoctlFileClone(int(f.Fd()), int(src.Fd())) == nil
}

// step is the number of bytes copied between two checks of the context.
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
			// Some file systems, old kernels and devices do not support this: copy by reading and
			// writing, which also returns any other error.
			inKernel = false
		}
		if err := copyRange(dst, src, off, part); err != nil {
			return err
		}
		off, n = off+part, n-part
	}
	return nil
}
