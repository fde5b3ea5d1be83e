package qemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/procgroup"
)

// Version is a version of QEMU.
type Version struct{ Major, Minor int }

// Program is a QEMU program for one architecture.
type Program struct {
	Path    string
	Version Version
}

var names = map[string]string{"amd64": "qemu-system-x86_64", "arm64": "qemu-system-aarch64"}

// Find returns the QEMU program on PATH for an architecture, with its version.
func Find(ctx context.Context, arch string) (Program, error) {
	name, ok := names[arch]
	if !ok {
		return Program{}, fmt.Errorf("finding QEMU: architecture %q: want amd64 or arm64", arch)
	}
	path, err := exec.LookPath(name)
	if errors.Is(err, exec.ErrNotFound) {
		pkg := map[string]string{"amd64": "qemu-system-x86", "arm64": "qemu-system-arm"}[arch]
		return Program{}, fmt.Errorf("finding QEMU: no %s on PATH: apt-get install %s", name, pkg)
	}
	if err != nil {
		return Program{}, fmt.Errorf("finding QEMU: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	out, err := procgroup.Command(ctx, path, "--version").Output()
	if err != nil {
		return Program{}, fmt.Errorf("finding the version of %s: %w", path, err)
	}
	v, err := parseVersion(string(out))
	if err != nil {
		return Program{}, fmt.Errorf("finding the version of %s: %w", path, err)
	}
	return Program{path, v}, nil
}

var versionLine = regexp.MustCompile(`QEMU emulator version (\d+)\.(\d+)`)

func parseVersion(out string) (Version, error) {
	m := versionLine.FindStringSubmatch(out)
	if m == nil {
		return Version{}, fmt.Errorf("unexpected output %q", strings.TrimSpace(out))
	}
	major, err := strconv.Atoi(m[1])
	if err != nil {
		return Version{}, err
	}
	minor, err := strconv.Atoi(m[2])
	return Version{major, minor}, err
}

// firmwares lists the paths of UEFI firmware in several distributions, the preferred first. Each is
// the code and the initial variables. 2M variants come after 4M variants, because they have too
// little space for the lists of Secure Boot.
var firmwares = map[string][][2]string{
	"amd64": {
		{"OVMF/OVMF_CODE_4M.fd", "OVMF/OVMF_VARS_4M.fd"},                 // Debian, Ubuntu
		{"OVMF/OVMF_CODE.fd", "OVMF/OVMF_VARS.fd"},                       // older releases of both
		{"edk2/ovmf/OVMF_CODE.fd", "edk2/ovmf/OVMF_VARS.fd"},             // Fedora
		{"edk2/x64/OVMF_CODE.4m.fd", "edk2/x64/OVMF_VARS.4m.fd"},         // Arch
		{"qemu/ovmf-x86_64-4m-code.bin", "qemu/ovmf-x86_64-4m-vars.bin"}, // SUSE
		{"qemu/edk2-x86_64-code.fd", "qemu/edk2-i386-vars.fd"},           // shipped with QEMU
	},
	"arm64": {
		{"AAVMF/AAVMF_CODE.fd", "AAVMF/AAVMF_VARS.fd"},                                // Debian, Ubuntu
		{"edk2/aarch64/QEMU_EFI-pflash.raw", "edk2/aarch64/vars-template-pflash.raw"}, // Fedora
		{"edk2/aarch64/QEMU_CODE.fd", "edk2/aarch64/QEMU_VARS.fd"},                    // Arch
		{"qemu/aavmf-aarch64-code.bin", "qemu/aavmf-aarch64-vars.bin"},                // SUSE
		{"qemu/edk2-aarch64-code.fd", "qemu/edk2-arm-vars.fd"},                        // shipped with QEMU
	},
}

// secureFirmwares lists firmware that contains the vendors' keys for Secure Boot.
var secureFirmwares = map[string][][2]string{
	"amd64": {
		{"OVMF/OVMF_CODE_4M.ms.fd", "OVMF/OVMF_VARS_4M.ms.fd"},               // Debian, Ubuntu
		{"edk2/ovmf/OVMF_CODE.secboot.fd", "edk2/ovmf/OVMF_VARS.secboot.fd"}, // Fedora
	},
	"arm64": {
		{"AAVMF/AAVMF_CODE.ms.fd", "AAVMF/AAVMF_VARS.ms.fd"}, // Debian, Ubuntu
	},
}

// ShareDirs returns the directories in which FindFirmware usually searches.
func ShareDirs() []string { return []string{"/usr/share", "/usr/local/share", "/opt/homebrew/share"} }

// FindFirmware finds UEFI firmware for an architecture in these directories. If secure is set,
// Secure Boot is enabled in it. Each machine must use its own copy of the Vars file.
func FindFirmware(dirs []string, arch string, secure bool) (Firmware, error) {
	list := firmwares[arch]
	if secure {
		list = secureFirmwares[arch]
	}
	for _, dir := range dirs {
		for _, pair := range list {
			fw := Firmware{Code: filepath.Join(dir, pair[0]), Vars: filepath.Join(dir, pair[1]), Secure: secure}
			if regular(fw.Code) && regular(fw.Vars) {
				return fw, nil
			}
		}
	}
	pkg := map[string]string{"amd64": "ovmf", "arm64": "qemu-efi-aarch64"}[arch]
	what := "UEFI firmware"
	if secure {
		what += " with Secure Boot"
	}
	return Firmware{}, fmt.Errorf("finding %s for %s below %s: not found (Debian's package is %s)", what, arch, strings.Join(dirs, ", "), pkg)
}

func regular(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.Mode().IsRegular()
}

// OwnVars copies the firmware's variables to path, for a single machine.
func (fw Firmware) OwnVars(path string) (Firmware, error) {
	b, err := os.ReadFile(fw.Vars)
	if err != nil {
		return Firmware{}, fmt.Errorf("copying firmware variables: %w", err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		return Firmware{}, fmt.Errorf("copying firmware variables: %w", err)
	}
	fw.Vars = path
	return fw, nil
}

// Overlay creates a qcow2 file that receives all writes to image, which may be a file or a disk.
// size is the size of the machine's disk in bytes, or 0 for the size of the image. A larger size
// simulates an image that was flashed to a larger device.
func Overlay(ctx context.Context, image, overlay string, size int64) error {
	abs, err := filepath.Abs(image)
	if err != nil {
		return fmt.Errorf("creating an overlay of %s: %w", image, err)
	}
	if fi, err := os.Stat(abs); err != nil || fi.IsDir() {
		return fmt.Errorf("creating an overlay of %s: no such image", image)
	}
	tool, err := exec.LookPath("qemu-img")
	if err != nil {
		return fmt.Errorf("creating an overlay of %s: no qemu-img on PATH (Debian's package is qemu-utils): %w", image, err)
	}
	args := []string{"create", "-q", "-f", "qcow2", "-F", "raw", "-b", abs, overlay}
	if size > 0 {
		args = append(args, strconv.FormatInt(size, 10))
	}
	if out, err := procgroup.Command(ctx, tool, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("creating an overlay of %s: qemu-img: %w: %s", image, err, bytes.TrimSpace(out))
	}
	return nil
}

// ProbeLimit is the usual time limit for Probe. The firmware needs a few seconds.
const ProbeLimit = 15 * time.Second

// Probe returns the accelerator that works for guests of an architecture and, if it is not KVM, the
// reason. It runs the firmware without a disk until the firmware's clock has ticked. This tests a
// guest in 64-bit mode, with paging and timer interrupts; it is not enough that /dev/kvm can be
// opened. Probe kills QEMU after limit.
func Probe(ctx context.Context, p Program, fw Firmware, arch string, limit time.Duration) (accel, why string) {
	if arch != runtime.GOARCH {
		return TCG, fmt.Sprintf("the guest is %s and this machine is %s", arch, runtime.GOARCH)
	}
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return TCG, "this machine has no /dev/kvm"
	}
	if err := tryGuest(ctx, p, fw, arch, limit); err != nil {
		return TCG, err.Error()
	}
	return KVM, ""
}

// firstWords returns the first line of QEMU's output, without QEMU's name. Further lines, such as
// an assertion, do not help a user.
func firstWords(stderr string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(stderr), "\n")
	if name, rest, ok := strings.Cut(line, ": "); ok && strings.HasPrefix(name, "qemu-system-") {
		line = rest
	}
	if line = strings.TrimPrefix(line, "error: "); line == "" {
		return ""
	}
	return ": " + line
}

// ticks is text that the countdown of the firmware's shell prints every second.
var ticks = []byte("seconds")

func tryGuest(ctx context.Context, p Program, fw Firmware, arch string, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	dir, err := os.MkdirTemp("", "edgebake-kvm-")
	if err != nil {
		return fmt.Errorf("trying KVM: %w", err)
	}
	defer os.RemoveAll(dir)
	if fw, err = fw.OwnVars(filepath.Join(dir, "vars.fd")); err != nil {
		return err
	}
	args, err := Machine{Arch: arch, Accel: KVM, CPUs: 1, Memory: 256, Firmware: fw}.Args(p.Version)
	if err != nil {
		return err
	}
	out, in := io.Pipe()
	var stderr bytes.Buffer
	cmd := procgroup.Command(ctx, p.Path, args...)
	cmd.Stdout = in
	cmd.Stderr = &stderr
	// QEMU may hang in the kernel, and then cannot be killed: do not wait for it.
	cmd.WaitDelay = 2 * time.Second
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting QEMU: %w", err)
	}
	ended := make(chan error, 1)
	go func() {
		err := cmd.Wait()
		in.CloseWithError(io.EOF)
		ended <- err
	}()
	ticked := make(chan struct{})
	go func() {
		defer io.Copy(io.Discard, out)
		var seen []byte
		buf := make([]byte, 4096)
		for {
			n, err := out.Read(buf)
			seen = append(seen, buf[:n]...)
			if bytes.Count(seen, ticks) >= 2 {
				close(ticked)
				return
			}
			if err != nil {
				return
			}
		}
	}()
	select {
	case <-ticked:
		cancel()
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
		}
		return nil
	case err := <-ended:
		if ctx.Err() != nil {
			return fmt.Errorf("a small guest hung under KVM for %v", limit)
		}
		if err == nil {
			err = errors.New("exited immediately")
		}
		return fmt.Errorf("QEMU with KVM: %w%s", err, firstWords(stderr.String()))
	case <-time.After(limit + 5*time.Second):
		return fmt.Errorf("a small guest hung under KVM for %v and cannot be killed", limit)
	}
}
