// Package buildtest writes small Image documents and the files that they name: a base of a dozen
// files, programs of a few bytes, a container image. Building them takes milliseconds and runs
// every step of a real build. For tests only.
package buildtest

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/test/imagetest"
)

// Kernel is the release of the kernel in the base.
const Kernel = "6.12.1-test"

// Entry is a tar entry of the base. An entry with a body is a file.
type Entry struct {
	tar.Header
	Body string
}

// Document is the Image document that Write writes.
const Document = `apiVersion: edgebake.io/v1alpha1
kind: Image
name: tiny
base:
  tar:
    file: base.tar
kubernetes:
  version: v1.36.3
  source:
    file: {dir: programs}
containerd:
  version: 2.2.9
  source:
    file: {dir: programs}
  sandbox: edgebake.test/pause:1
cni: {config: bridge, podCIDR: 10.244.0.0/16}
agents: {firstboot: programs/firstboot, ipvscare: programs/ipvscare}
images:
  - ref: edgebake.test/pause:1
    layout: images
overlays:
  - dir: overlay
files:
  - path: /etc/motd
    contents: "{{.Name}} on {{.Arch}}\n"
    template: true
  - path: /opt/site/notes
    source: notes.txt
    mode: "0600"
`

// machines maps architectures to machine types in ELF files.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// Program returns the first bytes of a program for an architecture, which is named as in Go.
func Program(arch string) string { return ELF(machines[arch]) }

// ELF returns the first bytes of a program for a machine type.
func ELF(m elf.Machine) string {
	b := make([]byte, 128)
	copy(b, elf.ELFMAG)
	b[elf.EI_CLASS], b[elf.EI_DATA], b[elf.EI_VERSION] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1
	binary.LittleEndian.PutUint16(b[16:], uint16(elf.ET_EXEC))
	binary.LittleEndian.PutUint16(b[18:], uint16(m))
	binary.LittleEndian.PutUint32(b[20:], uint32(elf.EV_CURRENT))
	return string(b)
}

func file(name, body string) Entry {
	return Entry{tar.Header{Typeflag: tar.TypeReg, Name: "./" + name, Mode: 0o644}, body}
}

func dir(name string) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: "./" + name + "/", Mode: 0o755}}
}

func link(name, to string) Entry {
	return Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "./" + name, Linkname: to, Mode: 0o777}}
}

const dpkgStatus = `Package: systemd
Status: install ok installed
Architecture: amd64
Source: systemd (257.1-1)
Version: 257.1-1+b2
Homepage: https://systemd.io
Description: system and service manager
 with more lines

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: containerd
Status: install ok installed
Architecture: amd64
Version: 1.7.24~ds1-6+b4
`

// Base returns the essential files of a Debian base, including machine identities and leftovers of
// making a base.
func Base() []Entry { return BaseFor("amd64") }

// BaseFor returns the files of Base for an architecture.
func BaseFor(arch string) []Entry {
	program := Program(arch)
	loader := map[string]string{"amd64": "systemd-bootx64.efi", "arm64": "systemd-bootaa64.efi"}[arch]
	tmp := dir("tmp")
	tmp.Mode = 0o1777
	ping := Entry{tar.Header{Typeflag: tar.TypeReg, Name: "./usr/bin/ping", Mode: 0o755, Format: tar.FormatPAX,
		PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"}}, program}
	hard := Entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: "./usr/bin/ping4", Linkname: "./usr/bin/ping"}}
	su := file("usr/bin/su", program)
	su.Mode = 0o4755
	return []Entry{
		dir("."), dir("usr"), dir("usr/bin"), dir("usr/lib"), link("lib", "usr/lib"), link("bin", "usr/bin"),
		dir("etc"), dir("etc/ssh"), dir("var"), dir("var/lib"), dir("var/log"), dir("var/cache"), tmp, dir("boot"), dir("run"), dir("proc"), dir("dev"),
		file("boot/vmlinuz-"+Kernel, "kernel"), file("boot/initrd.img-"+Kernel, "initrd"), dir("usr/lib/modules/" + Kernel),
		file("usr/lib/modules/"+Kernel+"/modules.dep", "\n"),
		file("usr/lib/systemd/systemd", program),
		file("usr/lib/systemd/boot/efi/"+loader, "MZ"),
		file("var/lib/dpkg/status", strings.ReplaceAll(dpkgStatus, "amd64", arch)),
		ping, hard, su,
		// Identities and secrets, which must not be in a golden image.
		file("etc/machine-id", "0123456789abcdef0123456789abcdef\n"),
		file("etc/ssh/ssh_host_ed25519_key", "secret"), file("etc/ssh/ssh_host_ed25519_key.pub", "public"),
		file("var/lib/systemd/random-seed", "seed"), link("var/lib/dbus/machine-id", "/etc/machine-id"),
		file("var/log/dpkg.log", "log"), file("var/cache/apt/pkgcache.bin", "cache"), file("etc/passwd-", "old"),
	}
}

