// Package disk computes the layout of a disk image and writes it: a GPT with the EFI system
// partition, the slot, the root partitions and the data partition. It writes a sparse file, without
// root, loop devices or mounts.
//
// Compute is pure: the same Spec gives the same Layout. Each GUID and UUID is a hash of the plan's
// ID and the partition's label. Write writes the layout to a temporary file in the output's
// directory, and renames it when it is complete. After an error or an interrupt, no file is left.
//
// Invariants:
//   - The same Spec and blobs give the same bytes, whether compressed or not. They do not depend on
//     the computer, the directory or the number of processors.
//   - Partitions begin and end at multiples of Align. The slot of a compressed image consists of
//     complete frames, which stamping replaces.
//   - Ranges that are not written are holes in the file.
//   - Only the partition table and the FAT file systems depend on the disk's sector size.
//   - The golden digest (docs/decisions/0002-golden-digest.md) covers every partition except the slot.
package disk

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/fat"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// Align is the alignment of partitions in bytes, and the size of the chunks of the golden digest.
const Align = 4 << 20

// File systems of a Partition.
const (
	FAT12 = "fat12"
	FAT16 = "fat16"
	FAT32 = "fat32"
	Ext4  = "ext4"
)

const (
	espSize = 512 << 20
	// dataJournal is the size of DATA's journal in bytes. DATA's file system will grow to fill the
	// device, but its journal cannot grow.
	dataJournal = 64 << 20
	// bytesPerInode is the default ratio of mke2fs.
	bytesPerInode = 16 << 10
)

// Partition is a partition to create.
type Partition struct {
	// Label is the name in the GPT: one of package ondisk's labels, or any other.
	Label string
	// FS is FAT12, FAT16, FAT32 or Ext4, or empty for a partition of zeros.
	FS string
	// Size is the size of the file system in bytes, or of the partition if FS is empty. It is
	// rounded up to Align. 0 selects a default: the usual size for the slot and the ESP, the size
	// of ROOT-A for ROOT-B, and the size of contents and free space for ext4.
	Size int64
	// Grow is space after the file system, in bytes, for a larger file system of a later update.
	// HashTree adds space for the dm-verity hash tree of that file system.
	Grow     int64
	HashTree bool
	// Gap is unused space before the partition in bytes, rounded up to Align.
	Gap int64
	// FreeBytes and FreeInodes are the free space and the free inodes of an ext4 file system. It
	// has at least one free inode for each 16 KiB of FreeBytes.
	FreeBytes, FreeInodes int64
	Nodes                 []tree.Node
}

// Spec describes the disk to write.
type Spec struct {
	// ID is the plan's ID, in hex.
	ID string
	// Arch is the GOARCH of the machine. It determines the type of the root partitions.
	Arch       string
	SourceDate time.Time
	// SectorSize is the sector size of the machine's disk in bytes: 512 (or 0), or 4096.
	SectorSize int64
	Partitions []Partition
}

// Layout is the position and size of each partition.
type Layout struct {
	DiskGUID string
	Size     int64
	Parts    []ondisk.PartitionInfo
}

// derive returns an identifier that depends only on its arguments. The strings that it hashes are
// part of the disk format and must not change.
func derive(what, planID, label string) (id [16]byte) {
	sum := sha256.Sum256([]byte("edgebake " + what + "\x00" + planID + "\x00" + label))
	copy(id[:], sum[:])
	// RFC 9562, version 8: custom
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}

func format(id [16]byte) string {
	s := hex.EncodeToString(id[:])
	return s[:8] + "-" + s[8:12] + "-" + s[12:16] + "-" + s[16:20] + "-" + s[20:]
}

// PartitionGUID returns the PARTUUID of a partition in lower case, as in fstab and on the kernel's
// command line.
func PartitionGUID(planID, label string) string { return format(derive("partition", planID, label)) }

// RandomGUID formats random bytes as a disk GUID. The disk's partitions have the GUIDs of
// PartitionGUID, with the disk GUID as planID.
func RandomGUID(random [16]byte) string {
	random[6] = random[6]&0x0f | 0x40 // RFC 9562, version 4
	random[8] = random[8]&0x3f | 0x80
	return format(random)
}

// volumeLabel returns the label of a file system. The system can be written to either root
// partition, so its label must not name one of them.
func volumeLabel(label string) string {
	if label == ondisk.LabelRootA {
		return "ROOT"
	}
	return label
}

