package disk

import (
	"archive/tar"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"

	"github.com/edgebake/edgebake/test/bench"
)

const imageResults = "../results/image.md"

// promised is the maximum time of writing a golden image, as a multiple of dd's time.
const promised = 2.0

// childImage writes a golden image from a tar: five partitions, the golden digest and the slot.
func childImage(tarPath, image string) error {
	nodes, size, r, err := readTar(tarPath)
	if err != nil {
		return err
	}
	start, cpu := time.Now(), processorTime()
	root := tree.Node{Path: ".", Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: mtime}}
	// The kernel with its initrd is as large as Debian's.
	boot := tree.Node{Path: "linux", Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: mtime, Data: tree.Content{Blob: "tar", Size: min(size, 40<<20)}}}
	spec := disk.Spec{ID: "bench", Arch: "amd64", SourceDate: mtime, Partitions: []disk.Partition{
		{Label: ondisk.LabelESP, FS: disk.FAT32, Nodes: []tree.Node{root, boot}},
		{Label: ondisk.LabelSlot, FS: disk.FAT16},
		{Label: ondisk.LabelRootA, FS: disk.Ext4, Nodes: nodes, FreeBytes: 256 << 20},
		{Label: ondisk.LabelRootB},
		{Label: ondisk.LabelData, FS: disk.Ext4, Nodes: []tree.Node{root}, FreeBytes: 512 << 20},
	}}
	layout, err := disk.Compute(spec)
	if err != nil {
		return err
	}
	res, err := disk.Write(context.Background(), image, spec, layout, tarBlob(tarPath), disk.WriteOptions{
		Slot: func(disk.Digest) ([]byte, error) { return make([]byte, ondisk.SlotSize), nil },
	})
	if err != nil {
		return err
	}
	r.Write, r.CPU, r.Size = time.Since(start).Seconds(), processorTime()-cpu, layout.Size
	for _, p := range res.Parts {
		r.Written += p.Written
	}
	return r.print()
}

// largeTree writes the tree for which the maximum memory is promised.
func largeTree(w *tar.Writer) error {
	from := filler(4)
	for i := range 100_000 {
		if i%100 == 0 {
			if err := w.WriteHeader(header(tar.TypeDir, fmt.Sprintf("d%03d/", i/100), 0)); err != nil {
				return err
			}
		}
		if err := addFile(w, from, fmt.Sprintf("d%03d/file-%06d", i/100, i), 19<<10); err != nil {
			return err
		}
	}
	return nil
}

// BenchmarkImage alternately writes a whole golden image, and with dd as many bytes to the same
// file system: in memory, and on a disk.
func BenchmarkImage(b *testing.B) {
	if b.N > 1 {
		return
	}
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	n := bench.Runs(b, 5)
	var out strings.Builder
	fmt.Fprintf(&out, "# Golden images and dd\n\n"+
		"Made by `make bench` (test/bench/disk). Median of %d runs each, in turns, %d processors.\n"+
		"A whole image from cached inputs: layout, five partitions, golden digest, slot. `dd` copies as many bytes as were written to the same file system; promised are %.1f times its time.\n"+
		"On a machine that others use as well, processor time is the steadier figure: a golden image is hashed besides, on another processor if there is one to spare.\n"+
		"Memory is the peak of the process (VmHWM); promised are 256 MiB for 2 GiB with 100,000 entries.\n", n, runtime.NumCPU(), promised)
	memory, kind := scratch(b)
	places := []struct{ dir, kind string }{{memory, kind}}
	if kind == "tmpfs" {
		d, err := os.MkdirTemp("", "edgebake-bench-")
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { os.RemoveAll(d) })
		places = append(places, struct{ dir, kind string }{d, "a disk"})
	}
	for _, t := range []tarTree{{"a root file system of 500 MB", rootfs}, {"2 GiB in 100,000 entries", largeTree}} {
		tarPath := filepath.Join(memory, "tree.tar")
		if err := t.make(tarPath); err != nil {
			b.Fatal(err)
		}
		for _, p := range places {
			compareImage(b, &out, t.name+", on "+p.kind, tarPath, p.dir, self, n)
		}
		os.Remove(tarPath)
	}
	b.Log("\n" + out.String())
	if err := os.WriteFile(imageResults, []byte(out.String()), 0o644); err != nil {
		b.Fatal(err)
	}
}

func compareImage(b *testing.B, out io.Writer, name, tarPath, dir, self string, n int) {
	image, same := filepath.Join(dir, "image.raw"), filepath.Join(dir, "same")
	defer os.Remove(image)
	defer os.Remove(same)
	var ours report
	child := func() {
		os.Remove(image)
		p, err := run(b.Context(), childEnv+"=image", self, tarPath, image)
		if err != nil {
			b.Fatal(err)
		}
		if err := json.Unmarshal(p.out, &ours); err != nil {
			b.Fatal(err)
		}
	}
	child() // determines the number of bytes
	if err := fillFile(same, tarPath, ours.Written); err != nil {
		b.Fatal(err)
	}
	dd, us := &writer{name: "dd"}, &writer{name: "golden image"}
	for i := range n {
		b.Logf("%s: run %d of %d", name, i+1, n)
		os.Remove(image)
		p, err := run(b.Context(), "LC_ALL=C", "dd", "if="+same, "of="+image, "bs=1M", "status=none")
		if err != nil {
			b.Fatal(err)
		}
		dd.seconds, dd.cpu, dd.peak = append(dd.seconds, p.seconds), append(dd.cpu, p.cpu), max(dd.peak, p.peak)
		child()
		us.seconds, us.cpu, us.peak = append(us.seconds, ours.Write), append(us.cpu, ours.CPU), max(us.peak, ours.Peak)
	}
	fmt.Fprintf(out, "\n## %s\n\n%d entries, %d MiB written into an image of %d MiB; indexing the tar takes %.2f s\n\n"+
		"| writer | seconds | least | × dd | least × dd | processor s | × dd | peak MiB |\n|---|---|---|---|---|---|---|---|\n",
		strings.ToUpper(name[:1])+name[1:], ours.Entries, ours.Written>>20, ours.Size>>20, ours.Index)
	for _, w := range []*writer{dd, us} {
		fmt.Fprintf(out, "| %s | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f | %s |\n", w.name, bench.Median(w.seconds), slices.Min(w.seconds),
			bench.Median(w.seconds)/bench.Median(dd.seconds), slices.Min(w.seconds)/slices.Min(dd.seconds), bench.Median(w.cpu), bench.Median(w.cpu)/bench.Median(dd.cpu), mib(w.peak))
	}
	slug := strings.ReplaceAll(strings.ReplaceAll(name, " ", "-"), ",", "")
	b.ReportMetric(bench.Median(us.seconds)/bench.Median(dd.seconds), slug+"/x-dd")
}
