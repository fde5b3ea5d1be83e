package site

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// slack is the number of bytes after DATA that may be unused, for the backup GPT and for alignment.
const slack = 8 << 20

// journal is the size of the largest ext4 journal, in bytes.
const journal = 256 << 20

// oneDisk checks that / and /var are on the same disk. Two dd copies of an image have equal GUIDs,
// so the machine could use / of one copy and /var of the other.
func oneDisk(e *machine.Env) error {
	root, err := e.RootDisk()
	part, disk := e.MountedFrom("/var")
	if err != nil || disk == "" || disk == root.Name {
		return nil // all on one disk, or edgebake did not build this node
	}
	fix := "remove one of the disks; or write one again with edgebake flash, which gives it its own GUIDs"
	if member.Rewriting(e, "") != "" {
		fix += "; keep " + disk + ", which has the data of this machine"
	}
	return run.NeedsPerson(fmt.Errorf("/ is on %s, but /var is on %s, on another disk: %s", root.Root, part, loaderWords(e.DisksWith(e.LoaderPart()))), fix)
}

// loaderWords describes which disks may contain the boot loader's partition.
func loaderWords(disks []string) string {
	switch len(disks) {
	case 0:
		return "two copies of one image are in this machine"
	case 1:
		return "the boot loader was started from " + disks[0]
	}
	return "two copies of one image are in this machine; each of these disks has the boot loader's partition: " + strings.Join(disks, " and ")
}

// DiskPhase calls systemd-repart and systemd-growfs if they have not grown DATA early in the boot.
// If DATA cannot grow, it reports that and continues.
func DiskPhase() run.Phase {
	p := &diskPhase{}
	return run.Phase{Name: "disk", Doc: "DATA fills the device", Timeout: 5 * time.Minute, Check: p.check, Run: p.run}
}

// diskPhase is the phase disk of one pass.
type diskPhase struct {
	tried bool // DATA was grown, or growing it failed, in this pass
}

func (p *diskPhase) check(_ context.Context, e *machine.Env) (run.Verdict, error) {
	d, data, err := dataPartition(e)
	if err != nil {
		return run.Todo, err
	}
	if p.tried || notGrown(e, d, data) == nil {
		return run.Done, nil
	}
	return run.Todo, nil
}

func (p *diskPhase) run(ctx context.Context, e *machine.Env) error {
	d, data, err := dataPartition(e)
	if err != nil {
		return err
	}
	err = grow(ctx, e, d, data)
	if errors.Is(ctx.Err(), context.Canceled) {
		return err // stopped from outside, so the disk may be in order
	}
	p.tried = true
	if err == nil {
		if d, data, err = dataPartition(e); err == nil {
			err = notGrown(e, d, data)
		}
	}
	if err != nil {
		e.Log.Warn("DATA did not grow", "error", err)
		e.Note("DATA does not use all the free space after it: %s. The node continues with the current size", machine.OneLine(err))
	}
	return nil
}

func dataPartition(e *machine.Env) (*machine.Disk, *machine.Partition, error) {
	d, err := e.LookUpRootDisk()
	if err != nil {
		return nil, nil, err
	}
	data := d.Part(ondisk.LabelData)
	if data == nil {
		return nil, nil, run.NeedsPerson(fmt.Errorf("disk %s has no partition %s", d.Name, ondisk.LabelData),
			member.Rewriting(e, "the image was not written completely; write it to the device again"))
	}
	return d, data, nil
}

// freeAfter returns the bytes between a partition and the next one, or the end of the disk. A
// person may have added a partition after DATA.
func freeAfter(d *machine.Disk, p *machine.Partition) int64 {
	next := d.Size
	for _, other := range d.Parts {
		if other.Start > p.Start {
			next = min(next, other.Start)
		}
	}
	return next - (p.Start + p.Size)
}

// notGrown returns an error if DATA's partition or file system is smaller than possible.
func notGrown(e *machine.Env, d *machine.Disk, data *machine.Partition) error {
	if free := freeAfter(d, data); free > slack {
		return fmt.Errorf("%s after partition %s are free", bytesize.MiB(free), data.Name)
	}
	fs, err := e.FSSize("/var")
	if err != nil {
		return fmt.Errorf("reading the size of DATA's file system: %w", err)
	}
	// ext4 reports its size without its tables and its journal. A file system that was not grown is
	// far smaller.
	if fs < data.Size-data.Size/8-journal {
		return fmt.Errorf("the file system on %s has %s of the partition's %s", data.Name, bytesize.MiB(fs), bytesize.MiB(data.Size))
	}
	return nil
}

// grow grows the partition if there is free space after it, and then the file system.
func grow(ctx context.Context, e *machine.Env, d *machine.Disk, data *machine.Partition) error {
	var errs []error
	if freeAfter(d, data) > slack {
		e.Waiting("systemd-repart to grow %s", data.Name)
		if err := e.Run(ctx, machine.Cmd{Args: []string{"systemd-repart", "--dry-run=no", "/dev/" + d.Name}}); err != nil {
			errs = append(errs, fmt.Errorf("growing partition %s: %w", data.Name, err))
		}
	}
	e.Waiting("the file system on %s to grow", data.Name)
	if err := e.Run(ctx, machine.Cmd{Args: []string{"/usr/lib/systemd/systemd-growfs", "/var"}}); err != nil {
		errs = append(errs, fmt.Errorf("growing the file system of %s: %w", data.Name, err))
	}
	return errors.Join(errs...)
}