// volumeID returns the volume ID of a FAT file system.
func volumeID(planID, label string) uint32 {
	id := derive("filesystem", planID, label)
	return binary.LittleEndian.Uint32(id[:])
}

// ext4Options returns the options of an ext4 file system, except Size.
func (s *Spec) ext4Options(p *Partition) ext4.Options {
	o := ext4.Options{
		Label:      volumeLabel(p.Label),
		UUID:       derive("filesystem", s.ID, p.Label),
		HashSeed:   derive("directory hash", s.ID, p.Label),
		Time:       s.SourceDate,
		FreeBytes:  p.FreeBytes,
		FreeInodes: max(p.FreeInodes, p.FreeBytes/bytesPerInode),
	}
	if p.Label == ondisk.LabelData {
		o.JournalSize = dataJournal
	}
	return o
}

func (s *Spec) fatOptions(p *Partition, i ondisk.PartitionInfo) fat.Options {
	o := fat.Options{Type: 32, Label: p.Label, VolumeID: volumeID(s.ID, p.Label), Size: i.Size, Start: i.Start, Time: s.SourceDate, SectorSize: s.SectorSize}
	switch p.FS {
	case FAT12:
		o.Type = 12
	case FAT16:
		o.Type = 16
	}
	return o
}

// TypeOf returns the GPT type and attributes of a partition. They depend only on the architecture
// and the label, so that a reader need not trust the table.
func TypeOf(arch, label string) (guid string, attributes uint64) {
	switch label {
	case ondisk.LabelESP:
		return gpt.TypeESP, 0
	case ondisk.LabelSlot:
		return gpt.TypeBasicData, 0
	case ondisk.LabelRootA:
		// Nothing may mount a root partition because of its type: another edgebake disk in the
		// machine may have a root partition of the same type.
		if arch == "arm64" {
			return gpt.TypeRootARM64, gpt.NoAuto
		}
		return gpt.TypeRootAMD64, gpt.NoAuto
	case ondisk.LabelData:
		// systemd-repart finds the partition to grow by its type, so no other partition may have
		// it.
		return gpt.TypeVar, gpt.NoAuto
	}
	return gpt.TypeLinux, 0
}

// hashTreeSize returns the size of the dm-verity hash tree for n bytes, in bytes. As made by
// veritysetup, it has a superblock, and levels of SHA-256 digests in blocks of 4 KiB.
func hashTreeSize(n int64) int64 {
	const block, perBlock = 4096, 4096 / 32
	size := int64(block)
	for blocks := (n + block - 1) / block; blocks > 1; {
		blocks = (blocks + perBlock - 1) / perBlock
		size += blocks * block
	}
	return size
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// content returns the total size of the files in bytes. Hard links to a file count once.
func content(nodes []tree.Node) (n int64) {
	seen := make(map[*tree.Inode]bool, len(nodes))
	for _, node := range nodes {
		if node.Inode != nil && node.IsRegular() && !seen[node.Inode] {
			seen[node.Inode] = true
			n += node.Data.Size
		}
	}
	return n
}

// Compute computes the layout. The error contains all problems of the spec.
func Compute(s Spec) (*Layout, error) {
	var errs []error
	if s.ID == "" {
		errs = append(errs, errors.New("laying out the disk: the plan has no id"))
	}
	if s.Arch != "amd64" && s.Arch != "arm64" {
		errs = append(errs, fmt.Errorf("laying out the disk: no partition type is known for architecture %q: use amd64 or arm64", s.Arch))
	}
	l := &Layout{DiskGUID: format(derive("disk", s.ID, ""))}
	at := int64(Align)
	for i := range s.Partitions {
		p := &s.Partitions[i]
		bad := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("laying out partition %s: "+format, append([]any{p.Label}, args...)...))
		}
		if p.Label == "" || l.Find(p.Label) != nil {
			bad("every partition needs its own label")
			continue
		}
		info := s.size(p, l.Find(ondisk.LabelRootA), bad)
		at += roundUp(p.Gap, Align)
		info.Start = at
		at += info.Size
		l.Parts = append(l.Parts, info)
	}
	// After the last partition, the image needs space only for the backup table.
	l.Size = at + 1<<20
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return l, nil
}

