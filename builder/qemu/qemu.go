// Package qemu builds command lines that boot a disk image in QEMU as on a real machine: with UEFI
// firmware, virtio devices, and the serial port as the console. It finds QEMU and its firmware, and
// tests KVM with a small guest, because a kernel may hang under KVM although /dev/kvm can be
// opened.
//
// Machine is plain data, and Args is pure. Machines never write to an image, but to a qcow2 overlay
// that the caller removes. A command line must not contain secrets, since every user of the
// computer can read it. The secrets are in the image's slot.
package qemu

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Accelerators.
const (
	KVM = "kvm"
	TCG = "tcg" // emulation: works everywhere, but is 10 to 30 times slower
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
	// CPUs defaults to 2, and Memory (in MiB) to 2048.
	CPUs, Memory int
	// Firmware boots the first disk. It must be empty if Kernel is set.
	Firmware Firmware
	// Kernel boots without firmware and boot loader.
	Kernel, Initrd, KernelArgs string

	Disks []Disk
	NICs  []NIC
	// Sticks is the bus of removable drives that are attached while the machine runs: USB, SCSI for
	// kernels without USB, or empty for none.
	Sticks string
	// Stick is a raw image that is attached from the beginning, and is booted first.
	Stick string
	// CD is an ISO image in an optical drive, which is booted first.
	CD string
	// NetBoot makes the firmware boot from the first network card, if that is possible.
	NetBoot bool
	// HTTPSCAs is an EFI signature list of the CAs that the firmware accepts for HTTPS boot. It is
	// empty for none.
	HTTPSCAs string
	// Watchdog adds a hardware watchdog, which restarts a machine that hangs.
	Watchdog bool
	// Serial is the console: "stdio" (default), "terminal" (stdio, but Ctrl-A X ends QEMU), or the
	// path of a file.
	Serial string
	// QMP is the path of a socket for commands to QEMU. It is empty for none.
	QMP string
	// UUID and SerialNumber are values in the SMBIOS of the machine.
	UUID, SerialNumber string
	// Clock is the initial time of the hardware clock, such as 2026-01-31T12:00:00. If it is empty,
	// the clock has the current time.
	Clock string
	// Counted makes all clocks of the guest count its instructions, one per nanosecond. They follow
	// the host's clock only while the guest is idle. Therefore, a busy host causes no delays or
	// timeouts in the guest. Counted requires TCG, and the CPUs run in turn.
	Counted bool
	// NoReboot makes QEMU exit instead of restarting the machine.
	NoReboot bool
}

// Firmware is UEFI firmware: read-only code, and a file of variables that only one machine may
// write to.
type Firmware struct {
	Code, Vars string
	// Secure means that Secure Boot is enabled. On amd64, this requires system management mode.
	Secure bool
}

// Disk is a virtio disk. Unless Sync is set, its writes are not durable on the host.
type Disk struct {
	Path   string
	Format string // qcow2 (default) or raw
	Serial string
	Sync   bool
	// Sector is the size of its logical and physical sectors in bytes. 0 means 512.
	Sector int64
	// Log is an existing, empty file to which QEMU logs every write and flush, in the format of the
	// kernel's dm-log-writes. It shows which writes a power cut could lose.
	Log string
}

// NIC is a network card. It is connected to a tap device, a Cable, or QEMU's own user-mode network.
type NIC struct {
	MAC string
	Tap string
	// Cable connects the card to a card of another machine. It is nil for none.
	Cable *Cable
	// Forwards are ports of the host's loopback interface that the user-mode network forwards to
	// the guest. The guest reaches the host's loopback interface as 10.0.2.2.
	Forwards []Forward
}

// Cable connects two cards by two sockets. Own is the path of this card's socket, and Other is the
// path of the other card's socket. Each machine may run without the other one.
type Cable struct{ Own, Other string }

// Forward is a forwarded TCP port.
type Forward struct{ Host, Guest int }

// Args returns the arguments for this version of QEMU. The error contains all problems of the
// machine.
func (m Machine) Args(v Version) ([]string, error) {
	m.Arch, m.Accel, m.Serial = cmp.Or(m.Arch, "amd64"), cmp.Or(m.Accel, TCG), cmp.Or(m.Serial, "stdio")
	c := &commandLine{args: []string{"-nodefaults", "-no-user-config", "-display", "none", "-vga", "none"}}
	c.machine(m, v)
	c.boot(m)
	first := 0
	if m.Stick != "" || m.CD != "" || m.NetBoot {
		first = 1
	}
	for i, d := range m.Disks {
		c.disk(i, first+i, d)
	}
	for i, n := range m.NICs {
		c.nic(i, n, m.NetBoot && i == 0)
	}
	c.devices(m)
	c.console(m)
	c.identity(m)
	if err := errors.Join(c.errs...); err != nil {
		return nil, fmt.Errorf("setting up a virtual machine: %w", err)
	}
	return c.args, nil
}

