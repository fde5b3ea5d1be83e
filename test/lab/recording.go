package lab

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Recording is one run of a machine as its disk saw it, from power-on until the power was cut.
// Tests can cut the power after any of its entries.
type Recording struct {
	// Disk is a raw file with the state of the disk after the last Cut. It may be read and booted,
	// but not changed.
	Disk string

	disk, log *os.File
	entries   []entry
	done      int // number of entries that were applied to Disk
	undo      []old
}

// old is data that a write replaced. The next cut restores it, because the last cut kept that write
// by chance.
type old struct {
	at   int64
	data []byte
}

// Recorded returns the current size of the record, for Recording.At.
func (vm *VM) Recorded() (int64, error) {
	fi, err := os.Stat(vm.writes())
	if err != nil {
		return 0, fmt.Errorf("reading the record of the writes of %s: %w", vm.Name, err)
	}
	return fi.Size(), nil
}

// Recording opens the record of a machine whose power was cut. The machine must not be switched on
// again.
func (vm *VM) Recording() (*Recording, error) {
	if !vm.cfg.Record || vm.Running() {
		return nil, fmt.Errorf("opening the record of the writes of %s: the machine is running, or its writes are not recorded", vm.Name)
	}
	r := &Recording{Disk: vm.settled()}
	var err error
	if r.disk, err = os.OpenFile(r.Disk, os.O_RDWR, 0); err != nil {
		return nil, err
	}
	vm.lab.onClose(r.disk.Close)
	if r.log, err = os.Open(vm.writes()); err != nil {
		return nil, err
	}
	vm.lab.onClose(r.log.Close)
	r.entries, err = readRecord(r.log)
	return r, err
}

// Len returns the number of entries.
func (r *Recording) Len() int { return len(r.entries) }

// At returns the number of entries that the record had when it had this size.
func (r *Recording) At(size int64) int {
	n := 0
	for n < len(r.entries) && r.entries[n].at+r.entries[n].n <= size {
		n++
	}
	return n
}

// Flushes returns, for each flush, the number of entries up to and including it. It omits numbers
// up to from.
func (r *Recording) Flushes(from int) []int {
	var out []int
	for i, e := range r.entries {
		if e.flush && i+1 > from {
			out = append(out, i+1)
		}
	}
	return out
}

// Cut gives Disk the state after a power cut that follows the first n entries. n must not decrease.
// A write since the last flush is lost if lose returns true.
func (r *Recording) Cut(n int, lose func() bool) (Loss, error) {
	var loss Loss
	promised := lastFlush(r.entries[:n])
	if promised < r.done {
		return loss, fmt.Errorf("cutting the power after entry %d: the power was cut after a later entry before", n)
	}
	if err := r.takeBack(); err != nil {
		return loss, err
	}
	for ; r.done < promised; r.done++ {
		if err := r.entries[r.done].write(r.log, r.disk); err != nil {
			return loss, err
		}
	}
	loss.Kept = promised
	for _, e := range r.entries[promised:n] {
		if e.n == 0 || !loss.count(e.fua, lose) {
			continue
		}
		was := make([]byte, e.n)
		if _, err := r.disk.ReadAt(was, e.to); err != nil && err != io.EOF {
			return loss, fmt.Errorf("reading the bytes that a write replaces: %w", err)
		}
		r.undo = append(r.undo, old{e.to, was})
		if err := e.write(r.log, r.disk); err != nil {
			return loss, err
		}
	}
	return loss, nil
}

// takeBack reverts the writes that the last cut kept by chance.
func (r *Recording) takeBack() error {
	for len(r.undo) > 0 {
		last := r.undo[len(r.undo)-1]
		if _, err := r.disk.WriteAt(last.data, last.at); err != nil {
			return fmt.Errorf("undoing a write: %w", err)
		}
		r.undo = r.undo[:len(r.undo)-1]
	}
	return nil
}

// CopyPart copies a part of Disk, including its holes, to a file, for programs that repair the file
// that they read.
func (r *Recording) CopyPart(path string, start, size int64) error {
	if err := copySparse(path, r.Disk, start, size); err != nil {
		return fmt.Errorf("copying %d bytes at %d of %s: %w", size, start, r.Disk, err)
	}
	return nil
}

func copySparse(path, disk string, start, size int64) error {
	in, err := os.Open(disk)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer out.Close() // closing it twice is harmless
	end := start + size
	for pos := start; pos < end; {
		data, err := in.Seek(pos, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) || err == nil && data >= end {
			break // a hole up to the end of the file
		}
		if err != nil {
			return err
		}
		hole, err := in.Seek(data, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		pos = min(hole, end)
		if _, err := io.Copy(io.NewOffsetWriter(out, data-start), io.NewSectionReader(in, data, pos-data)); err != nil {
			return err
		}
	}
	return errors.Join(out.Truncate(size), out.Close())
}
