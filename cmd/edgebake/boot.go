package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/qemu"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/configs/printable"
	"github.com/spf13/cobra"
)

// leastMemory is the memory in MiB that firmware and kernel need to start. With less, they stop
// without a message.
const leastMemory = 256

func newBoot(s streams) *cobra.Command {
	var t qemu.Trial
	var forward []string
	var size int64 // size of the disk in GiB
	c := &cobra.Command{
		Use:               "boot IMAGE",
		ValidArgsFunction: cli.CompleteFiles(cli.ImageExtensions),
		Short:             "Try an image in QEMU",
		Long: `Boot starts an image in a virtual machine with its console on this terminal
(Ctrl-C ends it). IMAGE may also be a flashed disk. Everything that the machine
writes is discarded at the end; the image stays as it is. The machine reaches this
computer's loopback as 10.0.2.2. KVM is used if a short test shows that it works.`,
		Example: `  edgebake boot my-edge.raw
  edgebake boot my-edge.raw --memory 1024 --forward 2222:22`,
		Args: cli.Args(1, 1, "one image (.raw), or a disk"),
		RunE: func(c *cobra.Command, a []string) error {
			var errs []error
			nic := qemu.NIC{}
			for _, f := range forward {
				fw, err := parseForward(f)
				errs = append(errs, err)
				nic.Forwards = append(nic.Forwards, fw)
			}
			if t.Accel != "" && t.Accel != qemu.KVM && t.Accel != qemu.TCG {
				errs = append(errs, fmt.Errorf("--accel %s: want kvm or tcg", t.Accel))
			}
			if t.CPUs < 1 {
				errs = append(errs, fmt.Errorf("--cpus %d: want 1 or more", t.CPUs))
			}
			if t.Memory < leastMemory {
				errs = append(errs, fmt.Errorf("--memory %d: want at least %d MiB; a node needs 1024", t.Memory, leastMemory))
			}
			if size < 0 {
				errs = append(errs, fmt.Errorf("--disk %d: want a size in GiB, or 0 for the size of the image", size))
			}
			if err := errors.Join(errs...); err != nil {
				return cli.Usage(err)
			}
			t.NICs, t.DiskSize = []qemu.NIC{nic}, size<<30
			return bootImage(c.Context(), s, a[0], t)
		},
	}
	f := c.Flags()
	f.IntVar(&t.CPUs, "cpus", 2, "processors")
	f.IntVar(&t.Memory, "memory", 2048, "memory in MiB")
	f.Int64Var(&size, "disk", 8, "size of the machine's disk in GiB; 0: the size of the image")
	f.StringVar(&t.Accel, "accel", "", "kvm or tcg (default: kvm if a short test shows that it works)")
	f.StringArrayVar(&forward, "forward", nil, "`HOST:GUEST` port to forward from this machine's loopback, repeatable")
	f.BoolVar(&t.SecureBoot, "secure-boot", false, "firmware with Secure Boot switched on")
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

func bootImage(ctx context.Context, s streams, image string, t qemu.Trial) error {
	info, err := media.Inspect(image)
	if err != nil {
		return err
	}
	if info.Format != media.FormatRaw {
		return fmt.Errorf("booting %s: the image is compressed; first run zstd -d %s -o NAME.raw", image, image)
	}
	if boards := info.Image.Boards; len(boards) > 0 {
		return fmt.Errorf("booting %s: the image is for %s, and QEMU does not have that firmware; to try the Image here, build it with hardware: generic or cloud", image, strings.Join(boards, " and "))
	}
	t.Image, t.Size, t.SectorSize, t.Arch = image, info.Size, info.SectorSize, info.Image.Arch
	t.Stdin, t.Stdout, t.Stderr = s.RawInput(), s.Bytes(), printable.Raw(s.Err)
	t.SlowWithout = func(why string) {
		s.Hint("KVM is not available (%s), so the boot is slow: the first login takes a minute or two. To skip the test of KVM, add --accel tcg.\n", why)
	}
	return t.Run(ctx)
}
