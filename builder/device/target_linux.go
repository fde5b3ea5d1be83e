package device

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/ondisk/file"
)

var errReadOnly = fmt.Errorf("%w: look for a write-protect switch", unix.EROFS)

// Open opens a disk or a file for writing. It fails if the disk is in use.
func Open(path string) (*Target, error) {
	isFile, err := IsFile(path)
	if err != nil {
		return nil, err
	}
	return open(path, isFile)
}

// open opens path as a file or, if isFile is false, as a disk.
func open(path string, isFile bool) (*Target, error) {
	flags := os.O_RDWR
	if !isFile {
		// With O_EXCL, opening a block device fails if another program or a mount uses it.
		flags |= unix.O_EXCL | unix.O_DIRECT
	}
	f, err := os.OpenFile(path, flags, 0)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, ErrBusy
	case errors.Is(err, unix.EROFS):
		return nil, errReadOnly
	case errors.Is(err, unix.ENOMEDIUM):
		return nil, fmt.Errorf("%w: insert a medium", unix.ENOMEDIUM)
	case errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("%w: run edgebake as a user who may write it (sudo, or the group that ls -l shows)", os.ErrPermission)
	case err != nil:
		return nil, err
	}
	if err := sameKind(f, isFile); err != nil {
		f.Close()
		return nil, err
	}
	t := &Target{f: f, block: !isFile, direct: !isFile}
	if isFile {
		err := file.Lock(f, true)
		if errors.Is(err, file.ErrLocked) {
			err = ErrBusy
		}
		if err != nil {
			f.Close()
			return nil, err
		}
	}
	if err := t.look(); err != nil {
		f.Close()
		return nil, err
	}
	return t, nil
}

// look reads the size and the capabilities of the target.
func (t *Target) look() (err error) {
	if t.Size, err = t.f.Seek(0, io.SeekEnd); err != nil || !t.block {
		return err
	}
	n, err := unix.IoctlGetInt(int(t.f.Fd()), unix.BLKSSZGET)
	if err != nil {
		return fmt.Errorf("reading the sector size: %w", err)
	}
	t.Sector = int64(n)
	// Some kernels allow opening a read-only disk for writing, and fail only at the first write.
	if ro, err := unix.IoctlGetInt(int(t.f.Fd()), unix.BLKROGET); err == nil && ro != 0 {
		return errReadOnly
	}
	// A write_zeroes_max_bytes of 0 means that the kernel would write the zeros itself.
	var st unix.Stat_t
	if err := unix.Fstat(int(t.f.Fd()), &st); err != nil {
		return err
	}
	limit, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/queue/write_zeroes_max_bytes", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
	t.zeroes = err == nil && strings.TrimSpace(string(limit)) != "0"
	return nil
}

// isAligned reports whether b is aligned for direct I/O.
func isAligned(b []byte) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%align == 0
}

// aligned returns b if it is aligned, or else a new aligned buffer of the same length.
func aligned(b []byte) []byte {
	if isAligned(b) {
		return b
	}
	room := make([]byte, len(b)+align)
	at := align - int(uintptr(unsafe.Pointer(unsafe.SliceData(room)))%align)
	return room[at%align:][:len(b)]
}

// WriteAt writes p at off. The data is durable only after Sync.
func (t *Target) WriteAt(p []byte, off int64) (int, error) {
	if t.direct {
		if !isAligned(p) {
			b := aligned(make([]byte, len(p)))
			copy(b, p)
			p = b
		}
	}
	return t.f.WriteAt(p, off)
}

// ReadAt reads from the medium instead of the page cache, provided that Sync was called after the
// last write.
func (t *Target) ReadAt(p []byte, off int64) (int, error) {
	if !t.direct {
		// Remove the range from the page cache.
		_ = unix.Fadvise(int(t.f.Fd()), off, int64(len(p)), unix.FADV_DONTNEED)
		return t.f.ReadAt(p, off)
	}
	if off%t.Sector == 0 && int64(len(p))%t.Sector == 0 && isAligned(p) {
		return t.f.ReadAt(p, off)
	}
	// Read all sectors that contain the range.
	skip := off % t.Sector
	b := aligned(make([]byte, (skip+int64(len(p))+t.Sector-1)/t.Sector*t.Sector))
	n, err := t.f.ReadAt(b, off-skip)
	if n = copy(p, b[min(skip, int64(n)):n]); n == len(p) {
		err = nil
	}
	return n, err
}

// Sync waits until all data is on the medium.
func (t *Target) Sync() error { return t.f.Sync() }

// ioctl calls an ioctl that takes a range of the disk.
func (t *Target) ioctl(request uintptr, off, n int64) error {
	arg := [2]uint64{uint64(off), uint64(n)}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, t.f.Fd(), request, uintptr(unsafe.Pointer(&arg)))
	runtime.KeepAlive(&arg)
	if errno != 0 {
		return errno
	}
	return nil
}

// Zero makes a range read as zeros permanently, which discarding does not guarantee. If the device
// cannot zero ranges, Zero reads the range and writes only to parts that are not zero, because
// sticks and cards read several times faster than they write.
func (t *Target) Zero(off, n int64) error {
	switch {
	case n <= 0:
		return nil
	case !t.block:
		err := unix.Fallocate(int(t.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
		if err == nil || !errors.Is(err, unix.EOPNOTSUPP) {
			return err
		}
	case t.zeroes:
		if t.ioctl(unix.BLKZEROOUT, off, n) == nil {
			return nil
		}
		// Some devices claim support but fail: write zeros instead.
	}
	const step = 4 << 20
	b := aligned(make([]byte, min(n, step)))
	zero := aligned(make([]byte, len(b)))
	for n > 0 {
		part := min(n, step)
		if _, err := t.f.ReadAt(b[:part], off); err != nil {
			return err
		}
		if !bytes.Equal(b[:part], zero[:part]) {
			if _, err := t.f.WriteAt(zero[:part], off); err != nil {
				return err
			}
		}
		off, n = off+part, n-part
	}
	return nil
}

// Discard tells the device that a range is unused. Its contents become undefined. Discard ignores
// errors, because many devices do not support it.
func (t *Target) Discard(off, n int64) {
	if t.block && n > 0 {
		_ = t.ioctl(unix.BLKDISCARD, off, n)
	}
}

// Reread makes the kernel read the partition table again. Otherwise, the kernel reads it only when
// the disk is plugged in.
func (t *Target) Reread() {
	if t.block {
		_ = unix.IoctlSetInt(int(t.f.Fd()), unix.BLKRRPART, 0)
	}
}
