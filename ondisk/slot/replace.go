package slot

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/fat"
)

// A machine that writes its own slot must not lose the contents in a power cut, because there is no
// other copy. So it first writes the new contents, with a digest, as a record into the second half
// of the slot, while the first half has the old contents. Readers use the record if the first
// sector is zero.

const (
	half         = ondisk.SlotSize / 2
	sectorSize   = 512
	recordMagic  = "EDGEBAKE SLOT RECORD 1\n"
	recordDigest = 64 // offset of the payload's SHA-256 in the header sector
	recordLength = 96 // offset of the payload's length in the header sector
)

// Replace writes a slot made by Make or Encode. A power cut leaves either the old contents or the
// new. If the second half is in use, or the new contents do not fit in half a slot, Replace is like
// WriteWhole.
func Replace(f Device, img []byte) error {
	if err := replace(f, img); err != nil {
		return fmt.Errorf("writing the slot: %w", err)
	}
	return nil
}

// Rewrite replaces the slot with a new one that has the contents c.
func Rewrite(f Device, c Contents) error {
	img, err := Encode(c)
	if err != nil {
		return err
	}
	return Replace(f, img)
}

func replace(f Device, img []byte) error {
	if payload := readRecord(f); payload != nil && isBlank(f) {
		// An earlier Replace was interrupted, so the record is the only copy.
		if err := writeWhole(f, payload, half); err != nil {
			return err
		}
	}
	payload := trimmed(img)
	if len(payload) > half-sectorSize || !secondHalfIsFree(f) {
		return writeWhole(f, payload, ondisk.SlotSize)
	}
	header := make([]byte, sectorSize)
	copy(header, recordMagic)
	sum := sha256.Sum256(payload)
	copy(header[recordDigest:], sum[:])
	binary.LittleEndian.PutUint32(header[recordLength:], uint32(len(payload)))
	// The digest detects an incomplete record, so these two writes may reach the disk in any order.
	if _, err := f.WriteAt(payload, half+sectorSize); err != nil {
		return err
	}
	if err := write(f, half, header); err != nil {
		return err
	}
	if err := writeWhole(f, payload, half); err != nil {
		return err
	}
	// The header is erased last, because it marks the second half as in use.
	if err := writeZeros(f, half+sectorSize, ondisk.SlotSize); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return write(f, half, make([]byte, sectorSize))
}

func write(f Writer, off int64, b []byte) error {
	if _, err := f.WriteAt(b, off); err != nil {
		return err
	}
	return f.Sync()
}

// trimmed returns img without zero sectors at its end.
func trimmed(img []byte) []byte {
	var zero [sectorSize]byte
	for n := len(img) % sectorSize; ; n = sectorSize {
		rest := len(img) - n
		if rest < 0 || !bytes.Equal(img[rest:], zero[:n]) {
			return img
		}
		img = img[:rest]
	}
}

func isBlank(r io.ReaderAt) bool {
	first := make([]byte, sectorSize)
	_, err := r.ReadAt(first, 0)
	return err == nil && len(bytes.TrimLeft(first, "\x00")) == 0
}

// readHeader returns the header of a record, or nil if there is none. The record itself may be
// incomplete.
func readHeader(r io.ReaderAt) []byte {
	header := make([]byte, sectorSize)
	if _, err := r.ReadAt(header, half); err != nil || !bytes.HasPrefix(header, []byte(recordMagic)) {
		return nil
	}
	return header
}

// readRecord returns the contents of a record, or nil if there is no complete one.
func readRecord(r io.ReaderAt) []byte {
	header := readHeader(r)
	if header == nil {
		return nil
	}
	n := binary.LittleEndian.Uint32(header[recordLength:])
	if n < 2*sectorSize || n > half-sectorSize {
		return nil
	}
	payload := make([]byte, n)
	if _, err := r.ReadAt(payload, half+sectorSize); err != nil {
		return nil
	}
	if sum := sha256.Sum256(payload); !bytes.Equal(sum[:], header[recordDigest:recordDigest+len(sum)]) {
		return nil
	}
	return payload
}

// secondHalfIsFree reports whether the second half of the slot has no file and no directory.
func secondHalfIsFree(f Device) bool {
	if isBlank(f) {
		return true // there are no contents to lose
	}
	in, err := open(f)
	if err != nil || in.fat.Size() != ondisk.SlotSize {
		return false
	}
	free := true
	err = in.fat.Walk(func(e fat.Entry) error {
		if !e.Dir && e.Size == 0 {
			return nil
		}
		extents, err := in.fat.Extents(e.Path)
		for _, x := range extents {
			free = free && x.Off+x.Len <= half
		}
		return err
	})
	return err == nil && free
}
