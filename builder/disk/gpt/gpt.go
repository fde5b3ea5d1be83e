// Package gpt encodes and reads GUID partition tables. It is the only package that uses go-diskfs,
// and uses only its GPT code, whose output is deterministic if all GUIDs and offsets are given.
//
// Encode is pure: it returns the bytes for both ends of the disk. Read checks the headers before
// the library reads them, because the library trusts their sizes. It distinguishes a truncated disk
// from a disk without a table.
package gpt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"slices"
	"strings"

	diskfs "github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/google/uuid"
)

// Partition types from systemd's Discoverable Partitions Specification and the UEFI specification.
const (
	TypeESP       = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b"
	TypeBasicData = "ebd0a0a2-b9e5-4433-87c0-68b6b72699c7" // Windows shows such a partition
	TypeLinux     = "0fc63daf-8483-4772-8e79-3d69d8477de4"
	TypeRootAMD64 = "4f68bce3-e8cd-4db1-96e7-fbcaf984b709"
	TypeRootARM64 = "b921b045-1df0-41c3-af44-4c6f280d3fae"
	TypeVar       = "4d21b016-b534-45c2-a9fb-5c16e091fd2d"
)

// NoAuto is the attribute that makes systemd-gpt-auto-generator ignore a
// partition.
const NoAuto = uint64(1) << 63

// Sizes of a logical sector in bytes. The offsets in a table are in sectors, so a table is only
// found on disks with the same sector size.
const (
	Sector512  = 512
	Sector4096 = 4096
)

// Every table has 128 entries of 128 bytes.
const entries, entryBytes = 128, 128

// arraySize is the size of all entries in bytes.
const arraySize = entries * entryBytes

// Table is a partition table. All offsets and sizes are in bytes.
type Table struct {
	GUID string // of the disk, in lower case
	// Size is the size of the disk that the table is for.
	Size int64
	// SectorSize is Sector512 or Sector4096.
	SectorSize int64
	Partitions []Partition
}

// HeadSize returns the number of bytes that a table needs at the beginning of a disk, including the
// protective MBR.
func HeadSize(sector int64) int64 { return 2*sector + arraySize }

// TailSize returns the number of bytes that the backup table needs at the end of a disk.
func TailSize(sector int64) int64 { return sector + arraySize }

// Partition is one entry of the table. The first entry has number 1.
type Partition struct {
	Name        string
	Type, GUID  string // in lower case
	Start, Size int64
	Attributes  uint64
}

var (
	// ErrNoTable means that there is no GPT.
	ErrNoTable = errors.New("no GUID partition table")
	// ErrTruncated means that the table is for a larger disk.
	ErrTruncated = errors.New("truncated")
)

// TruncatedError is ErrTruncated with both sizes in bytes.
type TruncatedError struct {
	Disk, Size int64 // size that the table is for, and actual size
}

func (e *TruncatedError) Error() string {
	return fmt.Sprintf("%v: the table is for a disk of %d bytes, but there are only %d: copy the image again", ErrTruncated, e.Disk, e.Size)
}

func (e *TruncatedError) Unwrap() error { return ErrTruncated }

