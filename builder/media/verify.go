package media

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/chunk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/update"
)

// Verify compares an image that has not booted with its build, and returns all differences.
// progress may be nil. Verify finds damage, not tampering, since the digest to compare is in the
// image itself. VerifySignature checks who built the image.
func Verify(ctx context.Context, path string, progress func(done, total int64)) error {
	g, err := Open(path)
	if err != nil {
		return err
	}
	defer g.Close()
	return g.Verify(ctx, progress, nil)
}

// Verify is like the function Verify, for an open image. Unless spare is nil, one processor is left
// unused until spare is closed.
func (m *Image) Verify(ctx context.Context, progress func(done, total int64), spare <-chan struct{}) error {
	return m.verifyWith(ctx, func(ctx context.Context) (disk.Digest, error) {
		d, err := disk.Digests(ctx, disk.Source{Read: m.chunk, Progress: progress, Spare: spare}, m.parts())
		if err != nil && ctx.Err() == nil {
			err = unreadable(err)
		}
		return d, err
	})
}

// unreadable returns the error for an image that cannot be decompressed.
func unreadable(err error) error {
	return fmt.Errorf("%w: the image is damaged or truncated: copy or build it again", err)
}

// verifyWith checks the image. digest computes its golden digest.
func (m *Image) verifyWith(ctx context.Context, digest func(context.Context) (disk.Digest, error)) error {
	var errs []error
	bad := func(err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("verifying image %s: %w", m.path, err))
		}
	}
	bad(gpt.Verify(m, m.size))
	bad(m.matches())
	bad(m.asBuilt())
	bad(m.gaps(ctx))
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		return err
	}
	_, slotErr := slot.Read(m.section(p))
	if errors.Is(slotErr, slot.ErrNoSite) {
		slotErr = nil
	}
	meta, err := slot.ReadInfo(m.section(p))
	switch {
	case err != nil:
		bad(fmt.Errorf("%w. The golden digest is lost with the slot, so nothing else can be verified: use the golden image", withFix(err)))
		slotErr = nil
	case meta.Plan != m.info.Plan:
		bad(fmt.Errorf("the slot is for plan %s, but the image has plan %s: stamp it again", meta.Plan, m.info.Plan))
	case meta.Golden == "":
		bad(errors.New("there is no golden digest to compare with, since the slot was damaged when it was stamped: use a copy of the golden image, or build it again"))
	default:
		got, err := digest(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil && got.Golden != meta.Golden {
			err = fmt.Errorf("%w: the image is damaged, or has booted: copy or build it again", notAsBuilt(got, meta))
		}
		bad(err)
	}
	if slotErr != nil {
		bad(withFix(slotErr))
	}
	return errors.Join(errs...)
}

// withFix adds a fix to an error about a slot.
func withFix(err error) error {
	problem, fix := slot.Explain(err)
	return fmt.Errorf("%s: %s", problem, fix)
}

// notAsBuilt returns an error that lists the partitions that differ from the build.
func notAsBuilt(got disk.Digest, built ondisk.SlotInfo) error {
	var differ []string
	for _, label := range slices.Sorted(maps.Keys(built.Parts)) {
		if got.Parts[label] != built.Parts[label] {
			differ = append(differ, label)
		}
	}
	where := ""
	switch len(differ) {
	case 0: // an older image without these digests, or the digests are damaged
	case 1:
		where = "partition " + differ[0] + " is not as it was built: "
	default:
		where = "partitions " + strings.Join(differ, ", ") + " are not as they were built: "
	}
	return fmt.Errorf("%sthe golden digest of the image is %s, but it was built with %s", where, got.Golden, built.Golden)
}

// gaps checks that all bytes outside the partitions and the table are zero. On a larger device, it
// ignores the bytes after the last partition, which may be old data.
func (m *Image) gaps(ctx context.Context) error {
	parts := slices.SortedFunc(slices.Values(m.table.Partitions), func(a, b gpt.Partition) int { return cmp.Compare(a.Start, b.Start) })
	at := gpt.HeadSize(m.table.SectorSize)
	where := "before partition"
	buf := make([]byte, disk.Align)
	for _, p := range parts {
		if err := m.zero(ctx, buf, at, p.Start); err != nil {
			return fmt.Errorf("%s %s: %w", where, p.Name, err)
		}
		at, where = p.Start+p.Size, "between partitions, before"
	}
	if end := m.table.Size - gpt.TailSize(m.table.SectorSize); end-at <= disk.Align {
		if err := m.zero(ctx, buf, at, end); err != nil {
			return fmt.Errorf("after the last partition: %w", err)
		}
	}
	return nil
}

