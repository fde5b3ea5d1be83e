// Package qemu puts together command lines that boot a disk image in QEMU the
// way a machine would: through UEFI firmware, on virtio devices, with the
// serial port as console. It finds QEMU and its firmware, and finds out
// whether KVM works by running a small guest, since a /dev/kvm that opens may
// still hang every kernel.
//
// A Machine is plain data and Args is pure. An image is never written:
// machines run on a qcow2 overlay that the caller throws away. Nothing secret
// belongs on a command line, which every user of the host can read; the slot
// of the image carries secrets.
package qemu

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Accelerators.
const (
	KVM = "kvm"
	TCG = "tcg" // emulation: right everywhere, 10 to 30 times slower
)

// Buses for removable drives.
const (
	USB  = "usb"
	SCSI = "scsi"
)

// Machine is one virtual machine.
type Machine struct {
	Arch  string // amd64 (default) or arm64
	Accel string // KVM or TCG (default)
	// CPUs and Memory (MiB); defaults 2 and 2048.
	CPUs, Memory int
	// Firmware boots the first disk; with Kernel set there is none.
	Firmware Firmware
	// Kernel boots directly, without firmware and loader.
	Kernel, Initrd, KernelArgs string

	Disks []Disk
	NICs  []NIC
	// Sticks is the bus that removable drives are plugged into while the
	// machine runs: USB, or SCSI for kernels that know no USB; empty: none.
	Sticks string
	// Watchdog is a hardware watchdog that resets a machine that hangs.
	Watchdog bool
	// Serial is the console: "stdio" (default), "terminal" (stdio where
	// Ctrl-A X ends QEMU), or a file's path.
	Serial string
	// QMP is the path of a socket for commands to QEMU; empty: none.
	QMP string
	// UUID and SerialNumber are what the machine's SMBIOS says.
	UUID, SerialNumber string
	// Clock is the hardware clock's start, as in 2026-01-31T12:00:00;
	// empty: now.
	Clock string
	// NoReboot makes a reset end QEMU.
	NoReboot bool
}

// Firmware is UEFI firmware: read-only code, and a file of variables that
// belongs to one machine and is written.
type Firmware struct {
	Code, Vars string
	// Secure code runs in system management mode and needs it set up.
	Secure bool
}

// Disk is a virtio disk. It is treated as one to be thrown away: writes are
// not made durable on the host, unless Sync is set.
type Disk struct {
	Path   string
	Format string // qcow2 (default) or raw
	Serial string
	Sync   bool
	// Log is a file, there and empty, that records every write and flush, in
	// the format of the kernel's dm-log-writes: what a disk's cache may lose
	// in a power cut can be told from it.
	Log string
}

// NIC is a network card, on a tap device or on QEMU's own user-mode network.
type NIC struct {
	MAC string
	Tap string
	// Forwards, for user-mode networking: connections to ports of the
	// host's loopback go to ports of the guest. In it the guest reaches the
	// host's loopback as 10.0.2.2.
	Forwards []Forward
}

// Forward is one forwarded TCP port.
type Forward struct{ Host, Guest int }