// check returns an error with all problems of the table.
func (t *Table) check() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	sector := t.SectorSize
	if sector != Sector512 && sector != Sector4096 {
		return fmt.Errorf("sectors of %d bytes are not supported: use %d or %d", sector, Sector512, Sector4096)
	}
	head, tail := HeadSize(sector), TailSize(sector)
	if t.Size%sector != 0 || t.Size < head+tail {
		bad("a disk of %d bytes has no space for a table", t.Size)
	}
	if len(t.Partitions) > entries {
		bad("%d partitions, but at most %d are possible", len(t.Partitions), entries)
	}
	seen := map[string]string{t.GUID: "the disk"}
	for _, p := range t.Partitions {
		if p.Start%sector != 0 || p.Size%sector != 0 || p.Size <= 0 || p.Start < head || p.Start > t.Size-tail || p.Size > t.Size-tail-p.Start {
			bad("partition %s: %d bytes at %d do not fit a disk of %d", p.Name, p.Size, p.Start, t.Size)
		}
		if other, ok := seen[p.GUID]; ok {
			bad("partition %s has the GUID of %s", p.Name, other)
		}
		seen[p.GUID] = "partition " + p.Name
	}
	sorted := slices.SortedFunc(slices.Values(t.Partitions), func(a, b Partition) int {
		switch {
		case a.Start < b.Start:
			return -1
		case a.Start > b.Start:
			return 1
		}
		return 0
	})
	for i := 1; i < len(sorted); i++ {
		if a, b := sorted[i-1], sorted[i]; b.Start-a.Start < a.Size {
			bad("partitions %s and %s overlap", a.Name, b.Name)
		}
	}
	return errors.Join(errs...)
}

// Encode returns the bytes of the table for the beginning (head) and the end (tail) of the disk.
func Encode(t Table) (head, tail []byte, err error) {
	if err := t.check(); err != nil {
		return nil, nil, fmt.Errorf("making the partition table: %w", err)
	}
	// The library would replace an empty GUID by a random one.
	if _, err := uuid.Parse(t.GUID); err != nil {
		return nil, nil, fmt.Errorf("making the partition table: disk GUID %q: %w", t.GUID, err)
	}
	lib := diskfs.Table{GUID: t.GUID, ProtectiveMBR: true, LogicalSectorSize: int(t.SectorSize), PhysicalSectorSize: int(t.SectorSize)}
	for i, p := range t.Partitions {
		if _, err := uuid.Parse(p.GUID); err != nil {
			return nil, nil, fmt.Errorf("making the partition table: GUID %q of partition %s: %w", p.GUID, p.Name, err)
		}
		lib.Partitions = append(lib.Partitions, &diskfs.Partition{
			Index: i + 1, Name: p.Name, Type: diskfs.Type(strings.ToUpper(p.Type)), GUID: strings.ToUpper(p.GUID),
			Start: uint64(p.Start / t.SectorSize), End: uint64((p.Start+p.Size)/t.SectorSize) - 1, Attributes: p.Attributes,
		})
	}
	ends := &ends{head: make([]byte, HeadSize(t.SectorSize)), tail: make([]byte, TailSize(t.SectorSize)), size: t.Size}
	if err := lib.Write(ends, t.Size); err != nil {
		return nil, nil, fmt.Errorf("making the partition table: %w", err)
	}
	// An entry of the MBR cannot describe more than 2^32-1 sectors.
	if t.Size/t.SectorSize-1 > 1<<32-1 {
		binary.LittleEndian.PutUint32(ends.head[446+12:], 1<<32-1)
	}
	return ends.head, ends.tail, nil
}

// ends is a disk of which only the two ends exist, in memory. The library reads and writes it.
type ends struct {
	head, tail []byte
	size       int64
}

// at returns the n bytes at off.
func (e *ends) at(off int64, n int) ([]byte, error) {
	if off >= 0 && off+int64(n) <= int64(len(e.head)) {
		return e.head[off:][:n], nil
	}
	if off -= e.size - int64(len(e.tail)); off >= 0 && off+int64(n) <= int64(len(e.tail)) {
		return e.tail[off:][:n], nil
	}
	return nil, fmt.Errorf("%d bytes at %d are outside of the table: %w", n, off, fs.ErrInvalid)
}

func (e *ends) WriteAt(p []byte, off int64) (int, error) {
	b, err := e.at(off, len(p))
	return copy(b, p), err
}

func (e *ends) ReadAt(p []byte, off int64) (int, error) {
	b, err := e.at(off, len(p))
	return copy(p, b), err
}

func (e *ends) Seek(off int64, whence int) (int64, error) {
	if whence != io.SeekEnd || off != 0 {
		return 0, fs.ErrInvalid
	}
	return e.size, nil
}

