package lab

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"github.com/edgebake/edgebake/builder/qemu"
)

// VMConfig describes a machine to boot.
type VMConfig struct {
	Name  string // prefix of the machine's files in the lab's directory
	Image string // a .raw file, which is never written to
	Arch  string // as in qemu.Machine
	// Disk is the size of the device to which the image was written; 0: the size of the image.
	Disk int64
	// Sector is the sector size of that device; 0: 512.
	Sector int64
	Net    Net
	// Guest is the number of the machine in Net, counted from 0.
	Guest int
	// Accel is as in qemu.Machine. If it is empty, or the machine's architecture is not this
	// computer's, TCG is used.
	Accel        string
	CPUs, Memory int
	Secure       bool   // Secure Boot enabled
	SerialNumber string // serial number in SMBIOS
	Clock        string // as in qemu.Machine
	Sticks       string // as in qemu.Machine; also the bus for Plug
	Stick, CD    string // as in qemu.Machine
	NetBoot      bool   // as in qemu.Machine; see Lab.ServeNetBoot
	HTTPSCAs     string // as in qemu.Machine
	Watchdog     bool   // a hardware watchdog
	// NIC is a second network card, or nil.
	NIC *qemu.NIC
	// More are further disks: raw files, which the machine can write to.
	More []string
	// EachLine is called with every line of the console.
	EachLine func(Line)
	// Record records the machine's writes to its disk, so that CutPower can lose those that were
	// only in the disk's cache.
	Record bool
	// Lockstep makes the machine share a clock with other machines; nil: it has this host's clock.
	Lockstep *Lockstep
	// KeepVars keeps the firmware variables of the last machine with this name. Otherwise the machine
	// has new ones, because they are not stored on the disk.
	KeepVars bool
}

// VM is a machine with a copy-on-write disk. It can be switched off and on again.
type VM struct {
	Name    string // prefix of its files
	Node    string // name of the machine's Node: at first the same as Name
	Overlay string // qcow2
	Serial  *Serial

	lab  *Lab
	cfg  VMConfig
	prog qemu.Program
	mach qemu.Machine
	proc *Process
	log  *os.File
}

// StartVM creates the machine's disk from the image and switches the machine on.
func (l *Lab) StartVM(ctx context.Context, cfg VMConfig) (*VM, error) {
	arch := cmp.Or(cfg.Arch, "amd64")
	if arch != runtime.GOARCH {
		cfg.Accel = qemu.TCG
	}
	prog, err := qemu.Find(ctx, arch)
	if err != nil {
		return nil, err
	}
	fw, err := qemu.FindFirmware(qemu.ShareDirs(), arch, cfg.Secure)
	if err != nil {
		return nil, err
	}
	vars := filepath.Join(l.Dir, cfg.Name+".vars")
	if cfg.KeepVars {
		fw.Vars = vars
	} else if fw, err = fw.OwnVars(vars); err != nil {
		return nil, err
	}
	if cfg.Accel == qemu.KVM {
		cfg.Lockstep = nil // with KVM, each machine has enough processor time
	}
	vm := &VM{Name: cfg.Name, Node: cfg.Name, Overlay: filepath.Join(l.Dir, cfg.Name+".qcow2"), lab: l, cfg: cfg, prog: prog}
	if err := os.Remove(vm.Overlay); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("starting %s: %w", cfg.Name, err)
	}
	if cfg.Record {
		if err := vm.ownDisk(ctx); err != nil {
			return nil, err
		}
	} else if err := qemu.Overlay(ctx, cfg.Image, vm.Overlay, cfg.Disk); err != nil {
		return nil, err
	}
	vm.mach = qemu.Machine{
		Arch: arch, Accel: cfg.Accel, CPUs: cfg.CPUs, Memory: cfg.Memory, Firmware: fw,
		Disks: []qemu.Disk{{Path: vm.Overlay, Sector: cfg.Sector}}, NICs: []qemu.NIC{cfg.Net.NIC(cfg.Guest)},
		QMP: filepath.Join(l.sockets, cfg.Name+".qmp"), SerialNumber: cfg.SerialNumber, Clock: cfg.Clock,
		Sticks: cfg.Sticks, Stick: cfg.Stick, CD: cfg.CD, NetBoot: cfg.NetBoot, HTTPSCAs: cfg.HTTPSCAs, Watchdog: cfg.Watchdog,
		Counted: cfg.Lockstep != nil,
	}
	if cfg.NIC != nil {
		vm.mach.NICs = append(vm.mach.NICs, *cfg.NIC)
	}
	for _, file := range cfg.More {
		vm.mach.Disks = append(vm.mach.Disks, qemu.Disk{Path: file, Format: "raw"})
	}
	if cfg.Record {
		vm.mach.Disks[0].Log = vm.writes()
	}
	if vm.log, err = os.OpenFile(vm.SerialLog(), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600); err != nil {
		return nil, fmt.Errorf("starting %s: %w", cfg.Name, err)
	}
	l.onClose(vm.log.Close)
	return vm, vm.On()
}

