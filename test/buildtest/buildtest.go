// Package buildtest makes small Image documents with all that they name: a
// base of a dozen files instead of a whole Debian, programs of a few bytes,
// a container image. Builds of them take milliseconds, and go through every
// step of a real one. For tests only.
package buildtest

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/edgebake/edgebake/test/imagetest"
)

// Kernel is the release of the base's kernel.
const Kernel = "6.12.1-test"

// Entry is a tar entry of the base; a body makes it a file.
type Entry struct {
	tar.Header
	Body string
}

// Document is the Image that Write writes.
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

// ELF is the start of a program for a machine.
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

// Base is what a Debian base amounts to, with the identities and leftovers
// that making one brings.
func Base() []Entry {
	tmp := dir("tmp")
	tmp.Mode = 0o1777
	ping := Entry{tar.Header{Typeflag: tar.TypeReg, Name: "./usr/bin/ping", Mode: 0o755, Format: tar.FormatPAX,
		PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"}}, ELF(elf.EM_X86_64)}
	hard := Entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: "./usr/bin/ping4", Linkname: "./usr/bin/ping"}}
	su := file("usr/bin/su", ELF(elf.EM_X86_64))
	su.Mode = 0o4755
	return []Entry{
		dir("."), dir("usr"), dir("usr/bin"), dir("usr/lib"), link("lib", "usr/lib"), link("bin", "usr/bin"),
		dir("etc"), dir("etc/ssh"), dir("var"), dir("var/lib"), dir("var/log"), dir("var/cache"), tmp, dir("boot"), dir("run"), dir("proc"), dir("dev"),
		file("boot/vmlinuz-"+Kernel, "kernel"), file("boot/initrd.img-"+Kernel, "initrd"), dir("usr/lib/modules/" + Kernel),
		file("usr/lib/modules/"+Kernel+"/modules.dep", "\n"),
		file("usr/lib/systemd/systemd", ELF(elf.EM_X86_64)),
		file("usr/lib/systemd/boot/efi/systemd-bootx64.efi", "MZ"),
		file("var/lib/dpkg/status", dpkgStatus),
		ping, hard, su,
		// What no golden image may have.
		file("etc/machine-id", "0123456789abcdef0123456789abcdef\n"),
		file("etc/ssh/ssh_host_ed25519_key", "secret"), file("etc/ssh/ssh_host_ed25519_key.pub", "public"),
		file("var/lib/systemd/random-seed", "seed"), link("var/lib/dbus/machine-id", "/etc/machine-id"),
		file("var/log/dpkg.log", "log"), file("var/cache/apt/pkgcache.bin", "cache"), file("etc/passwd-", "old"),
	}
}

// InstallableBase is Base with what an installer takes of a system: its initrd is
// initramfs-tools', and it has lsblk.
func InstallableBase() []Entry {
	lsblk := file("usr/bin/lsblk", ELF(elf.EM_X86_64))
	lsblk.Mode = 0o755
	return append(Base(), dir("usr/share"), dir("usr/share/initramfs-tools"), file("usr/share/initramfs-tools/init", "#!/bin/sh\n"), lsblk,
		file("usr/lib/modules/"+Kernel+"/kernel/fs/efivarfs/efivarfs.ko.xz", "module"))
}

// Tar packs entries.
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

// Write makes dir/image.yaml (Document, edited) and all that it names.
func Write(dir string, base []Entry, edit func(doc string) string) error {
	doc := Document
	if edit != nil {
		doc = edit(doc)
	}
	packed, err := Tar(base)
	if err != nil {
		return err
	}
	program := ELF(elf.EM_X86_64)
	files := map[string]string{
		"image.yaml": doc, "base.tar": string(packed), "notes.txt": "note",
		"overlay/lib/firmware/blob": "firmware", "overlay/usr/local/bin/tool": "#!/bin/sh\n", "overlay/tmp/seen": "",
	}
	for _, p := range strings.Fields("kubelet kubeadm containerd containerd-shim-runc-v2 ctr firstboot ipvscare") {
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
	_, err = imagetest.WriteLayout(filepath.Join(dir, "images"), imagetest.Image{
		Ref: "edgebake.test/pause:1",
		Layers: []imagetest.Layer{{Tar: func(w *imagetest.Writer) error {
			return w.Put(tar.Header{Name: "pause", Mode: 0o755}, program)
		}}},
	})
	return err
}