func (e *ends) Read([]byte) (int, error)   { return 0, fs.ErrInvalid }
func (e *ends) Stat() (fs.FileInfo, error) { return nil, fs.ErrInvalid }
func (e *ends) Close() error               { return nil }

// Read reads the table of a disk or image of size bytes. If the table is damaged, it reads the
// backup table. The disk may be larger than the table's.
func Read(r io.ReaderAt, size int64) (*Table, error) {
	t, err := read(r, size)
	if err != nil {
		return nil, fmt.Errorf("reading the partition table: %w", err)
	}
	return t, nil
}

func read(r io.ReaderAt, size int64) (*Table, error) {
	// Only the place of the table shows the sector size. Try each size, first for the table at the
	// beginning, and then for the backup table.
	var errs []error
	for _, copyOnly := range []bool{false, true} {
		for _, sector := range []int64{Sector512, Sector4096} {
			t, err := readSectors(r, size, sector, copyOnly)
			if !errors.Is(err, ErrNoTable) {
				return t, err
			}
			errs = append(errs, err)
		}
	}
	// Return the first error with details. If there is none, return the error for the usual sector
	// size.
	for _, err := range errs {
		if err != ErrNoTable { // errors with details wrap it
			return nil, err
		}
	}
	return nil, errs[0]
}

// readSectors reads a table for one sector size. If copyOnly is set, it uses the backup table if
// the header at the beginning is invalid.
func readSectors(r io.ReaderAt, size, sector int64, copyOnly bool) (*Table, error) {
	headSize, tailSize := HeadSize(sector), TailSize(sector)
	if size < headSize+tailSize {
		return nil, fmt.Errorf("%w in %d bytes", ErrNoTable, size)
	}
	head := make([]byte, headSize)
	if _, err := r.ReadAt(head, 0); err != nil {
		return nil, err
	}
	disk := size / sector * sector
	primary, err := parseHeader(head[sector:2*sector], 1, sector)
	switch {
	case err != nil && !copyOnly:
		return nil, err
	case err != nil:
	case primary.other > uint64(1)<<50:
		return nil, fmt.Errorf("%w: the position of the backup table is invalid", ErrNoTable)
	default:
		// The place of the backup table shows the size of the disk that the table is for.
		disk = int64(primary.other+1) * sector
		if disk > size {
			return nil, &TruncatedError{Disk: disk, Size: size}
		}
		if disk < headSize+tailSize {
			return nil, fmt.Errorf("%w: the backup table is at sector %d", ErrNoTable, primary.other)
		}
	}
	tail := make([]byte, tailSize)
	if _, errTail := r.ReadAt(tail, disk-tailSize); errTail != nil {
		return nil, errTail
	}
	// The library must not read invalid headers.
	if err != nil {
		clear(head[sector : 2*sector])
	}
	if _, errCopy := parseHeader(tail[tailSize-sector:], uint64(disk/sector)-1, sector); errCopy != nil {
		if err != nil {
			return nil, err
		}
		clear(tail[tailSize-sector:])
	}
	lib, err := diskfs.Read(&ends{head: head, tail: tail, size: disk}, int(sector), int(sector))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoTable, err)
	}
	t := &Table{GUID: strings.ToLower(lib.GUID), Size: disk, SectorSize: sector}
	for _, p := range lib.Partitions {
		if p.Start > p.End || p.End >= uint64(disk/sector) {
			return nil, fmt.Errorf("partition %d is not on the disk (sectors %d to %d)", p.Index, p.Start, p.End)
		}
		t.Partitions = append(t.Partitions, Partition{
			Name: p.Name, Type: strings.ToLower(string(p.Type)), GUID: strings.ToLower(p.GUID),
			Start: int64(p.Start) * sector, Size: int64(p.End-p.Start+1) * sector, Attributes: p.Attributes,
		})
	}
	return t, t.check()
}