// SerialLog returns the path of the console's raw output.
func (vm *VM) SerialLog() string { return filepath.Join(vm.lab.Dir, vm.Name+".serial") }

// On switches the machine on. Each run has a new console.
func (vm *VM) On() error {
	if vm.cfg.Lockstep != nil {
		vm.mach.Clock = vm.cfg.Lockstep.Now().Format("2006-01-02T15:04:05")
	}
	args, err := vm.mach.Args(vm.prog.Version)
	if err != nil {
		return err
	}
	if err := os.Remove(vm.mach.QMP); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("starting %s: %w", vm.Name, err)
	}
	if vm.cfg.Record {
		if err := vm.freshRun(); err != nil {
			return fmt.Errorf("starting %s: %w", vm.Name, err)
		}
	}
	vm.Serial = newSerial(vm.log, vm.cfg.EachLine)
	vm.proc, err = vm.lab.start(vm.Name, vm.cfg.Net.Wrap(append([]string{vm.prog.Path}, args...)), vm.Serial)
	if err != nil {
		return err
	}
	if vm.cfg.Lockstep != nil {
		vm.cfg.Lockstep.add(vm)
	}
	go func(s *Serial, p *Process) {
		<-p.Done()
		s.end(fmt.Errorf("%w (%v): %s", errPoweredOff, p.err, tailFile(p.Log, 1<<10)))
	}(vm.Serial, vm.proc)
	return nil
}

// Cut ends the machine at once. Unlike CutPower, it keeps all writes that the guest has sent to its
// disk.
func (vm *VM) Cut() { vm.proc.Kill() }

// Off presses the power button and waits until the machine is off.
func (vm *VM) Off(ctx context.Context) error {
	if err := vm.command(ctx, "system_powerdown"); err != nil {
		return fmt.Errorf("switching %s off: %w", vm.Name, err)
	}
	select {
	case <-vm.proc.Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("switching %s off: %w; its last lines:\n%s", vm.Name, context.Cause(ctx), vm.Serial.Tail(30))
	}
}

// WaitOff waits until the machine has powered itself off.
func (vm *VM) WaitOff(ctx context.Context) error {
	select {
	case <-vm.proc.Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting until %s is off: %w; its last lines:\n%s", vm.Name, context.Cause(ctx), vm.Serial.Tail(30))
	}
}

// Unplug removes the stick and the disc from a machine that is off, and disables its network boot.
func (vm *VM) Unplug() { vm.mach.Stick, vm.mach.CD, vm.mach.NetBoot = "", "", false }

// Reset presses the reset button.
func (vm *VM) Reset(ctx context.Context) error { return vm.command(ctx, "system_reset") }

// Plug attaches a removable drive to the running machine, until the machine is switched off.
func (vm *VM) Plug(ctx context.Context, image string) error {
	driver := map[string]string{qemu.USB: "usb-storage", qemu.SCSI: "scsi-hd"}[vm.cfg.Sticks]
	if driver == "" {
		return fmt.Errorf("plugging %s into %s: the machine was started without Sticks", image, vm.Name)
	}
	path, err := filepath.Abs(image)
	if err != nil {
		return err
	}
	if err := vm.commandWith(ctx, "blockdev-add", map[string]any{
		"driver": "raw", "node-name": "stick", "file": map[string]any{"driver": "file", "filename": path},
	}); err != nil {
		return err
	}
	return vm.commandWith(ctx, "device_add", map[string]any{"driver": driver, "id": "stick0", "drive": "stick", "removable": true})
}