// zero checks that the bytes in [from, to) are zero.
func (m *Image) zero(ctx context.Context, buf []byte, from, to int64) error {
	for from < to {
		if err := ctx.Err(); err != nil {
			return err
		}
		// One call of chunk reads at most one chunk.
		n := min(to-from, disk.Align-from%disk.Align)
		b, zero, err := m.chunk(buf, from, n)
		if err != nil {
			return err
		}
		if i := bytes.IndexFunc(b, func(r rune) bool { return r != 0 }); !zero && i >= 0 {
			return fmt.Errorf("byte %d of the disk should be zero and is not: the image is damaged, copy or build it again", from+int64(i))
		}
		from += n
	}
	return nil
}

// parts returns the partitions of the partition table.
func (m *Image) parts() (out []ondisk.PartitionInfo) {
	for _, p := range m.table.Partitions {
		out = append(out, ondisk.PartitionInfo{Label: p.Name, GUID: p.GUID, Start: p.Start, Size: p.Size})
	}
	return out
}

// matches compares the partition table with image.json. It also checks types and attributes: no
// digest covers them, and firmware and boot loader use them to choose what to boot.
func (m *Image) matches() error {
	var errs []error
	found, own := m.parts(), m.ownGUIDs()
	if len(found) != len(m.info.Partitions) {
		return fmt.Errorf("the image has %s, but it was built with %d", configs.Count(len(found), "partition"), len(m.info.Partitions))
	}
	for i, want := range m.info.Partitions {
		if got := found[i]; got.Label != want.Label || got.GUID != want.GUID && !own || got.Start != want.Start || got.Size != want.Size {
			errs = append(errs, fmt.Errorf("partition %d is %s with %d bytes at %d, but it was built as %s with %d bytes at %d",
				i+1, got.Label, got.Size, got.Start, want.Label, want.Size, want.Start))
		}
		p := m.table.Partitions[i]
		if typ, attr := disk.TypeOf(m.info.Arch, want.Label); p.Type != typ || p.Attributes != attr {
			errs = append(errs, fmt.Errorf("partition %d (%s) has type %s and attributes %#x, but it was built with %s and %#x: the partition table was changed; do not use the image, copy or build it again",
				i+1, want.Label, p.Type, p.Attributes, typ, attr))
		}
	}
	return errors.Join(errs...)
}

// VerifySignature returns the ID of the minisign key that signed the image. Together with Verify,
// it proves that the owner of the key built every byte except the Site. The signature covers
// neither the partition table nor the slot: VerifySignature checks that the table is as built, that
// edgebake wrote the slot, and that the slot contains nothing bootable.
func (m *Image) VerifySignature(keys []string) (string, error) {
	p, err := m.partition(ondisk.LabelSlot)
	if err != nil {
		return "", err
	}
	info, err := slot.ReadInfo(m.section(p))
	if err == nil {
		var key string
		if key, err = m.signedBy(info, keys); err == nil {
			err = errors.Join(m.matches(), slot.Strays(m.section(p)))
		}
		if err == nil {
			err = slot.AsMade(m.section(p))
		}
		if err == nil {
			err = m.indexSigned(info, keys)
		}
		if err == nil {
			return key, nil
		}
	}
	return "", fmt.Errorf("verifying the signature of image %s: %w", m.path, err)
}

// indexSigned checks the chunk index, if there is one. If it is signed, one of the keys must have
// signed it, and it must belong to this image.
func (m *Image) indexSigned(info ondisk.SlotInfo, keys []string) error {
	if m.z == nil || m.z.Extra(chunk.Magic) == nil {
		return nil // without an index, the image cannot be used for updates
	}
	i, err := update.Open(m.src, m.stored)
	if err != nil || i.Signature == "" {
		return err // machines reject an index without a signature
	}
	if _, err := slot.VerifyIndex(i.Body, i.Signature, keys); err != nil {
		return err
	}
	err = i.Decode()
	if x := i.Index; x != nil && (x.Golden != info.Golden || !bytes.Equal(x.ImageInfo, m.infoText)) {
		return errors.New("the chunk index belongs to another image, to which a machine would be updated: copy or build the image again")
	}
	return err
}

func (m *Image) signedBy(info ondisk.SlotInfo, keys []string) (string, error) {
	b, err := m.espFile(ondisk.ESPImageInfo)
	if err != nil {
		return "", err
	}
	return slot.VerifyImage(info, b, keys)
}