// commandLine collects arguments and errors.
type commandLine struct {
	args []string
	errs []error
}

func (c *commandLine) add(args ...string) { c.args = append(c.args, args...) }

// option adds a flag unless its value is empty.
func (c *commandLine) option(flag, v string) {
	if v != "" {
		c.add(flag, v)
	}
}

func (c *commandLine) bad(format string, a ...any) { c.errs = append(c.errs, fmt.Errorf(format, a...)) }

// machine adds the board, the processors and the memory.
func (c *commandLine) machine(m Machine, v Version) {
	if !slices.Contains([]string{"amd64", "arm64"}, m.Arch) {
		c.bad("architecture %q: want amd64 or arm64", m.Arch)
	}
	if !slices.Contains([]string{KVM, TCG}, m.Accel) {
		c.bad("accelerator %q: want kvm or tcg", m.Accel)
	}
	if m.CPUs < 0 || m.Memory < 0 {
		c.bad("%d CPUs and %d MiB of memory: want 1 or more of both", m.CPUs, m.Memory)
	}
	board := "q35"
	if m.Arch == "arm64" {
		board = "virt"
		if m.Accel == KVM {
			board = "virt,gic-version=host"
		}
	}
	if m.Firmware.Secure && m.Arch == "amd64" {
		// On arm64, the firmware's keys are not protected from the guest.
		board += ",smm=on"
		c.add("-global", "driver=cfi.pflash01,property=secure,value=on")
	}
	c.add("-machine", board, "-cpu", cpu(m.Arch, m.Accel, v))
	switch {
	case m.Accel == KVM && m.Counted:
		c.bad("KVM cannot count instructions: use accelerator tcg for a machine with Counted")
	case m.Accel == KVM:
		c.add("-accel", "kvm")
	case m.Counted:
		c.add("-accel", "tcg,thread=single,tb-size=256", "-icount", "shift=0,align=off,sleep=on")
	default:
		c.add("-accel", "tcg,thread=multi,tb-size=256")
	}
	c.add("-smp", strconv.Itoa(cmp.Or(m.CPUs, 2)), "-m", strconv.Itoa(cmp.Or(m.Memory, 2048)))
}

// boot adds the kernel or the firmware to boot.
func (c *commandLine) boot(m Machine) {
	if m.Kernel == "" && (m.Firmware.Code == "" || m.Firmware.Vars == "") {
		c.bad("neither firmware nor a kernel to boot")
	}
	if m.Kernel != "" && m.Firmware.Code != "" {
		c.bad("both firmware and a kernel to boot; choose one")
	}
	if m.Kernel != "" {
		c.add("-kernel", m.Kernel)
		c.option("-initrd", m.Initrd)
		c.option("-append", m.KernelArgs)
		return
	}
	c.add("-drive", "if=pflash,format=raw,readonly=on,file="+value(m.Firmware.Code),
		"-drive", "if=pflash,format=raw,file="+value(m.Firmware.Vars))
}

func (c *commandLine) disk(i, boot int, d Disk) {
	if d.Path == "" {
		c.bad("disk %d has no path", i)
	}
	if d.Log != "" && d.Sync {
		c.bad("disk %d has both Sync and Log; choose one", i)
	}
	format, cache := cmp.Or(d.Format, "qcow2"), "unsafe"
	if d.Sync {
		cache = "none"
	}
	if d.Log != "" {
		// The log contains flushes, but the host's file is not flushed.
		c.add("-blockdev", fmt.Sprintf("driver=%s,node-name=data%d,cache.no-flush=on,discard=unmap,file.driver=file,file.cache.no-flush=on,file.filename=%s", format, i, value(d.Path)),
			"-blockdev", fmt.Sprintf("driver=file,node-name=log%d,cache.no-flush=on,filename=%s", i, value(d.Log)),
			"-blockdev", fmt.Sprintf("driver=blklogwrites,node-name=disk%[1]d,file=data%[1]d,log=log%[1]d", i))
	} else {
		c.add("-drive", fmt.Sprintf("if=none,id=disk%d,format=%s,cache=%s,discard=unmap,file=%s", i, format, cache, value(d.Path)))
	}
	dev := fmt.Sprintf("virtio-blk-pci,drive=disk%d,bootindex=%d", i, boot)
	if d.Serial != "" {
		dev += ",serial=" + value(d.Serial)
	}
	if d.Sector != 0 {
		dev += fmt.Sprintf(",logical_block_size=%[1]d,physical_block_size=%[1]d", d.Sector)
	}
	c.add("-device", dev)
}

