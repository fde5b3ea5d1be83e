package qemu

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/desk"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestArgsGolden(t *testing.T) {
	fw := Firmware{Code: "/fw/CODE.fd", Vars: "/run/vars.fd"}
	for _, c := range []struct {
		name string
		m    Machine
		v    Version
	}{
		{"smallest", Machine{Firmware: fw}, Version{10, 0}},
		{"user-net", Machine{Firmware: fw, Disks: []Disk{{Path: "/run/a,b.qcow2", Serial: "edge1"}},
			NICs:   []NIC{{MAC: "52:54:00:00:01:01", Forwards: []Forward{{2222, 22}, {8080, 80}}}},
			Serial: "/run/serial.log", QMP: "/run/qmp", UUID: "4c4c4544-0000-2010-8020-80c04f202020", SerialNumber: "EB,1",
			Clock: "2026-01-31T12:00:00", CPUs: 1, Memory: 768}, Version{7, 2}},
		{"netboot", Machine{Firmware: fw, NetBoot: true, NICs: []NIC{{Tap: "tap1"}, {}}, Disks: []Disk{{Path: "d.qcow2"}}}, Version{7, 2}},
		{"tap", Machine{Firmware: fw, Accel: KVM, NICs: []NIC{{Tap: "tap1"}}, Disks: []Disk{{Path: "d.raw", Format: "raw", Sync: true}}}, Version{7, 2}},
		{"cable", Machine{Firmware: fw, NICs: []NIC{{MAC: "52:54:00:00:01:01", Cable: &Cable{"/run/a", "/run/b"}}, {Forwards: []Forward{{6443, 6443}}}}}, Version{7, 2}},
		{"counted", Machine{Firmware: fw, Counted: true, CPUs: 1}, Version{7, 2}},
		{"logged", Machine{Firmware: fw, Disks: []Disk{{Path: "d.qcow2", Log: "d,log"}}}, Version{7, 2}},
		{"secure", Machine{Firmware: Firmware{fw.Code, fw.Vars, true}}, Version{7, 2}},
		{"sticks", Machine{Firmware: fw, Sticks: USB, Watchdog: true}, Version{10, 0}},
		{"arm64", Machine{Arch: "arm64", Firmware: fw, Disks: []Disk{{Path: "d.qcow2"}}, NICs: []NIC{{}}}, Version{7, 2}},
		{"arm64-secure", Machine{Arch: "arm64", Firmware: Firmware{fw.Code, fw.Vars, true}}, Version{7, 2}},
		{"arm64-cd", Machine{Arch: "arm64", Firmware: fw, CD: "a.iso", Disks: []Disk{{Path: "d.qcow2"}}}, Version{10, 0}},
		{"arm64-kvm", Machine{Arch: "arm64", Accel: KVM, Firmware: fw}, Version{8, 0}},
		{"kernel", Machine{Kernel: "vmlinuz", Initrd: "initrd", KernelArgs: "console=ttyS0 root=/dev/vda", NoReboot: true, Serial: "terminal"}, Version{8, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			args, err := c.m.Args(c.v)
			if err != nil {
				t.Fatal(err)
			}
			// Print one option per line, so that a change shows as one line.
			var b strings.Builder
			for _, a := range args {
				if strings.HasPrefix(a, "-") {
					b.WriteString("\n" + a)
				} else {
					b.WriteString(" " + a)
				}
			}
			got := strings.TrimPrefix(b.String(), "\n") + "\n"
			golden := filepath.Join("testdata", c.name+".golden")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}

func TestArgsTellsAllThatIsWrong(t *testing.T) {
	_, err := Machine{Arch: "mips", Accel: "magic", Disks: []Disk{{}}, Sticks: "floppy",
		NICs: []NIC{{Tap: "tap0", Forwards: []Forward{{0, 22}}}, {Tap: "tap1", Cable: &Cable{"a", "b"}}}}.Args(Version{8, 0})
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"mips", "magic", "firmware", "disk 0", "floppy", "tap0", "port 0", "excludes Tap"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("nothing about %q in: %v", want, err)
		}
	}
	fw := Firmware{Code: "c", Vars: "v"}
	if _, err := (Machine{Firmware: fw, Kernel: "vmlinuz"}).Args(Version{8, 0}); err == nil {
		t.Error("firmware and kernel together accepted")
	}
	if _, err := (Machine{Firmware: fw, Accel: KVM, Counted: true}).Args(Version{8, 0}); err == nil {
		t.Error("counting instructions under KVM accepted")
	}
}

func TestParseVersion(t *testing.T) {
	v, err := parseVersion("QEMU emulator version 10.0.3 (Debian 1:10.0.3+ds-0+deb13u1)\nCopyright\n")
	if err != nil || v != (Version{10, 0}) {
		t.Errorf("%v, %v", v, err)
	}
	if _, err := parseVersion("something else"); err == nil {
		t.Error("nonsense accepted")
	}
}

