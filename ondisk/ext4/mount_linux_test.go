package ext4_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/desk"
	"golang.org/x/sys/unix"
)

// mount mounts an image, or skips the test without root or a loop device.
func mount(t *testing.T, image, options string) (dir string, unmount func()) {
	t.Helper()
	desk.NeedRoot(t, "it mounts")
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		desk.Lacks(t, "no loop devices here (modprobe loop): %v", err)
	}
	dir = t.TempDir()
	if out, err := exec.Command("mount", "-t", "ext4", "-o", "loop,"+options, image, dir).CombinedOutput(); err != nil {
		desk.Lacks(t, "mount: %v\n%s", err, out)
	}
	mounted := true
	unmount = func() {
		if !mounted {
			return
		}
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Fatalf("umount: %v\n%s", err, out)
		}
		mounted = false
	}
	t.Cleanup(unmount)
	return dir, unmount
}

// fromKernel returns nodes for the files below dir as the kernel shows them.
func fromKernel(t *testing.T, dir string) []tree.Node {
	t.Helper()
	var nodes []tree.Node
	inodes := map[uint64]*tree.Inode{}
	err := filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return fmt.Errorf("stat %q: %w", p, err)
		}
		in := inodes[st.Ino]
		if in == nil {
			in = &tree.Inode{
				Mode: st.Mode, UID: st.Uid, GID: st.Gid, Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev),
				MTime: time.Unix(st.Mtim.Sec, st.Mtim.Nsec), Xattrs: kernelXattrs(t, p),
			}
			switch {
			case in.IsRegular():
				b, err := os.ReadFile(p)
				if err != nil {
					return err
				}
				in.Data = tree.Bytes(b)
			case in.IsSymlink():
				if in.Target, err = os.Readlink(p); err != nil {
					return err
				}
			}
			inodes[st.Ino] = in
		}
		nodes = append(nodes, tree.Node{Path: rel, Inode: in})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return nodes
}

func kernelXattrs(t *testing.T, path string) map[string]string {
	t.Helper()
	list := make([]byte, 4<<10)
	n, err := unix.Llistxattr(path, list)
	if err != nil {
		t.Fatalf("listing extended attributes of %q: %v", path, err)
	}
	out := map[string]string{}
	for name := range bytes.SplitSeq(bytes.TrimSuffix(list[:n], []byte{0}), []byte{0}) {
		if len(name) == 0 {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, string(name), value)
		if err != nil {
			t.Fatalf("extended attribute %s of %q: %v", name, path, err)
		}
		out[string(name)] = string(value[:n])
	}
	return out
}

func TestKernelReadsTheTree(t *testing.T) {
	nodes, b := nasty()
	dir, _ := mount(t, write(t, nodes, b, options(0)), "ro")
	compare(t, flat(t, nodes, b), flat(t, fromKernel(t, dir), nil))
}

// TestKernelWritesOn checks that the kernel can use the file system: it adds and removes names in
// indexed directories, and allocates blocks in all groups.
func TestKernelWritesOn(t *testing.T) {
	nodes, b := nasty()
	o := options(0)
	o.FreeBytes, o.FreeInodes = 200<<20, 40000
	image := write(t, nodes, b, o)
	dir, unmount := mount(t, image, "rw")
	for i := 0; i < 20000; i += 5 {
		old := filepath.Join(dir, "n/20000", fmt.Sprintf("file-with-a-name-%06d.yaml", i))
		if i%3 == 0 {
			if err := os.Remove(old); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(old+".new", []byte("new"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	for i := range 80 {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("big%d", i)), big, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(filepath.Join(dir, "n/deep")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Lsetxattr(filepath.Join(dir, "n/xmany"), "user.more", bytes.Repeat([]byte("m"), 500), 0); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "n/size4097"), []byte("shorter"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := fromKernel(t, dir)
	unmount()
	fsck(t, image)
	r := open(t, image)
	got, err := r.Nodes()
	if err != nil {
		t.Fatal(err)
	}
	compare(t, flat(t, want, nil), flat(t, got, r))
}
