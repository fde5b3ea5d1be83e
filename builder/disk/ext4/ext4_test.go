package ext4_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/disk/ext4"
	"github.com/edgebake/edgebake/builder/tree"
)

var sourceDate = time.Unix(1767225600, 123456789)

func options(size int64) ext4.Options {
	return ext4.Options{
		Label:    "ROOT-A",
		UUID:     [16]byte{1, 2, 3, 4, 5, 6, 0x47, 8, 0x89, 10, 11, 12, 13, 14, 15, 16},
		HashSeed: [16]byte{9, 8, 7, 6, 5, 4, 0x43, 2, 0x81, 1, 2, 3, 4, 5, 6, 7},
		Size:     size,
		Time:     sourceDate,
	}
}

// tool finds a program that a test takes as oracle.
func tool(t *testing.T, name string) string {
	t.Helper()
	for _, dir := range []string{"", "/usr/sbin/", "/sbin/"} {
		if p, err := exec.LookPath(dir + name); err == nil {
			return p
		}
	}
	if os.Getenv("CI") != "" {
		t.Fatalf("%s is missing; CI must have it", name)
	}
	t.Skipf("SKIPPED, NOT TESTED: %s is missing (package e2fsprogs)", name)
	return ""
}

// write makes an image of nodes and returns its path.
func write(t *testing.T, nodes []tree.Node, blobs tree.Blobs, o ext4.Options) string {
	t.Helper()
	if o.Size == 0 {
		var err error
		if o.Size, err = ext4.Size(nodes, o); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "image")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(o.Size); err != nil {
		t.Fatal(err)
	}
	if _, err := ext4.Write(f, nodes, blobs, o); err != nil {
		t.Fatal(err)
	}
	return path
}

// fsck fails the test unless e2fsck finds nothing at all.
func fsck(t *testing.T, image string) {
	t.Helper()
	out, err := exec.Command(tool(t, "e2fsck"), "-fn", image).CombinedOutput()
	if err != nil {
		t.Fatalf("e2fsck: %v\n%s", err, out)
	}
	for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		if !strings.HasPrefix(line, "e2fsck ") && !strings.HasPrefix(line, "Pass ") && !strings.Contains(line, " files (") {
			t.Errorf("e2fsck says: %s", line)
		}
	}
}

func dir(path string) tree.Node {
	return tree.Node{Path: path, Inode: &tree.Inode{Mode: tree.ModeDir | 0o755, MTime: sourceDate}}
}

func file(path, content string) tree.Node {
	return tree.Node{Path: path, Inode: &tree.Inode{Mode: tree.ModeRegular | 0o644, MTime: sourceDate, Data: tree.Bytes([]byte(content))}}
}

func TestSmallest(t *testing.T) {
	fsck(t, write(t, nil, nil, options(0)))
}

func TestDirectories(t *testing.T) {
	for _, c := range []struct{ names, length int }{{1, 1}, {300, 8}, {20000, 30}, {9000, 255}} {
		t.Run(fmt.Sprintf("%dx%d", c.names, c.length), func(t *testing.T) {
			nodes := []tree.Node{dir("."), dir("d")}
			for i := range c.names {
				name := fmt.Sprintf("%d", i)
				name += strings.Repeat("ü", (c.length-min(c.length, len(name)))/2)
				nodes = append(nodes, file("d/"+name, ""))
			}
			fsck(t, write(t, nodes, nil, options(0)))
		})
	}
}

var _ = bytes.Equal