// InstallableBase returns the files of Base and those that an installer needs: an initrd of
// initramfs-tools, lsblk and wipefs.
func InstallableBase() []Entry {
	base := append(Base(), dir("usr/share"), dir("usr/share/initramfs-tools"), file("usr/share/initramfs-tools/init", "#!/bin/sh\n"),
		file("usr/lib/modules/"+Kernel+"/kernel/fs/efivarfs/efivarfs.ko.xz", "module"))
	for _, name := range []string{"usr/bin/lsblk", "usr/sbin/wipefs"} {
		program := file(name, ELF(elf.EM_X86_64))
		program.Mode = 0o755
		base = append(base, program)
	}
	return base
}

// PiKernel has the first bytes of a kernel that a Raspberry Pi's firmware can start.
var PiKernel = "MZ" + strings.Repeat("\x00", 54) + "ARM\x64" + "kernel"

// PiBase returns the essential files of a base for Raspberry Pi boards: firmware instead of a boot
// loader, and a kernel with drivers for a Raspberry Pi 4, as in Debian 13. With pi5, the firmware
// is newer and the kernel also has drivers for a Raspberry Pi 5.
func PiBase(pi5 bool) []Entry {
	entries := slices.DeleteFunc(BaseFor("arm64"), func(e Entry) bool {
		return strings.Contains(e.Name, "/systemd/boot/") || strings.HasPrefix(e.Name, "./boot/vmlinuz-")
	})
	modules := []string{"mmc/host/sdhci-iproc", "net/ethernet/broadcom/genet/genet", "net/ethernet/cadence/macb"}
	firmware := "Apr 17 2024"
	if pi5 {
		firmware = "Feb  1 2026"
		modules = append(modules, "mmc/host/sdhci-brcmstb", "misc/rp1/rp1_pci", "clk/clk-rp1", "pinctrl/pinctrl-rp1")
	}
	for _, m := range modules {
		entries = append(entries, file("usr/lib/modules/"+Kernel+"/kernel/drivers/"+m+".ko.xz", "module"))
	}
	for _, tree := range []string{"bcm2711-rpi-4-b", "bcm2711-rpi-cm4-io", "bcm2712-rpi-5-b", "bcm2837-rpi-3-b"} {
		entries = append(entries, file("usr/lib/linux-image-"+Kernel+"/broadcom/"+tree+".dtb", tree))
	}
	return append(entries,
		file("boot/vmlinuz-"+Kernel, PiKernel),
		file("usr/lib/modules/"+Kernel+"/modules.builtin", "kernel/drivers/clk/clk-fixed.ko\nkernel/drivers/pci/controller/pcie-brcmstb.ko\n"),
		file("usr/lib/raspi-firmware/start4.elf", ELF(elf.EM_VIDEOCORE3)+"VC_BUILD_ID_TIME: 17:27:09\x00VC_BUILD_ID_TIME: "+firmware+"\x00"+strings.Repeat("start", 20)),
		file("usr/lib/raspi-firmware/fixup4.dat", "fixup"),
		file("usr/lib/raspi-firmware/start.elf", "of a 3"),
		file("usr/lib/raspi-firmware/overlays/pi4-spidev.dtbo", "overlay"), file("usr/lib/raspi-firmware/overlays/README.md", "text"),
		dir("boot/firmware"), file("boot/firmware/start4.elf", "start"),
	)
}