// Args returns the arguments for a QEMU of that version, or all that is wrong
// with the machine.
func (m Machine) Args(v Version) ([]string, error) {
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	arch := or(m.Arch, "amd64")
	accel := or(m.Accel, TCG)
	if !slices.Contains([]string{"amd64", "arm64"}, arch) {
		bad("architecture %q: want amd64 or arm64", arch)
	}
	if !slices.Contains([]string{KVM, TCG}, accel) {
		bad("accelerator %q: want kvm or tcg", accel)
	}
	if m.Kernel == "" && (m.Firmware.Code == "" || m.Firmware.Vars == "") {
		bad("neither firmware nor a kernel to boot")
	}
	if m.Kernel != "" && m.Firmware.Code != "" {
		bad("both firmware and a kernel to boot; choose one")
	}
	if m.CPUs < 0 || m.Memory < 0 {
		bad("%d CPUs and %d MiB of memory", m.CPUs, m.Memory)
	}

	args := []string{"-nodefaults", "-no-user-config", "-display", "none", "-vga", "none"}
	machine := "q35"
	if arch == "arm64" {
		machine = "virt"
		if accel == KVM {
			machine = "virt,gic-version=host"
		}
	}
	if m.Firmware.Secure {
		if arch != "amd64" {
			bad("secure firmware on %s", arch)
		}
		machine += ",smm=on"
		args = append(args, "-global", "driver=cfi.pflash01,property=secure,value=on")
	}
	args = append(args, "-machine", machine, "-cpu", cpu(arch, accel, v))
	if accel == TCG {
		args = append(args, "-accel", "tcg,thread=multi,tb-size=256")
	} else {
		args = append(args, "-accel", "kvm")
	}
	args = append(args, "-smp", strconv.Itoa(or(m.CPUs, 2)), "-m", strconv.Itoa(or(m.Memory, 2048)))

	if m.Kernel != "" {
		args = append(args, "-kernel", m.Kernel)
		if m.Initrd != "" {
			args = append(args, "-initrd", m.Initrd)
		}
		if m.KernelArgs != "" {
			args = append(args, "-append", m.KernelArgs)
		}
	} else {
		args = append(args,
			"-drive", "if=pflash,format=raw,readonly=on,file="+value(m.Firmware.Code),
			"-drive", "if=pflash,format=raw,file="+value(m.Firmware.Vars))
	}
	for i, d := range m.Disks {
		if d.Path == "" {
			bad("disk %d has no path", i)
		}
		cache := "unsafe"
		if d.Sync {
			cache = "none"
		}
		if d.Log != "" {
			if d.Sync {
				bad("disk %d is both durable and logged; choose one", i)
			}
			// Flushes are recorded, and not waited for below that.
			args = append(args,
				"-blockdev", fmt.Sprintf("driver=%s,node-name=data%d,cache.no-flush=on,discard=unmap,file.driver=file,file.cache.no-flush=on,file.filename=%s", or(d.Format, "qcow2"), i, value(d.Path)),
				"-blockdev", fmt.Sprintf("driver=file,node-name=log%d,cache.no-flush=on,filename=%s", i, value(d.Log)),
				"-blockdev", fmt.Sprintf("driver=blklogwrites,node-name=disk%[1]d,file=data%[1]d,log=log%[1]d", i))
		} else {
			args = append(args, "-drive", fmt.Sprintf("if=none,id=disk%d,format=%s,cache=%s,discard=unmap,file=%s", i, or(d.Format, "qcow2"), cache, value(d.Path)))
		}
		dev := fmt.Sprintf("virtio-blk-pci,drive=disk%d,bootindex=%d", i, i)
		if d.Serial != "" {
			dev += ",serial=" + value(d.Serial)
		}
		args = append(args, "-device", dev)
	}
	for i, n := range m.NICs {
		if n.Tap != "" && len(n.Forwards) > 0 {
			bad("network card %d is on tap %s: ports are forwarded in user-mode networking only", i, n.Tap)
		}
		netdev := fmt.Sprintf("user,id=net%d", i)
		if n.Tap != "" {
			netdev = fmt.Sprintf("tap,id=net%d,ifname=%s,script=no,downscript=no", i, value(n.Tap))
		}
		for _, f := range n.Forwards {
			if !port(f.Host) || !port(f.Guest) {
				bad("forwarding port %d to %d: want 1 to 65535", f.Host, f.Guest)
			}
			netdev += fmt.Sprintf(",hostfwd=tcp:127.0.0.1:%d-:%d", f.Host, f.Guest)
		}
		dev := fmt.Sprintf("virtio-net-pci,netdev=net%d", i)
		if n.MAC != "" {
			dev += ",mac=" + n.MAC
		}
		// Without a boot ROM the firmware does not try the network.
		args = append(args, "-netdev", netdev, "-device", dev+",romfile=")
	}
	switch m.Sticks {
	case "":
	case USB:
		args = append(args, "-device", "qemu-xhci")
	case SCSI:
		args = append(args, "-device", "virtio-scsi-pci")
	default:
		bad("bus %q for removable drives: want usb or scsi", m.Sticks)
	}
	if m.Watchdog {
		args = append(args, "-device", "i6300esb")
	}
	// Entropy from the host: a guest without it waits at its first keys.
	args = append(args, "-device", "virtio-rng-pci")
	switch s := or(m.Serial, "stdio"); s {
	case "stdio":
		args = append(args, "-serial", "stdio")
	case "terminal":
		args = append(args, "-serial", "mon:stdio")
	default:
		args = append(args, "-serial", "file:"+s)
	}
	if m.QMP != "" {
		args = append(args, "-qmp", "unix:"+value(m.QMP)+",server=on,wait=off")
	}
	if m.UUID != "" {
		args = append(args, "-uuid", m.UUID)
	}
	if m.SerialNumber != "" {
		args = append(args, "-smbios", "type=1,serial="+value(m.SerialNumber))
	}
	if m.Clock != "" {
		args = append(args, "-rtc", "base="+m.Clock)
	}
	if m.NoReboot {
		args = append(args, "-no-reboot")
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("setting up a virtual machine: %w", err)
	}
	return args, nil
}

// cpu chooses a model with all that kernels and programs of today may ask
// for.
func cpu(arch, accel string, v Version) string {
	switch {
	case accel == KVM:
		return "host"
	case arch == "amd64" && v.Major < 8:
		// QEMU 7 emulates cmpxchg16b wrongly: every second boot of a 6.12
		// kernel panics.
		return "max,-cx16"
	}
	return "max"
}

// value writes a value so that QEMU's option syntax takes it whole.
func value(s string) string { return strings.ReplaceAll(s, ",", ",,") }

func port(n int) bool { return n > 0 && n < 1<<16 }

func or[T comparable](v, def T) T {
	var zero T
	if v == zero {
		return def
	}
	return v
}
