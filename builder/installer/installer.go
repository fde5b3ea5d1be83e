// Package installer makes sticks, ISO images, and files for network boot that install an image
// unattended. An installer boots the image's own boot loader, kernel and initrd, so their
// signatures stay valid. One more initrd archive contains the installer program, the programs of
// the image that it runs, and its instructions. The image is a separate file.
package installer

import (
	"bytes"
	"context"
	"debug/elf"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
)

//go:embed script.sh
var script []byte

// Options describes an installer.
type Options struct {
	Payload *media.Payload
	// Program is the installer program for the machine's architecture.
	Program []byte
	// Install contains the instructions. Stick, ISO and Netboot set the fields about the image.
	Install ondisk.Install
	// CACert contains CA certificates in PEM. Only these verify the server of the image; nil means
	// the CA certificates of the image's system.
	CACert []byte
}

// parts contains the boot files of an installer.
type parts struct {
	loader  map[string][]byte // file name in EFI/BOOT → content
	kernel  []byte
	initrd  []byte // the image's initrd
	extra   []byte // the archive with the installer's files
	options string
}

// parts reads the boot files of the image and makes the installer's archive.
func (o Options) parts() (*parts, error) {
	p, in := o.Payload, o.Install
	in.Version, in.Image, in.Golden, in.Slot = ondisk.InstallVersion, p.Image.Name, p.Slot.Golden, p.SlotSum
	in.Need, in.Sector = p.Need, p.Sector
	out := &parts{loader: map[string][]byte{}}
	e, err := readEntry(p)
	if err != nil {
		return nil, err
	}
	if out.options = e.options; in.URL != "" {
		out.options += " ip=dhcp"
	}
	names, err := p.ESPFiles("EFI/BOOT")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if out.loader[name], err = p.ESPFile("EFI/BOOT/" + name); err != nil {
			return nil, err
		}
	}
	if out.kernel, err = p.ESPFile(e.kernel); err != nil {
		return nil, err
	}
	for _, name := range e.initrds {
		b, err := p.ESPFile(name)
		if err != nil {
			return nil, err
		}
		// The kernel requires that the next archive begins at a multiple of four bytes.
		out.initrd = append(out.initrd, make([]byte, -len(out.initrd)&3)...)
		out.initrd = append(out.initrd, b...)
	}
	files, err := o.files(in)
	if err != nil {
		return nil, err
	}
	out.extra = archive(files)
	return out, nil
}

// bootEntry is an entry of systemd-boot.
type bootEntry struct {
	kernel  string
	initrds []string
	options string
}

// readEntry reads the boot entry of the image.
func readEntry(p *media.Payload) (*bootEntry, error) {
	text, err := p.ESPFile(ondisk.ESPEntryA)
	if err != nil {
		return nil, fmt.Errorf("reading the boot entry %s of the image: %w: build the image with this edgebake", ondisk.ESPEntryA, err)
	}
	return parseEntry(string(text))
}

func parseEntry(text string) (*bootEntry, error) {
	e := &bootEntry{options: options("")}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		value = strings.TrimSpace(value)
		switch key {
		case "linux":
			e.kernel = strings.TrimPrefix(value, "/")
		case "initrd":
			e.initrds = append(e.initrds, strings.TrimPrefix(value, "/"))
		case "options":
			e.options = options(value)
		}
	}
	if e.kernel == "" || len(e.initrds) == 0 || slices.Contains(e.initrds, "") {
		return nil, fmt.Errorf("the boot entry %s of the image names no kernel and initrd: build the image with this edgebake", ondisk.ESPEntryA)
	}
	return e, nil
}

// options returns the kernel options of the image, such as consoles, without the options about its
// root and its system.
func options(of string) string {
	out := []string{"boot=" + ondisk.InstallBoot}
	for _, o := range words(of) {
		key, _, _ := strings.Cut(o, "=")
		switch {
		case slices.Contains([]string{"root", "rootfstype", "rootflags", "rw", "ro", "rootwait", "boot", "init", "resume"}, key),
			strings.HasPrefix(key, "systemd."), strings.HasPrefix(key, "fsck."):
		default:
			out = append(out, o)
		}
	}
	return strings.Join(out, " ")
}

// words splits a kernel command line. Blanks within double quotes do not separate options.
func words(s string) []string {
	quoted := false
	return strings.FieldsFunc(s, func(r rune) bool {
		if r == '"' {
			quoted = !quoted
		}
		return r == ' ' && !quoted
	})
}