// Fill sets the files of a FAT partition after Compute, because they may describe the layout. It
// fails if they do not fit.
func (s *Spec) Fill(l *Layout, label string, nodes []tree.Node) error {
	for i := range s.Partitions {
		p, info := &s.Partitions[i], l.Find(s.Partitions[i].Label)
		if p.Label != label || info == nil {
			continue
		}
		if err := fat.Fits(nodes, s.fatOptions(p, ondisk.PartitionInfo{Size: info.Size})); err != nil {
			return fmt.Errorf("laying out partition %s: %w", label, err)
		}
		p.Nodes, info.Used = nodes, content(nodes)
		return nil
	}
	return fmt.Errorf("BUG: there is no partition %s to fill", label)
}

// size computes the sizes of a partition and its file system. ROOT-B gets the size of rootA, unless
// rootA is nil. size calls bad for each error.
func (s *Spec) size(p *Partition, rootA *ondisk.PartitionInfo, bad func(string, ...any)) ondisk.PartitionInfo {
	info := ondisk.PartitionInfo{Label: p.Label, GUID: PartitionGUID(s.ID, p.Label), FS: p.FS, Used: content(p.Nodes)}
	given := p.Size
	if given == 0 {
		switch {
		case p.Label == ondisk.LabelSlot:
			given = ondisk.SlotSize
		case p.Label == ondisk.LabelRootB && rootA != nil:
			given, info.Room = rootA.Size, rootA.Room
		case p.FS == FAT32:
			given = espSize
		}
	}
	info.Size = s.fileSystem(p, roundUp(given, Align), bad)
	if p.Label == ondisk.LabelSlot && (info.Size != ondisk.SlotSize || p.FS != FAT12 && p.FS != FAT16 || len(p.Nodes) > 0) {
		bad("the slot must be an empty FAT16 (FAT12 with sectors of 4 KiB) of %s", bytesize.MiB(ondisk.SlotSize))
	}
	if p.Grow > 0 || p.HashTree {
		info.FSSize = info.Size
		info.Room = info.FSSize + roundUp(p.Grow, Align)
		info.Size = info.Room
		if p.HashTree {
			info.Size = roundUp(info.Room+hashTreeSize(info.Room), Align)
		}
	}
	return info
}

// SizeError means that the size given for a partition is too small for its contents.
type SizeError struct {
	Label       string
	Need, Given int64
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("the content and headroom need %s, but the size is %s: increase the size, or remove it to have it computed", bytesize.MiB(roundUp(e.Need, 1<<20)), bytesize.MiB(e.Given))
}

// fileSystem returns the size of a partition's file system in bytes: given or, if given is 0, the
// size that its contents need, which only ext4 supports. It calls bad for each error.
func (s *Spec) fileSystem(p *Partition, given int64, bad func(string, ...any)) int64 {
	switch p.FS {
	case Ext4:
		need, err := ext4.Size(p.Nodes, s.ext4Options(p))
		switch {
		case err != nil:
			bad("%w", err)
			return Align
		case given == 0:
			return roundUp(need, Align)
		case need > given:
			bad("%w", &SizeError{p.Label, need, given})
		}
	case FAT12, FAT16, FAT32:
		if given == 0 {
			bad("the size must be given")
		} else if err := fat.Fits(p.Nodes, s.fatOptions(p, ondisk.PartitionInfo{Size: given})); err != nil {
			bad("%w", err)
		}
	case "":
		if given == 0 {
			bad("the size must be given")
		}
		if len(p.Nodes) > 0 {
			bad("the partition has files but no file system")
		}
	default:
		bad("file system %q cannot be written: use ext4, fat32, fat16, fat12 or none", p.FS)
	}
	return given
}

// table returns the partition table of a layout.
func (s *Spec) table(l *Layout) gpt.Table {
	t := gpt.Table{GUID: l.DiskGUID, Size: l.Size, SectorSize: cmp.Or(s.SectorSize, gpt.Sector512)}
	for _, p := range l.Parts {
		typ, attr := TypeOf(s.Arch, p.Label)
		t.Partitions = append(t.Partitions, gpt.Partition{
			Name: p.Label, Type: typ, GUID: p.GUID, Start: p.Start, Size: p.Size, Attributes: attr,
		})
	}
	return t
}

// Find returns the partition with this label, or nil.
func (l *Layout) Find(label string) *ondisk.PartitionInfo {
	for i := range l.Parts {
		if l.Parts[i].Label == label {
			return &l.Parts[i]
		}
	}
	return nil
}
