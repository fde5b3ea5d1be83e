package host

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

func slotLabel(device string) (string, error) {
	f, err := os.Open(device)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return slot.Label(f)
}

func readSlot(device string) (*slot.Contents, error) {
	f, err := os.Open(device)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return slot.Read(f)
}

func slotFile(device, name string, w io.Writer) error {
	f, err := os.Open(device)
	if err != nil {
		return err
	}
	defer f.Close()
	return slot.CopyFile(f, name, w)
}

// onSlot opens the slot for functions that sync by themselves. O_SYNC would sync each write, which
// takes seconds on a slow disk.
func onSlot(device string, do func(f *os.File) error) error {
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(do(f), f.Close())
}

// sectorSize returns the logical sector size of a device in bytes, or 512 for a file.
func sectorSize(f *os.File) int64 {
	n, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKSSZGET)
	if err != nil {
		return 512
	}
	return int64(n)
}

func writeSlot(device string, c *slot.Contents) error {
	return onSlot(device, func(f *os.File) error {
		own := *c
		own.Info.SectorSize = sectorSize(f)
		return slot.Rewrite(f, own)
	})
}

func readClaims(device string) ([]slot.Claim, error) {
	f, err := os.Open(device)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return slot.ReadClaims(f)
}

func writeClaim(device string, c slot.Claim) error {
	return onSlot(device, func(f *os.File) error { return slot.WriteClaim(f, c) })
}

func scrubSlot(device string, info ondisk.SlotInfo, site []byte, secrets []string) error {
	return onSlot(device, func(f *os.File) error {
		info.SectorSize = sectorSize(f)
		return slot.Scrub(f, info, site, secrets...)
	})
}

func reportSlot(device string, text, json []byte) error {
	return onSlot(device, func(f *os.File) error {
		return slot.WriteReport(f, slot.Report{Text: text, JSON: json})
	})
}

// fsUUID reads the UUID (offset 0x68) from the ext4 superblock at byte 1024, if the superblock has
// the magic number 0xEF53 (at 0x38).
func fsUUID(device string) (u [16]byte, err error) {
	f, err := os.Open(device)
	if err != nil {
		return u, err
	}
	defer f.Close()
	sb := make([]byte, 1024)
	if _, err := f.ReadAt(sb, 1024); err != nil {
		return u, fmt.Errorf("reading the superblock of %s: %w", device, err)
	}
	if sb[0x38] != 0x53 || sb[0x39] != 0xef {
		return u, fmt.Errorf("reading the superblock of %s: not an ext4 file system", device)
	}
	copy(u[:], sb[0x68:])
	return u, nil
}

func fsSize(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return int64(st.Blocks) * st.Bsize, nil
}

func fsFree(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return int64(st.Bavail) * st.Bsize, nil
}
