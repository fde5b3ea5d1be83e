package media

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/ext4"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// TestManyHardLinks checks that an image whose files claim far more bytes than its partition has is
// rejected. Reading them could take hours, or all memory.
func TestManyHardLinks(t *testing.T) {
	t.Parallel()
	for _, links := range []int{5, 500} {
		in := &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: time.Unix(1e9, 0), Data: tree.Bytes(bytes.Repeat([]byte("a\n"), 128<<10))}
		nodes := []tree.Node{{Path: ".", Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: time.Unix(1e9, 0)}}}
		for i := range links {
			nodes = append(nodes, tree.Node{Path: fmt.Sprintf("f%06d", i), Inode: in})
		}
		o := ext4.Options{Label: ondisk.LabelRootA, UUID: [16]byte{1, 2, 3, 4, 5, 6, 0x47, 8, 0x89, 10}, HashSeed: [16]byte{9, 8, 7, 6, 5, 4, 0x43, 2, 0x81, 1}, Time: time.Unix(1e9, 0)}
		var err error
		if o.Size, err = ext4.Size(nodes, o); err != nil {
			t.Fatal(err)
		}
		f, err := os.Create(filepath.Join(t.TempDir(), "image"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := f.Truncate(o.Size); err != nil {
			t.Fatal(err)
		}
		if _, err := ext4.Write(f, nodes, nil, o); err != nil {
			t.Fatal(err)
		}
		m := &Image{f: f, src: f, size: o.Size, table: &gpt.Table{Partitions: []gpt.Partition{{Name: ondisk.LabelRootA, Size: o.Size}}}}
		files := map[string]Listed{}
		err = m.listTree(ondisk.LabelRootA, files)
		if few := links == 5; few != (err == nil) || few && len(files) < links || !few && !strings.Contains(err.Error(), "8 times as many bytes") {
			t.Errorf("%d links of 256 KiB in %d bytes: %d files, %v", links, o.Size, len(files), err)
		}
	}
}
