// Package mediatest makes golden images that no machine can boot, but that edgebake's programs
// accept as complete. For tests only.
package mediatest

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/disktest"
)

// Date is the time of the files in the images.
var Date = time.Date(2026, 1, 2, 3, 4, 6, 0, time.UTC)

// Image describes an image.
type Image struct {
	// ID is the plan's ID. It is also the seed of all random data, unless Seed is set.
	ID, Seed string
	// Data is the size in bytes of a file in the root file system. Half of it is random, the other
	// half compresses well.
	Data int64
	// FreeRoot and FreeData are the numbers of free bytes in the root file system and on DATA.
	FreeRoot, FreeData int64
	// Sign, if set, signs the image, and SignIndex its index of chunks.
	Sign      func(golden string, imageInfo []byte) (string, error)
	SignIndex func(body []byte) (string, error)
	// Initrd, if set, adds a kernel and this initrd to the system's directory, and a boot entry for
	// them. ESP is then the size of the EFI system partition.
	Initrd []byte
	ESP    int64
	// Files are more files in the root file system, by path.
	Files map[string][]byte
	// Store has the nodes of containerd's store, with paths below var, and Blobs their contents.
	Store []tree.Node
	Blobs tree.Blobs
	// Info, if set, changes the image's image.json.
	Info func(*ondisk.ImageInfo)
}

// Make builds an image at path, compressed if path ends in .zst.
func Make(t testing.TB, path string, i Image) *disk.Result {
	t.Helper()
	noise := make([]byte, i.Data)
	seed := [32]byte{1}
	copy(seed[1:], cmp.Or(i.Seed, i.ID))
	rand.NewChaCha8(seed).Read(noise[:i.Data/2])
	copy(noise[i.Data/2:], bytes.Repeat([]byte("edgebake"), int(i.Data/16)))
	dir := func(p string) tree.Node {
		return tree.Node{Path: p, Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: Date}}
	}
	file := func(name string, text []byte) tree.Node {
		return tree.Node{Path: name, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: Date, Data: tree.Bytes(text)}}
	}
	spec := disk.Spec{ID: i.ID, Arch: "amd64", SourceDate: Date, Partitions: []disk.Partition{
		{Label: ondisk.LabelESP, FS: disk.FAT32, Size: i.ESP, Nodes: []tree.Node{dir(".")}},
		{Label: ondisk.LabelSlot, FS: disk.FAT16},
		{Label: ondisk.LabelRootA, FS: disk.Ext4, FreeBytes: i.FreeRoot, Nodes: []tree.Node{dir("."), {Path: "data", Inode: &tree.Inode{
			Mode: tree.ModeRegular | 0o644, MTime: Date, Data: tree.Content{Blob: "b", Size: i.Data}}}}},
		{Label: ondisk.LabelRootB},
		{Label: ondisk.LabelData, FS: disk.Ext4, FreeBytes: i.FreeData, Nodes: []tree.Node{dir("."), dir("lib")}},
	}}
	for _, name := range slices.Sorted(maps.Keys(i.Files)) {
		spec.Partitions[2].Nodes = append(spec.Partitions[2].Nodes, file(name, i.Files[name]))
	}
	for _, n := range i.Store {
		if p, ok := strings.CutPrefix(n.Path, "var/"); ok && p != "lib" {
			n.Path = p
			spec.Partitions[4].Nodes = append(spec.Partitions[4].Nodes, n)
		}
	}
	l, err := disk.Compute(spec)
	if err != nil {
		t.Fatal(err)
	}
	about := ondisk.ImageInfo{Version: ondisk.ImageInfoVersion, Name: i.ID, Plan: i.ID, Arch: spec.Arch, SourceDate: Date.Unix(),
		NodeTypes: []string{"edge", "native"}, SiteVersions: []string{"v1alpha1"}, InventoryVersions: []string{"v1alpha1"}, Kubernetes: "v1.36.3", Partitions: l.Parts}
	if i.Info != nil {
		i.Info(&about)
	}
	info, err := json.Marshal(about)
	if err != nil {
		t.Fatal(err)
	}
	entry := "options root=PARTUUID=" + l.Find(ondisk.LabelRootA).GUID + "\n"
	if i.Initrd != nil {
		system := ondisk.ESPSystemDir(i.ID)
		entry = fmt.Sprintf("title test\nsort-key %s\nversion %d\nlinux /%s/linux\ninitrd /%s/initrd\n", ondisk.ESPSortKey, ondisk.ESPFirstVersion, system, system) +
			strings.TrimSpace(entry) + " data=" + l.Find(ondisk.LabelData).GUID + " esp=" + l.Find(ondisk.LabelESP).GUID + "\n"
		spec.Partitions[0].Nodes = append(spec.Partitions[0].Nodes, dir("edgebake"), dir(system), file(system+"/linux", []byte("kernel")), file(system+"/initrd", i.Initrd))
	}
	spec.Partitions[0].Nodes = append(spec.Partitions[0].Nodes, file(ondisk.ESPImageInfo, info), file(ondisk.ESPEntryA, []byte(entry)))
	res, err := disk.Write(t.Context(), path, spec, l, blobs{disktest.Blobs{"b": noise}, i.Blobs}, disk.WriteOptions{
		Zstd: strings.HasSuffix(path, ".zst"), ImageInfo: info, SignIndex: i.SignIndex,
		Slot: func(d disk.Digest) ([]byte, error) {
			s := ondisk.SlotInfo{Version: ondisk.SlotInfoVersion, Plan: spec.ID, Golden: d.Golden, Parts: d.Parts, SiteVersions: []string{"v1alpha1"}}
			if i.Sign != nil {
				if s.Signature, err = i.Sign(d.Golden, info); err != nil {
					return nil, err
				}
			}
			return slot.Make(slot.Contents{Info: s, Time: Date})
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return res
}

// Noise returns n bytes that cannot be compressed.
func Noise(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{7}).Read(b)
	return b
}

// blobs combines the blobs of two sources.
type blobs struct {
	disktest.Blobs
	more tree.Blobs
}

func (b blobs) OpenBlob(name string) (tree.BlobFile, error) {
	if _, ok := b.Blobs[name]; ok || b.more == nil {
		return b.Blobs.OpenBlob(name)
	}
	return b.more.OpenBlob(name)
}