// header is the only field of a header that read needs: the sector of the other copy of the header.
type header struct{ other uint64 }

func parseHeader(b []byte, lba uint64, sector int64) (*header, error) {
	le := binary.LittleEndian
	if string(b[:8]) != "EFI PART" {
		return nil, ErrNoTable
	}
	sum := slices.Clone(b[:92])
	clear(sum[16:20])
	switch {
	case le.Uint32(b[12:]) != 92 || crc32.ChecksumIEEE(sum) != le.Uint32(b[16:]):
		return nil, fmt.Errorf("%w: the header's checksum is wrong", ErrNoTable)
	case le.Uint64(b[24:]) != lba:
		return nil, fmt.Errorf("%w: the header belongs to another position", ErrNoTable)
	case le.Uint32(b[80:]) != entries || le.Uint32(b[84:]) != entryBytes:
		return nil, fmt.Errorf("%w: the table has %d entries of %d bytes, not %d of %d",
			ErrNoTable, le.Uint32(b[80:]), le.Uint32(b[84:]), entries, entryBytes)
	}
	array := uint64(2)
	if lba != 1 {
		array = lba - uint64(arraySize/sector)
	}
	if le.Uint64(b[72:]) != array {
		return nil, fmt.Errorf("%w: the entries are at an unusual position", ErrNoTable)
	}
	return &header{other: le.Uint64(b[32:])}, nil
}

// Verify checks that the table and its backup are valid and agree.
func Verify(r io.ReaderAt, size int64) error {
	t, err := Read(r, size)
	if err != nil {
		return err
	}
	head, tail, err := Encode(*t)
	if err != nil {
		return err
	}
	var errs []error
	for _, x := range []struct {
		what string
		want []byte
		off  int64
	}{{"partition table", head, 0}, {"backup partition table", tail, t.Size - int64(len(tail))}} {
		got := make([]byte, len(x.want))
		if _, err := r.ReadAt(got, x.off); err != nil {
			errs = append(errs, fmt.Errorf("reading the %s: %w", x.what, err))
			continue
		}
		if x.off == 0 && chsFits(got) {
			clearCHS(got)
		}
		if string(got) != string(x.want) {
			errs = append(errs, fmt.Errorf("the %s is damaged: rebuild the image, or repair it with sgdisk", x.what))
		}
	}
	return errors.Join(errs...)
}

// The entry of the protective MBR also contains its range as cylinders, heads and sectors, which
// are obsolete. Encode leaves them zero. Other programs set them when they move the backup table to
// the end of a larger device.
const (
	mbrEntry  = 446
	chsStart  = mbrEntry + 1
	chsEnd    = mbrEntry + 5
	mbrLength = mbrEntry + 12
)

// chsFits reports whether the cylinders, heads and sectors of the entry are zero or match its
// sector numbers.
func chsFits(mbr []byte) bool {
	fits := func(got []byte, lba uint32) bool {
		want := chs(lba)
		return string(got) == "\x00\x00\x00" || string(got) == string(want[:]) ||
			string(got) == "\xff\xff\xff" && want == [3]byte{0xfe, 0xff, 0xff} // as in the UEFI specification
	}
	return fits(mbr[chsStart:][:3], 1) && fits(mbr[chsEnd:][:3], binary.LittleEndian.Uint32(mbr[mbrLength:]))
}

func clearCHS(mbr []byte) {
	clear(mbr[chsStart:][:3])
	clear(mbr[chsEnd:][:3])
}

// chs returns a sector number as cylinder, head and sector, for 255 heads and 63 sectors per track.
// After cylinder 1,023, it returns the largest value.
func chs(lba uint32) [3]byte {
	const heads, sectors = 255, 63
	c := lba / (heads * sectors)
	if c >= 1024 {
		return [3]byte{0xfe, 0xff, 0xff}
	}
	h, sec := lba/sectors%heads, lba%sectors+1
	return [3]byte{byte(h), byte(sec | c>>8<<6), byte(c)}
}
