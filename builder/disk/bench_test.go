package disk

import (
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// fileBlobs is a directory of blobs, opened as the cache opens them.
type fileBlobs string

func (d fileBlobs) OpenBlob(name string) (tree.BlobFile, error) {
	return os.Open(filepath.Join(string(d), name))
}

// realistic returns an image with 15,000 files of 500 MB in total. All are ranges of one blob.
func realistic(b *testing.B) (Spec, fileBlobs) {
	b.Helper()
	d := b.TempDir()
	const size = 500 << 20
	f, err := os.Create(filepath.Join(d, "blob"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	rnd := rand.NewChaCha8([32]byte{1})
	buf := make([]byte, 1<<20)
	for off := int64(0); off < size; off += int64(len(buf)) {
		rnd.Read(buf[:len(buf)/2]) // the second half of buf stays zero, and compresses
		if _, err := f.WriteAt(buf, off); err != nil {
			b.Fatal(err)
		}
	}
	root := []tree.Node{dir("."), dir("usr")}
	at := int64(0)
	for i := range 15000 {
		n := int64(10000 + i%1000)
		if i%100 == 0 {
			n = 2 << 20
		}
		n = min(n, size-at)
		root = append(root, tree.Node{Path: fmt.Sprintf("usr/file%05d", i), Inode: &tree.Inode{
			Mode: tree.ModeRegular | 0o644, MTime: date, Data: tree.Content{Blob: "blob", Off: at, Size: n}}})
		at += n
	}
	esp := []tree.Node{dir("."), {Path: "linux", Inode: &tree.Inode{Mode: tree.ModeRegular, MTime: date, Data: tree.Content{Blob: "blob", Size: 60 << 20}}}}
	return Spec{ID: "bench", Arch: "amd64", SourceDate: date, Partitions: []Partition{
		{Label: ondisk.LabelESP, FS: FAT32, Nodes: esp},
		{Label: ondisk.LabelSlot, FS: FAT16},
		{Label: ondisk.LabelRootA, FS: Ext4, Nodes: root, FreeBytes: 256 << 20},
		{Label: ondisk.LabelRootB},
		{Label: ondisk.LabelData, FS: Ext4, Nodes: []tree.Node{dir(".")}, FreeBytes: 64 << 20},
	}}, fileBlobs(d)
}

// BenchmarkWrite alternates between writing an image and writing the bytes of its files with dd to
// the same file system. "x-dd" is the ratio of their times.
func BenchmarkWrite(b *testing.B) {
	for _, zstd := range []bool{false, true} {
		b.Run(fmt.Sprintf("zstd=%v", zstd), func(b *testing.B) {
			s, blobs := realistic(b)
			l, err := Compute(s)
			if err != nil {
				b.Fatal(err)
			}
			used := int64(0)
			for _, p := range l.Parts {
				used += p.Used
			}
			d := b.TempDir()
			var ours, theirs time.Duration
			for b.Loop() {
				start := time.Now()
				if _, err := Write(b.Context(), filepath.Join(d, "image"), s, l, blobs, WriteOptions{Force: true, Zstd: zstd, Slot: testSlot}); err != nil {
					b.Fatal(err)
				}
				ours += time.Since(start)
				b.StopTimer()
				start = time.Now()
				out, err := exec.Command("dd", "if="+filepath.Join(string(blobs), "blob"), "of="+filepath.Join(d, "dd"), "bs=1M",
					fmt.Sprintf("count=%d", used>>20), "conv=notrunc", "status=none").CombinedOutput()
				if err != nil {
					b.Fatalf("dd: %v %s", err, out)
				}
				theirs += time.Since(start)
				os.Remove(filepath.Join(d, "dd"))
				b.StartTimer()
			}
			b.ReportMetric(float64(ours)/float64(theirs), "x-dd")
		})
	}
}

// BenchmarkGolden alternates between computing the golden digest and one plain SHA-256 of the same
// image. "x-sha256" is the ratio of their times.
func BenchmarkGolden(b *testing.B) {
	s, blobs := realistic(b)
	l, err := Compute(s)
	if err != nil {
		b.Fatal(err)
	}
	path := filepath.Join(b.TempDir(), "image")
	if _, err := Write(b.Context(), path, s, l, blobs, WriteOptions{Slot: testSlot}); err != nil {
		b.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	var ours, theirs time.Duration
	for b.Loop() {
		start := time.Now()
		_, err := Digests(b.Context(), Source{Read: func(buf []byte, off, n int64) ([]byte, bool, error) {
			_, err := f.ReadAt(buf[:n], off)
			return buf[:n], false, err
		}}, l.Parts)
		if err != nil {
			b.Fatal(err)
		}
		ours += time.Since(start)
		b.StopTimer()
		start = time.Now()
		if _, err := io.Copy(sha256.New(), io.NewSectionReader(f, 0, l.Size)); err != nil {
			b.Fatal(err)
		}
		theirs += time.Since(start)
		b.StartTimer()
	}
	b.ReportMetric(float64(ours)/float64(theirs), "x-sha256")
}
