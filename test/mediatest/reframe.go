package mediatest

import (
	"io"
	"os"
	"slices"
	"testing"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/seekable"
)

// Reframe copies a compressed image with frames of other sizes. size returns the size of the frame
// at an offset of the disk. extra is inserted between the frames and their table.
func Reframe(t testing.TB, from, to string, size func(off int64) int64, extra []byte) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	z, err := seekable.Open(in, int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	table, err := gpt.Read(z, z.Size())
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(table.Partitions, func(p gpt.Partition) bool { return p.Name == ondisk.LabelSlot })
	begin, end := table.Partitions[i].Start, table.Partitions[i].Start+table.Partitions[i].Size
	enc, err := seekable.NewEncoder()
	if err != nil {
		t.Fatal(err)
	}
	var tab seekable.Table
	var out []byte
	for off := int64(0); off < z.Size(); {
		n := min(size(off), z.Size()-off)
		if raw := off >= begin && off < end; raw {
			n = min(n, end-off)
		} else if off < begin {
			n = min(n, begin-off)
		}
		content := make([]byte, n)
		if _, err := z.ReadAt(content, off); err != nil && err != io.EOF {
			t.Fatal(err)
		}
		at := len(out)
		if off >= begin && off < end {
			out = seekable.Raw(out, content)
		} else {
			out = enc.Encode(out, content)
		}
		tab.Append(len(out)-at, len(content), seekable.Sum(content))
		off += n
	}
	if err := os.WriteFile(to, slices.Concat(out, extra, tab.Encode()), 0o644); err != nil {
		t.Fatal(err)
	}
}
