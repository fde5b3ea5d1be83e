package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/edgebake/edgebake/builder/qemu"
)

// A disk acknowledges a write once the bytes are in its cache; only the next flush makes them
// durable. Killing QEMU loses none of them, because this host keeps running.
//
// Therefore a recorded machine runs on an overlay over the durable state of its disk, and its
// writes and flushes are recorded. A power cut discards the overlay. Then it applies all flushed
// writes, and a random selection of the others, to the durable state.

// settled returns the path of the raw disk that has the durable state.
func (vm *VM) settled() string { return filepath.Join(vm.lab.Dir, vm.Name+".settled.raw") }

// writes returns the path of the record of the current run.
func (vm *VM) writes() string { return filepath.Join(vm.lab.Dir, vm.Name+".writes") }

// ownDisk copies the image to a disk that the machine can write to.
func (vm *VM) ownDisk(ctx context.Context) error {
	out, err := exec.CommandContext(ctx, "cp", "--sparse=always", "--reflink=auto", vm.cfg.Image, vm.settled()).CombinedOutput()
	if err != nil {
		return fmt.Errorf("copying %s: cp: %w: %s", vm.cfg.Image, err, out)
	}
	if vm.cfg.Disk > 0 {
		return os.Truncate(vm.settled(), vm.cfg.Disk)
	}
	return nil
}

// freshRun starts an empty overlay and an empty record. If the last run ended in an orderly way, it
// first applies that run's record.
func (vm *VM) freshRun() error {
	if _, err := os.Stat(vm.writes()); err == nil {
		if _, err := vm.settle(func() bool { return false }); err != nil {
			return err
		}
	}
	if err := os.WriteFile(vm.writes(), nil, 0o600); err != nil {
		return err
	}
	return qemu.Overlay(context.Background(), vm.settled(), vm.Overlay, 0)
}

// Loss is the effect of a power cut on a disk.
type Loss struct {
	Kept    int // writes before the last flush, which are always kept
	Chance  int // other writes that were kept by chance
	Dropped int // other writes that were lost
}

// CutPower cuts the power of a recorded machine. It calls lose for each write since the last flush,
// and loses the write if lose returns true.
func (vm *VM) CutPower(lose func() bool) (Loss, error) {
	if !vm.cfg.Record {
		return Loss{}, fmt.Errorf("cutting the power of %s: its writes are not recorded", vm.Name)
	}
	vm.Cut()
	loss, err := vm.settle(lose)
	if err != nil {
		return loss, fmt.Errorf("cutting the power of %s: %w", vm.Name, err)
	}
	return loss, os.Remove(vm.writes())
}

func (vm *VM) settle(lose func() bool) (Loss, error) {
	disk, err := os.OpenFile(vm.settled(), os.O_RDWR, 0)
	if err != nil {
		return Loss{}, err
	}
	defer disk.Close()
	log, err := os.Open(vm.writes())
	if err != nil {
		return Loss{}, err
	}
	defer log.Close()
	return replay(log, disk, lose)
}

// Format of the record: Documentation/admin-guide/device-mapper/log-writes.rst of the Linux kernel.
// All numbers are little-endian.
const (
	logMagic   = 0x6a736677736872
	logFlush   = 1
	logFUA     = 2
	logDiscard = 4
	logMark    = 8
)

// entry is one request in a record.
type entry struct {
	at, to, n int64 // at: offset in the record; to: offset on the disk; n: bytes, 0 for a flush without data
	fua       bool
	flush     bool // all earlier entries are durable after it
}

// replay writes to disk what survives a power cut: everything before the last flush, and the later
// writes that are FUA or for which lose returns false. The record may end within an entry.
func replay(log record, disk io.WriterAt, lose func() bool) (Loss, error) {
	var loss Loss
	entries, err := readRecord(log)
	if err != nil {
		return loss, err
	}
	promised := lastFlush(entries)
	for i, e := range entries {
		if e.n == 0 || !loss.count(i < promised || e.fua, lose) {
			continue
		}
		if err := e.write(log, disk); err != nil {
			return loss, err
		}
	}
	return loss, nil
}

// count counts one write, and reports whether it is kept.
func (l *Loss) count(promised bool, lose func() bool) bool {
	switch {
	case promised:
		l.Kept++
	case lose():
		l.Dropped++
		return false
	default:
		l.Chance++
	}
	return true
}

func (e entry) write(log io.ReaderAt, disk io.WriterAt) error {
	if _, err := io.Copy(io.NewOffsetWriter(disk, e.to), io.NewSectionReader(log, e.at, e.n)); err != nil {
		return fmt.Errorf("replaying a write: %w", err)
	}
	return nil
}

// lastFlush returns the number of entries that are durable.
func lastFlush(entries []entry) int {
	for i, e := range slices.Backward(entries) {
		if e.flush {
			return i
		}
	}
	return 0
}

// record is an open record of a disk's writes.
type record interface {
	io.ReaderAt
	Stat() (os.FileInfo, error)
}

func readRecord(log record) ([]entry, error) {
	fi, err := log.Stat()
	if err != nil {
		return nil, err
	}
	if fi.Size() == 0 {
		return nil, nil // nothing was written
	}
	head := make([]byte, 32)
	if _, err := log.ReadAt(head, 0); err != nil {
		return nil, fmt.Errorf("reading the record of writes: %w", err)
	}
	le := binary.LittleEndian
	sector := int64(le.Uint32(head[24:]))
	if le.Uint64(head) != logMagic || sector < 512 || sector > 4096 {
		return nil, errors.New("reading the record of writes: the file is not such a record")
	}
	var entries []entry
	for pos := sector; ; {
		if _, err := log.ReadAt(head, pos); err != nil {
			break // the end of the record, or an incomplete header
		}
		to, n, flags := int64(le.Uint64(head)), int64(le.Uint64(head[8:])), le.Uint64(head[16:])
		if n == 0 && flags == 0 {
			break // an entry that was being written when the record ended
		}
		pos += sector
		if flags&(logDiscard|logMark) != 0 {
			continue // discarded bytes may keep their old values on the disk
		}
		if pos+n*sector > fi.Size() {
			break
		}
		entries = append(entries, entry{pos, to * sector, n * sector, flags&logFUA != 0, flags&logFlush != 0})
		pos += n * sector
	}
	return entries, nil
}