func TestFindFirmware(t *testing.T) {
	dir := t.TempDir()
	put := func(names ...string) {
		for _, n := range names {
			p := filepath.Join(dir, n)
			if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(p, []byte(n), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := FindFirmware([]string{dir}, "amd64", false); err == nil || !strings.Contains(err.Error(), "ovmf") {
		t.Errorf("nothing installed: %v", err)
	}
	// Firmware without its variables must not be found.
	put("OVMF/OVMF_CODE_4M.fd", "OVMF/OVMF_CODE.fd", "OVMF/OVMF_VARS.fd")
	fw, err := FindFirmware([]string{filepath.Join(dir, "none"), dir}, "amd64", false)
	if err != nil || filepath.Base(fw.Code) != "OVMF_CODE.fd" || filepath.Base(fw.Vars) != "OVMF_VARS.fd" {
		t.Errorf("%+v, %v", fw, err)
	}
	put("OVMF/OVMF_VARS_4M.fd")
	if fw, err = FindFirmware([]string{dir}, "amd64", false); err != nil || filepath.Base(fw.Code) != "OVMF_CODE_4M.fd" {
		t.Errorf("%+v, %v", fw, err)
	}
	if _, err := FindFirmware([]string{dir}, "amd64", true); err == nil {
		t.Error("plain firmware taken for Secure Boot")
	}
	if _, err := FindFirmware([]string{dir}, "arm64", true); err == nil || !strings.Contains(err.Error(), "UEFI firmware with Secure Boot for arm64") || !strings.Contains(err.Error(), "qemu-efi-aarch64") {
		t.Errorf("%v", err)
	}
	own, err := fw.OwnVars(filepath.Join(dir, "own"))
	if err != nil || own.Code != fw.Code {
		t.Fatalf("%+v, %v", own, err)
	}
	if b, err := os.ReadFile(own.Vars); err != nil || string(b) != "OVMF/OVMF_VARS_4M.fd" {
		t.Errorf("%q, %v", b, err)
	}
}

// program returns a shell script in place of QEMU.
func program(t *testing.T, script string) Program {
	t.Helper()
	p := filepath.Join(t.TempDir(), "qemu")
	desk.WriteProgram(t, p, "#!/bin/sh\n"+script)
	return Program{Path: p, Version: Version{8, 0}}
}

func TestTryGuest(t *testing.T) {
	vars := filepath.Join(t.TempDir(), "vars")
	if err := os.WriteFile(vars, []byte("vars"), 0o644); err != nil {
		t.Fatal(err)
	}
	fw := Firmware{Code: "code", Vars: vars}
	const soon, ample = time.Second, time.Minute
	for _, c := range []struct {
		name, script, want string
		limit              time.Duration
	}{
		{"works", "echo press in 5 seconds; echo press in 4 seconds; exec sleep 600", "", ample},
		{"clock stands still", "echo press in 5 seconds; exec sleep 600", "hung", soon},
		{"silent", "exec sleep 600", "hung", soon},
		{"no permission", "echo 'Could not access KVM kernel module: Permission denied' >&2; exit 1", "Permission denied", ample},
		{"dies", "printf 'qemu-system-x86_64: error: failed to set MSR 0x10a\\nqemu-system-x86_64: kvm.c:3183: Assertion failed.\\n' >&2; exit 1", "QEMU with KVM: exit status 1: failed to set MSR 0x10a", ample},
		{"ends at once", "exit 0", "exited immediately", ample},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			err := tryGuest(t.Context(), program(t, c.script), fw, "amd64", c.limit)
			if got := fmt.Sprint(err); c.want == "" && err != nil || !strings.Contains(got, c.want) || strings.Contains(got, "Assertion") {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}

func TestOverlayRefusesWhatIsNotThere(t *testing.T) {
	err := Overlay(t.Context(), filepath.Join(t.TempDir(), "none.raw"), filepath.Join(t.TempDir(), "o.qcow2"), 0)
	if err == nil || !strings.Contains(err.Error(), "no such image") {
		t.Errorf("%v", err)
	}
}

// TestOverlayOfADisk checks that a flashed disk can be booted without changing it.
func TestOverlayOfADisk(t *testing.T) {
	desk.NeedRoot(t, "it makes a loop device")
	losetup := desk.NeedProgram(t, "losetup", "mount")
	img := desk.NeedProgram(t, "qemu-img", "qemu-utils")
	dir := t.TempDir()
	file, overlay := filepath.Join(dir, "disk"), filepath.Join(dir, "o.qcow2")
	if err := os.WriteFile(file, make([]byte, 16<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(losetup, "--read-only", "--find", "--show", file).CombinedOutput()
	if err != nil {
		desk.Lacks(t, "losetup: %v: %s", err, out)
	}
	dev := strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command(losetup, "--detach", dev).Run() })
	if err := Overlay(t.Context(), dev, overlay, 32<<20); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(img, "info", "--output=json", overlay).CombinedOutput(); err != nil || !strings.Contains(string(out), `"virtual-size": 33554432`) {
		t.Errorf("%v: %s", err, out)
	}
}

// FuzzVersion checks that a parsed version occurs in the text.
func FuzzVersion(f *testing.F) {
	f.Add("QEMU emulator version 10.0.3 (Debian 1:10.0.3+ds-0+deb13u1)\nCopyright\n")
	f.Add("QEMU emulator version 9.")
	f.Add("QEMU emulator version 99999999999999999999.1")
	f.Fuzz(func(t *testing.T, s string) {
		v, err := parseVersion(s)
		if err != nil {
			return
		}
		digits := regexp.MustCompile(fmt.Sprintf(`version 0*%d\.0*%d`, v.Major, v.Minor))
		if v.Major < 0 || v.Minor < 0 || !digits.MatchString(s) {
			t.Errorf("%+v out of %q", v, s)
		}
	})
}

// TestFindWithoutQEMU checks that the error names the missing package and repeats nothing.
func TestFindWithoutQEMU(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for arch, want := range map[string]string{
		"amd64": "finding QEMU: no qemu-system-x86_64 on PATH: apt-get install qemu-system-x86",
		"arm64": "finding QEMU: no qemu-system-aarch64 on PATH: apt-get install qemu-system-arm",
	} {
		if _, err := Find(t.Context(), arch); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", arch, err, want)
		}
	}
}
