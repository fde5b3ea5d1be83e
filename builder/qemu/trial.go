package qemu

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/edgebake/edgebake/builder/procgroup"
)

// Trial boots an image and discards everything that the machine writes.
type Trial struct {
	Image      string // a raw image or a disk
	Size       int64  // size of the image in bytes
	SectorSize int64
	DiskSize   int64 // size of the machine's disk in bytes; if it is less than Size, the disk has the size of the image
	SecureBoot bool
	// Machine.Accel may be empty. KVM is then used if a short test of it succeeds.
	Machine
	// SlowWithout, if set, is called with the reason if KVM does not work.
	SlowWithout    func(why string)
	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

// Run boots the machine with its console on the streams. It returns when the machine or the context
// ends.
func (t *Trial) Run(ctx context.Context) error {
	m := t.Machine
	prog, err := Find(ctx, m.Arch)
	if err != nil {
		return err
	}
	fw, err := FindFirmware(ShareDirs(), m.Arch, t.SecureBoot)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "edgebake-boot-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if m.Accel == "" {
		var why string
		if m.Accel, why = Probe(ctx, prog, fw, m.Arch, ProbeLimit); why != "" && t.SlowWithout != nil {
			t.SlowWithout(why)
		}
	}
	if m.Firmware, err = fw.OwnVars(filepath.Join(dir, "vars.fd")); err != nil {
		return err
	}
	size := t.DiskSize
	if size < t.Size {
		size = 0
	}
	overlay := filepath.Join(dir, "disk.qcow2")
	if err := Overlay(ctx, t.Image, overlay, size); err != nil {
		return err
	}
	m.Disks = []Disk{{Path: overlay, Sector: t.SectorSize}}
	m.Serial = "terminal"
	argv, err := m.Args(prog.Version)
	if err != nil {
		return err
	}
	cmd := procgroup.Command(ctx, prog.Path, argv...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = t.Stdin, t.Stdout, t.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	err = cmd.Run()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("booting %s: %s: %w", t.Image, filepath.Base(prog.Path), err)
	}
	return nil
}
