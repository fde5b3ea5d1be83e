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

// A slot that a machine writes itself must not be lost to a power cut: what is
// to be written may be nowhere else. So the new contents are written into the
// slot's second half first, as a record with a digest, while the old ones stand
// in the first half; whoever finds the first sector zero reads the record.

const (
	half         = ondisk.SlotSize / 2
	sectorSize   = 512
	recordMagic  = "EDGEBAKE SLOT RECORD 1\n"
	recordDigest = 64 // offset of the payload's SHA-256 in the header sector
	recordLength = 96 // and of its length
)

// Replace writes a slot, which Make or Encode has made, so that a power cut leaves
// the old contents or the new ones. Where a file of the old ones lies in the slot's
// second half, or the new ones are too large for half a slot, it is WriteWhole.
func Replace(f Device, img []byte) error {
	if err := replace(f, img); err != nil {
		return fmt.Errorf("writing the slot: %w", err)
	}
	return nil
}

// Rewrite is Replace by c.
func Rewrite(f Device, c Contents) error {
	img, err := Encode(c)
	if err != nil {
		return err
	}
	return Replace(f, img)
}

func replace(f Device, img []byte) error {
	if payload := readRecord(f); payload != nil && isBlank(f) {
		// An earlier Replace was cut off: what it had to write is nowhere else.
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
	// The digest tells a record that was cut off, so both may be stored in any order.
	if _, err := f.WriteAt(payload, half+sectorSize); err != nil {
		return err
	}
	if err := write(f, half, header); err != nil {
		return err
	}
	if err := writeWhole(f, payload, half); err != nil {
		return err
	}
	// The header goes last: while it is there, so may be what it heads.
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

// trimmed is img without the zero sectors at its end.
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

// readHeader returns the header of a record, whether the record is whole or
// not; nil if there is none.
func readHeader(r io.ReaderAt) []byte {
	header := make([]byte, sectorSize)
	if _, err := r.ReadAt(header, half); err != nil || !bytes.HasPrefix(header, []byte(recordMagic)) {
		return nil
	}
	return header
}

// readRecord returns what a Replace that was cut off had to write; nil where there
// is not such a record, or only part of one.
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

// secondHalfIsFree reports whether no file and no directory of the slot lies
// there.
func secondHalfIsFree(f Device) bool {
	if isBlank(f) {
		return true // there is nothing to lose
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