func (c *commandLine) nic(i int, n NIC, boot bool) {
	if n.Tap != "" && len(n.Forwards) > 0 {
		c.bad("network card %d is on tap %s: ports are forwarded in user-mode networking only", i, n.Tap)
	}
	if n.Cable != nil && (n.Tap != "" || len(n.Forwards) > 0) {
		c.bad("network card %d has a Cable, which excludes Tap and Forwards", i)
	}
	netdev := fmt.Sprintf("user,id=net%d", i)
	if n.Tap != "" {
		netdev = fmt.Sprintf("tap,id=net%d,ifname=%s,script=no,downscript=no", i, value(n.Tap))
	}
	if n.Cable != nil {
		netdev = fmt.Sprintf("dgram,id=net%d,local.type=unix,local.path=%s,remote.type=unix,remote.path=%s", i, value(n.Cable.Own), value(n.Cable.Other))
	}
	for _, f := range n.Forwards {
		if !port(f.Host) || !port(f.Guest) {
			c.bad("forwarding port %d to %d: want 1 to 65535", f.Host, f.Guest)
		}
		netdev += fmt.Sprintf(",hostfwd=tcp:127.0.0.1:%d-:%d", f.Host, f.Guest)
	}
	dev := fmt.Sprintf("virtio-net-pci,netdev=net%d", i)
	if n.MAC != "" {
		dev += ",mac=" + n.MAC
	}
	if boot {
		dev += ",bootindex=0"
	}
	// UEFI has its own driver. QEMU's boot ROM would take over the card.
	c.add("-netdev", netdev, "-device", dev+",romfile=")
}

// devices adds all devices except built-in disks and network cards.
func (c *commandLine) devices(m Machine) {
	switch m.Sticks {
	case "":
	case USB:
		c.add("-device", "qemu-xhci")
	case SCSI:
		c.add("-device", "virtio-scsi-pci")
	default:
		c.bad("bus %q for removable drives: want usb or scsi", m.Sticks)
	}
	if m.Stick != "" {
		driver := map[string]string{USB: "usb-storage", SCSI: "scsi-hd"}[m.Sticks]
		if driver == "" {
			c.bad("the stick %s needs a bus: set Sticks to usb or scsi", m.Stick)
		}
		c.add("-drive", "if=none,id=stick,format=raw,cache=unsafe,file="+value(m.Stick), "-device", driver+",drive=stick,removable=on,bootindex=0")
	}
	if m.CD != "" {
		c.add("-drive", "if=none,id=cd,format=raw,readonly=on,media=cdrom,file="+value(m.CD))
		if m.Arch == "arm64" { // arm64 boards have no IDE
			c.add("-device", "virtio-scsi-pci,id=optical", "-device", "scsi-cd,bus=optical.0,drive=cd,bootindex=0")
		} else {
			c.add("-device", "ide-cd,drive=cd,bootindex=0")
		}
	}
	if m.NetBoot && (len(m.NICs) == 0 || m.Stick != "" || m.CD != "") {
		c.bad("booting from the network requires a network card, and excludes a stick and a CD")
	}
	if m.Watchdog {
		c.add("-device", "i6300esb")
	}
	// Without this device, a guest may wait for entropy before it can make its first keys.
	c.add("-device", "virtio-rng-pci")
}

func (c *commandLine) console(m Machine) {
	switch m.Serial {
	case "stdio":
		c.add("-serial", "stdio")
	case "terminal":
		c.add("-serial", "mon:stdio")
	default:
		c.add("-serial", "file:"+m.Serial)
	}
	if m.QMP != "" {
		c.add("-qmp", "unix:"+value(m.QMP)+",server=on,wait=off")
	}
}

// identity adds the settings that differ between machines and between runs.
func (c *commandLine) identity(m Machine) {
	c.option("-uuid", m.UUID)
	if m.SerialNumber != "" {
		c.add("-smbios", "type=1,serial="+value(m.SerialNumber))
	}
	if m.HTTPSCAs != "" {
		c.add("-fw_cfg", "name=etc/edk2/https/cacerts,file="+value(m.HTTPSCAs))
	}
	switch base := cmp.Or(m.Clock, "utc"); {
	case m.Counted:
		c.add("-rtc", "base="+base+",clock=vm")
	case m.Clock != "":
		c.add("-rtc", "base="+base)
	}
	if m.NoReboot {
		c.add("-no-reboot")
	}
}

// cpu returns a CPU model with all features that current kernels and programs may require.
func cpu(arch, accel string, v Version) string {
	switch {
	case accel == KVM:
		return "host"
	case arch == "amd64" && v.Major < 8:
		// QEMU 7 emulates cmpxchg16b incorrectly: half of the boots of a 6.12 kernel panic.
		return "max,-cx16"
	case arch == "arm64":
		// Kernels sign every return address. QEMU emulates its own cipher for this several times
		// faster than the architecture's.
		return "max,pauth-impdef=on"
	}
	return "max"
}

// value escapes a value in the syntax of QEMU's options.
func value(s string) string { return strings.ReplaceAll(s, ",", ",,") }

func port(n int) bool { return n > 0 && n < 1<<16 }
