// Package mediatest makes golden images that no machine boots and every program
// of ours takes for whole. For tests only.
package mediatest

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/disktest"
)

// Date is that of the images.
var Date = time.Date(2026, 1, 2, 3, 4, 6, 0, time.UTC)

// Image is what an image is made of.
type Image struct {
	// ID seeds all that is random in it.
	ID string
	// Data bytes are in its root, half of them noise, half easy to compress.
	Data int64
	// Free bytes are in its root, and in DATA.
	FreeRoot, FreeData int64
	// Sign, where set, signs it.
	Sign func(golden string, imageInfo []byte) (string, error)
}

// Make builds an image, compressed where the name ends in .zst.
func Make(t testing.TB, path string, i Image) *disk.Result {
	t.Helper()
	noise := make([]byte, i.Data)
	seed := [32]byte{1}
	copy(seed[1:], i.ID)
	rand.NewChaCha8(seed).Read(noise[:i.Data/2])
	copy(noise[i.Data/2:], bytes.Repeat([]byte("edgebake"), int(i.Data/16)))
	dir := func(p string) tree.Node {
		return tree.Node{Path: p, Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: Date}}
	}
	file := func(name string, text []byte) tree.Node {
		return tree.Node{Path: name, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: Date, Data: tree.Bytes(text)}}
	}
	spec := disk.Spec{ID: i.ID, Arch: "amd64", SourceDate: Date, Partitions: []disk.Partition{
		{Label: ondisk.LabelESP, FS: disk.FAT32, Nodes: []tree.Node{dir(".")}},
		{Label: ondisk.LabelSlot, FS: disk.FAT16},
		{Label: ondisk.LabelRootA, FS: disk.Ext4, FreeBytes: i.FreeRoot, Nodes: []tree.Node{dir("."), {Path: "data", Inode: &tree.Inode{
			Mode: tree.ModeRegular | 0o644, MTime: Date, Data: tree.Content{Blob: "b", Size: i.Data}}}}},
		{Label: ondisk.LabelRootB},
		{Label: ondisk.LabelData, FS: disk.Ext4, FreeBytes: i.FreeData, Nodes: []tree.Node{dir("."), dir("lib")}},
	}}
	l, err := disk.Compute(spec)
	if err != nil {
		t.Fatal(err)
	}
	info, err := json.Marshal(ondisk.ImageInfo{Version: ondisk.ImageInfoVersion, Name: i.ID, Plan: i.ID, Arch: spec.Arch, SourceDate: Date.Unix(),
		NodeTypes: []string{"edge", "native"}, SiteVersions: []string{"v1alpha1"}, InventoryVersions: []string{"v1alpha1"}, Kubernetes: "v1.36.3", Partitions: l.Parts})
	if err != nil {
		t.Fatal(err)
	}
	spec.Partitions[0].Nodes = append(spec.Partitions[0].Nodes, file(ondisk.ESPImageInfo, info),
		file(ondisk.ESPEntryA, []byte("options root=PARTUUID="+l.Find(ondisk.LabelRootA).GUID+"\n")))
	res, err := disk.Write(t.Context(), path, spec, l, disktest.Blobs{"b": noise}, disk.WriteOptions{
		Zstd: strings.HasSuffix(path, ".zst"), ImageInfo: info,
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