// files returns the files that the installer adds to the initrd of the image.
func (o Options) files(in ondisk.Install) (map[string]member, error) {
	p := o.Payload
	if _, err := p.SystemFile("usr/share/initramfs-tools/init"); err != nil {
		return nil, fmt.Errorf("the image's initrd is not from initramfs-tools (%w), which the installer requires: use a Debian base with initramfs-tools", err)
	}
	config, err := json.MarshalIndent(in, "", "  ")
	if err != nil {
		return nil, err
	}
	out := map[string]member{}
	put := func(name string, mode uint32, b []byte) { out[strings.TrimPrefix(name, "/")] = member{mode, b} }
	put(ondisk.InstallConfig, 0o600, append(config, '\n'))
	put(ondisk.InstallProgram, 0o755, o.Program)
	put(ondisk.InstallScript, 0o644, script)
	// Package device runs these programs.
	for _, name := range []string{"usr/bin/lsblk", "usr/sbin/wipefs"} {
		b, libs, err := program(p, name)
		if err != nil {
			return nil, err
		}
		put(path.Join(ondisk.InstallDir, "bin", path.Base(name)), 0o755, b)
		for lib, b := range libs {
			put(path.Join(ondisk.InstallDir, "lib", lib), 0o755, b)
		}
	}
	ca := o.CACert
	if ca == nil {
		ca, err = p.SystemFile("etc/ssl/certs/ca-certificates.crt")
	}
	switch {
	case err == nil:
		put(ondisk.InstallCA, 0o644, ca)
	case strings.HasPrefix(in.URL, "https://"):
		return nil, fmt.Errorf("the image has no certificates of CAs, so the installer could not verify the server of %s: name the server's CA with --ca-cert, or add the package ca-certificates to the base", in.URL)
	}
	// efivarfs is required to make the firmware boot the disk next.
	dir := "usr/lib/modules/" + p.Image.Kernel + "/kernel/"
	for _, m := range []string{"fs/efivarfs/efivarfs.ko"} {
		for _, ending := range []string{"", ".xz", ".zst", ".gz"} {
			b, err := p.SystemFile(dir + m + ending)
			if errors.Is(err, fs.ErrNotExist) {
				continue // has another ending, or is built into the kernel
			}
			if err != nil {
				return nil, err
			}
			put(path.Join(ondisk.InstallModules, path.Base(m)+ending), 0o644, b)
		}
	}
	return out, nil
}

// libraryDirs lists the directories of Debian for shared libraries.
var libraryDirs = map[string][]string{
	"amd64": {"usr/lib/x86_64-linux-gnu", "usr/lib", "lib/x86_64-linux-gnu", "lib"},
	"arm64": {"usr/lib/aarch64-linux-gnu", "usr/lib", "lib/aarch64-linux-gnu", "lib"},
}

// program returns a program of the image's system, and all shared libraries that it needs.
func program(p *media.Payload, name string) ([]byte, map[string][]byte, error) {
	b, err := p.SystemFile(name)
	if err != nil {
		return nil, nil, fmt.Errorf("the image has no %s, with which the installer lists disks: %w: add the package util-linux to the base", name, err)
	}
	libs := map[string][]byte{}
	todo := [][]byte{b}
	for len(todo) > 0 {
		f, err := elf.NewFile(bytes.NewReader(todo[0]))
		if err != nil {
			return nil, nil, fmt.Errorf("reading %s of the image: %w", name, err)
		}
		needs, err := f.ImportedLibraries()
		if err != nil {
			return nil, nil, fmt.Errorf("reading %s of the image: %w", name, err)
		}
		todo = todo[1:]
		for _, lib := range needs {
			if _, ok := libs[lib]; ok {
				continue
			}
			found, err := library(p, lib)
			if err != nil {
				return nil, nil, fmt.Errorf("%s of the image needs the library %s: %w", name, lib, err)
			}
			libs[lib] = found
			todo = append(todo, found)
		}
	}
	return b, libs, nil
}

func library(p *media.Payload, name string) ([]byte, error) {
	err := fs.ErrNotExist
	for _, dir := range libraryDirs[p.Image.Arch] {
		var b []byte
		if b, err = p.SystemFile(dir + "/" + name); !errors.Is(err, fs.ErrNotExist) {
			return b, err
		}
	}
	return nil, err
}

// Paths of the installer's files on its EFI system partition.
const (
	espKernel = "edgebake/linux"
	espInitrd = "edgebake/initrd"
	espExtra  = ondisk.InstallArchive
	espEntry  = "loader/entries/edgebake-installer.conf"
)