// WritePi is like Write, for Raspberry Pi boards.
func WritePi(dir string, base []Entry, edit func(doc string) string) error {
	err := Write(dir, base, func(doc string) string {
		doc = strings.Replace(Several(doc), "arch: [amd64, arm64]", "arch: arm64\nhardware: raspberry-pi", 1)
		if edit != nil {
			doc = edit(doc)
		}
		return doc
	})
	if err != nil {
		return err
	}
	if err := WriteFor(dir, "arm64"); err != nil {
		return err
	}
	return os.Rename(filepath.Join(dir, "base.tar"), filepath.Join(dir, "base-arm64.tar"))
}

// Tar returns a tar archive of the entries.
func Tar(entries []Entry) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		e.Size = int64(len(e.Body))
		if e.ModTime.IsZero() {
			e.ModTime = time.Unix(1767225600, 0)
		}
		if err := w.WriteHeader(&e.Header); err != nil {
			return nil, err
		}
		if _, err := w.Write([]byte(e.Body)); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return b.Bytes(), err
}

// programs are the names of the programs of a node.
var programs = strings.Fields("kubelet kubeadm containerd containerd-shim-runc-v2 ctr firstboot ipvscare")

// Several returns the document changed for two architectures. WriteFor writes the files for one
// architecture.
func Several(doc string) string {
	return strings.NewReplacer("kind: Image\n", "kind: Image\narch: [amd64, arm64]\n", "base.tar", "'base-{arch}.tar'", "dir: programs", "dir: 'programs/{arch}'",
		"programs/firstboot", "'programs/{arch}/firstboot'", "programs/ipvscare", "'programs/{arch}/ipvscare'",
		"layout: images", "layout: 'images-{arch}'").Replace(doc)
}

// WriteFor writes the files for one architecture of a document that Several returned.
func WriteFor(dir, arch string) error {
	base, err := Tar(BaseFor(arch))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "base-"+arch+".tar"), base, 0o644); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, "programs", arch), 0o755); err != nil {
		return err
	}
	for _, p := range programs {
		if err := os.WriteFile(filepath.Join(dir, "programs", arch, p), []byte(Program(arch)+p), 0o644); err != nil {
			return err
		}
	}
	return WriteImages(filepath.Join(dir, "images-"+arch), arch)
}

// Write writes dir/image.yaml, which is edit(Document), and the files that it names.
func Write(dir string, base []Entry, edit func(doc string) string) error {
	doc := Document
	if edit != nil {
		doc = edit(doc)
	}
	packed, err := Tar(base)
	if err != nil {
		return err
	}
	program := Program("amd64")
	files := map[string]string{
		"image.yaml": doc, "base.tar": string(packed), "notes.txt": "note",
		"overlay/lib/firmware/blob": "firmware", "overlay/usr/local/bin/tool": "#!/bin/sh\n", "overlay/tmp/seen": "",
	}
	for _, p := range programs {
		files["programs/"+p] = program + p
	}
	for name, body := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(p, []byte(body), 0o644); err != nil {
			return err
		}
	}
	if err := os.Chmod(filepath.Join(dir, "overlay/usr/local/bin/tool"), 0o755); err != nil {
		return err
	}
	return WriteImages(filepath.Join(dir, "images"), "amd64")
}

// WriteImages writes the OCI layout of Document's container images for an architecture.
func WriteImages(dir, arch string) error {
	_, err := imagetest.WriteLayout(dir, imagetest.Image{
		Ref: "edgebake.test/pause:1", Arch: arch,
		Layers: []imagetest.Layer{{Tar: func(w *imagetest.Writer) error {
			return w.Put(tar.Header{Name: "pause", Mode: 0o755}, Program(arch))
		}}},
	})
	return err
}