// CPU returns the processor time that QEMU has used since the machine was switched on. It hardly
// depends on this computer's load.
func (vm *VM) CPU() (time.Duration, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", vm.proc.Pid()))
	if err != nil {
		return 0, fmt.Errorf("reading the processor time of %s: %w", vm.Name, err)
	}
	// The program's name, in parentheses, may contain blanks.
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 13 {
		return 0, fmt.Errorf("reading the processor time of %s: %q", vm.Name, stat)
	}
	user, err1 := strconv.ParseInt(string(fields[11]), 10, 64)
	system, err2 := strconv.ParseInt(string(fields[12]), 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		return 0, fmt.Errorf("reading the processor time of %s: %w", vm.Name, err)
	}
	const perSecond = 100 // USER_HZ, on every architecture that Go has
	return time.Duration(user+system) * time.Second / perSecond, nil
}

// Running reports whether the machine is on.
func (vm *VM) Running() bool { return vm.proc.ended() == nil }

// command sends one command without arguments to QEMU.
func (vm *VM) command(ctx context.Context, name string) error { return vm.commandWith(ctx, name, nil) }

// commandWith is like command, with arguments.
func (vm *VM) commandWith(ctx context.Context, name string, arguments map[string]any) error {
	return vm.ask(ctx, name, arguments, nil)
}

// ask is like commandWith, and also decodes the answer.
func (vm *VM) ask(ctx context.Context, name string, arguments map[string]any, into any) error {
	var d net.Dialer
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	conn, err := d.DialContext(ctx, "unix", vm.mach.QMP)
	if err != nil {
		return fmt.Errorf("sending %s to QEMU: %w", name, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	// QEMU first sends a greeting and requires a negotiation of capabilities. Then it answers each
	// command, and may send events before the answer.
	in := json.NewDecoder(bufio.NewReader(conn))
	var greeting struct{ QMP any }
	if err := in.Decode(&greeting); err != nil {
		return fmt.Errorf("sending %s to QEMU: %w", name, err)
	}
	ask := map[string]any{"execute": name}
	if arguments != nil {
		ask["arguments"] = arguments
	}
	var last json.RawMessage
	for _, c := range []map[string]any{{"execute": "qmp_capabilities"}, ask} {
		if err := json.NewEncoder(conn).Encode(c); err != nil {
			return fmt.Errorf("sending %s to QEMU: %w", name, err)
		}
		for {
			var answer struct {
				Return json.RawMessage
				Error  *struct{ Desc string }
			}
			if err := in.Decode(&answer); err != nil {
				return fmt.Errorf("sending %s to QEMU: %w", name, err)
			}
			if answer.Error != nil {
				return fmt.Errorf("sending %s to QEMU: it answered %s", name, answer.Error.Desc)
			}
			if answer.Return != nil {
				last = answer.Return
				break
			}
		}
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(last, into); err != nil {
		return fmt.Errorf("sending %s to QEMU: %w", name, err)
	}
	return nil
}

// RawDisk writes the machine's disk to path as a raw file. The machine must be off.
func (vm *VM) RawDisk(ctx context.Context, path string) error {
	if vm.Running() {
		return fmt.Errorf("reading the disk of %s: it is running", vm.Name)
	}
	if out, err := exec.CommandContext(ctx, "qemu-img", "convert", "-O", "raw", vm.Overlay, path).CombinedOutput(); err != nil {
		return fmt.Errorf("reading the disk of %s: qemu-img: %w: %s", vm.Name, err, out)
	}
	return nil
}

// FindInFile returns the offsets at which a byte string occurs in a file.
func FindInFile(path string, what []byte) ([]int64, error) {
	if len(what) == 0 {
		return nil, errors.New("searching a disk: the bytes to search for are empty")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("searching %s: %w", path, err)
	}
	defer f.Close()
	var hits []int64
	buf := make([]byte, 1<<20)
	keep := 0 // bytes kept from the last read, because an occurrence may span two reads
	for off := int64(0); ; {
		n, err := io.ReadFull(f, buf[keep:])
		chunk := buf[:keep+n]
		base := off - int64(keep)
		for i := 0; ; {
			j := bytes.Index(chunk[i:], what)
			if j < 0 {
				break
			}
			hits = append(hits, base+int64(i+j))
			i += j + 1
		}
		off += int64(n)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return hits, nil
		}
		if err != nil {
			return nil, fmt.Errorf("searching %s: %w", path, err)
		}
		keep = copy(buf, chunk[max(0, len(chunk)-len(what)+1):])
	}
}
