package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/procgroup"
	"github.com/edgebake/edgebake/builder/qemu"
	"github.com/edgebake/edgebake/configs/printable"
	"github.com/spf13/cobra"
)

// leastMemory is what firmware and kernel start with, in MiB; with less they stop
// without a word.
const leastMemory = 256

func newBoot(s streams) *cobra.Command {
	var (
		m       qemu.Machine
		accel   string
		forward []string
		size    int64
		secure  bool
	)
	c := &cobra.Command{
		Use:               "boot IMAGE",
		ValidArgsFunction: completeFiles(imageEndings),
		Short:             "Try an image in QEMU",
		Long: `Boot starts an image in a virtual machine with its console on this terminal
(Ctrl-C ends it). IMAGE may also be a disk that one was flashed to. All that the
machine writes is thrown away at the end; the image stays as it is. Through
QEMU's network the machine reaches this one's loopback as 10.0.2.2. KVM is used
when a short try shows that it works.`,
		Example: `  edgebake boot my-edge.raw
  edgebake boot my-edge.raw --memory 1024 --forward 2222:22`,
		Args: args(1, 1, "one image (.raw), or a disk"),
		RunE: func(c *cobra.Command, a []string) error {
			var errs []error
			nic := qemu.NIC{}
			for _, f := range forward {
				fw, err := parseForward(f)
				errs = append(errs, err)
				nic.Forwards = append(nic.Forwards, fw)
			}
			if accel != "" && accel != qemu.KVM && accel != qemu.TCG {
				errs = append(errs, fmt.Errorf("--accel %s: want kvm or tcg", accel))
			}
			if m.CPUs < 1 {
				errs = append(errs, fmt.Errorf("--cpus %d: want 1 or more", m.CPUs))
			}
			if m.Memory < leastMemory {
				errs = append(errs, fmt.Errorf("--memory %d: it is in MiB: want %d or more; a node needs 1024", m.Memory, leastMemory))
			}
			if size < 0 {
				errs = append(errs, fmt.Errorf("--disk %d: want a size in GiB, or 0 for the image's own", size))
			}
			if err := errors.Join(errs...); err != nil {
				return usageError{err}
			}
			m.NICs = []qemu.NIC{nic}
			return bootImage(c.Context(), s, a[0], m, accel, size<<30, secure)
		},
	}
	f := c.Flags()
	f.IntVar(&m.CPUs, "cpus", 2, "processors")
	f.IntVar(&m.Memory, "memory", 2048, "memory in MiB")
	f.Int64Var(&size, "disk", 8, "size of the disk in GiB, as of a device the image was written to; 0: the image's own")
	f.StringVar(&accel, "accel", "", "kvm or tcg (default: what a short try shows to work)")
	f.StringArrayVar(&forward, "forward", nil, "`HOST:GUEST` port to forward from this machine's loopback, repeatable")
	f.BoolVar(&secure, "secure-boot", false, "firmware with Secure Boot switched on")
	return c
}

func parseForward(s string) (qemu.Forward, error) {
	h, g, ok := strings.Cut(s, ":")
	host, err1 := strconv.Atoi(h)
	guest, err2 := strconv.Atoi(g)
	if port := func(n int) bool { return n > 0 && n < 1<<16 }; !ok || err1 != nil || err2 != nil || !port(host) || !port(guest) {
		return qemu.Forward{}, fmt.Errorf("--forward %s: want HOST:GUEST, two ports, like 2222:22", s)
	}
	return qemu.Forward{Host: host, Guest: guest}, nil
}

func bootImage(ctx context.Context, s streams, image string, m qemu.Machine, accel string, size int64, secure bool) error {
	info, err := media.Inspect(image)
	if err != nil {
		return err
	}
	if info.Format != media.FormatRaw {
		return fmt.Errorf("booting %s: it is compressed; zstd -d %s -o NAME.raw first", image, image)
	}
	if boards := info.Image.Boards; len(boards) > 0 {
		return fmt.Errorf("booting %s: it is for %s, whose firmware no virtual machine has: build the Image with hardware: generic or cloud to try it here, or flash it to a card", image, strings.Join(boards, " and "))
	}
	m.Arch = info.Image.Arch
	prog, err := qemu.Find(ctx, m.Arch)
	fw, noFirmware := qemu.FindFirmware(qemu.ShareDirs(), m.Arch, secure)
	if err := errors.Join(err, noFirmware); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "edgebake-boot-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if accel == "" {
		var why string
		if accel, why = qemu.Probe(ctx, prog, fw, m.Arch, qemu.ProbeLimit); why != "" {
			s.hint("Without KVM (%s; --accel tcg does not try it): expect a minute or two to the first login.\n", why)
		}
	}
	m.Accel = accel
	if m.Firmware, err = fw.OwnVars(filepath.Join(dir, "vars.fd")); err != nil {
		return err
	}
	if size < info.Size {
		size = 0
	}
	overlay := filepath.Join(dir, "disk.qcow2")
	if err := qemu.Overlay(ctx, image, overlay, size); err != nil {
		return err
	}
	m.Disks = []qemu.Disk{{Path: overlay, Sector: info.SectorSize}}
	m.Serial = "terminal"
	argv, err := m.Args(prog.Version)
	if err != nil {
		return err
	}
	cmd := procgroup.Command(ctx, prog.Path, argv...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = s.rawInput(), s.bytes(), printable.Raw(s.Err)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second
	err = cmd.Run()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("booting %s: %s: %w", image, filepath.Base(prog.Path), err)
	}
	return nil
}