// esp returns the files of the installer's EFI system partition.
func (ps *parts) esp(name string, when time.Time) []tree.Node {
	files := map[string][]byte{
		espKernel: ps.kernel, espInitrd: ps.initrd, espExtra: ps.extra,
		"loader/loader.conf": []byte("timeout 0\neditor no\nauto-entries no\nauto-firmware no\n"),
		espEntry: fmt.Appendf(nil, "title Install %s\nlinux /%s\ninitrd /%s\ninitrd /%s\noptions %s\n",
			name, espKernel, espInitrd, espExtra, ps.options),
	}
	for file, b := range ps.loader {
		files["EFI/BOOT/"+file] = b
	}
	return nodes(files, when)
}

// nodes returns a tree of these files, parents first.
func nodes(files map[string][]byte, when time.Time) []tree.Node {
	inodes := map[string]*tree.Inode{}
	for name, b := range files {
		inodes[name] = &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: when, Data: tree.Bytes(b)}
		for d := path.Dir(name); ; d = path.Dir(d) {
			inodes[d] = &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: when}
			if d == "." {
				break
			}
		}
	}
	var out []tree.Node
	for name, i := range inodes {
		out = append(out, tree.Node{Path: name, Inode: i})
	}
	slices.SortFunc(out, func(a, b tree.Node) int {
		if a.Path == "." || b.Path == "." {
			return strings.Compare(strings.TrimPrefix(a.Path, "."), strings.TrimPrefix(b.Path, "."))
		}
		return slices.Compare(strings.Split(a.Path, "/"), strings.Split(b.Path, "/"))
	})
	return out
}

// blobs provides the payload to the file system writer.
type blobs struct{ p *media.Payload }

const payloadBlob = "payload"

func (b blobs) OpenBlob(name string) (tree.BlobFile, error) {
	if name != payloadBlob {
		return nil, fmt.Errorf("BUG: there is no blob %s", name)
	}
	return open{b.p}, nil
}

// open is the payload as a blob. Its Close does nothing, because the payload's owner closes it.
type open struct{ *media.Payload }

func (open) Close() error { return nil }

// Warn returns a warning if the image's kernel has no driver for USB sticks, or "". The installer
// may still boot in a virtual machine with another bus.
func Warn(p *media.Payload) string {
	dir := "usr/lib/modules/" + p.Image.Kernel
	var all []byte
	for _, list := range []string{"modules.builtin", "modules.dep"} {
		b, err := p.SystemFile(dir + "/" + list)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err.Error()
		}
		all = append(all, b...)
	}
	if len(all) == 0 || bytes.Contains(all, []byte("/usb-storage.ko")) {
		return "" // the kernel's drivers are unknown, or it has this one
	}
	return "the image's kernel (" + p.Image.Kernel + ") has no driver for USB sticks, so the installer will not find its own image on a stick. Build the image with hardware: generic"
}

// Stick writes the raw disk image of an installer to file. sector is the sector size of the stick
// in bytes.
func Stick(ctx context.Context, file string, sector int64, o Options, progress func(done, total int64)) error {
	o.Install.Partition = disk.PartitionGUID(o.Install.ID, ondisk.LabelInstall)
	ps, err := o.parts()
	if err != nil {
		return err
	}
	when := time.Unix(o.Payload.Image.SourceDate, 0).UTC()
	boot := ps.esp(o.Payload.Image.Name, when)
	image := nodes(map[string][]byte{ondisk.InstallImage: nil}, when)
	for i := range image {
		if image[i].IsRegular() {
			image[i].Mode = tree.ModeRegular | 0o600
			image[i].Data = tree.Content{Blob: payloadBlob, Size: o.Payload.Size()}
		}
	}
	return o.write(ctx, file, sector, progress,
		disk.Partition{Label: ondisk.LabelESP, FS: disk.FAT32, Size: espSize(boot, sector), Nodes: boot},
		disk.Partition{Label: ondisk.LabelInstall, FS: disk.Ext4, Nodes: image})
}

// write writes a raw disk image with these partitions.
func (o Options) write(ctx context.Context, file string, sector int64, progress func(done, total int64), partitions ...disk.Partition) error {
	spec := disk.Spec{ID: o.Install.ID, Arch: o.Payload.Image.Arch, SourceDate: time.Unix(o.Payload.Image.SourceDate, 0).UTC(), SectorSize: sector, Partitions: partitions}
	layout, err := disk.Compute(spec)
	if err != nil {
		return err
	}
	if _, err := disk.Write(ctx, file, spec, layout, blobs{o.Payload}, disk.WriteOptions{Progress: progress}); err != nil {
		return err
	}
	progress(o.Payload.Size(), o.Payload.Size())
	return nil
}

// espSize returns the size of the ESP in bytes: enough for the files, and for FAT32 with this
// sector size.
func espSize(files []tree.Node, sector int64) int64 {
	n := int64(0)
	for _, f := range files {
		n += f.Data.Size + 64<<10
	}
	return max(n+n/16, 66_000*max(sector, 512))
}
