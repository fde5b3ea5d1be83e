package imagetest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/edgebake/edgebake/ondisk/tree"
	"golang.org/x/sys/unix"
)

// Materialize writes nodes below dir, which must exist, as real files. It needs root.
func Materialize(dir string, nodes []tree.Node, blobs tree.Blobs) error {
	m := materializer{dir: dir, blobs: blobs, open: map[string]tree.BlobFile{}, first: map[*tree.Inode]string{}}
	var err error
	for _, n := range nodes {
		if err = m.node(n); err != nil {
			err = fmt.Errorf("%s: %w", n.Path, err)
			break
		}
	}
	for _, f := range m.open {
		f.Close()
	}
	if err != nil {
		return err
	}
	// Set the times last, because creating a file changes the time of its directory.
	for _, n := range nodes {
		t := unix.NsecToTimespec(n.MTime.UnixNano())
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Join(dir, n.Path), []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("%s: setting its time: %w", n.Path, err)
		}
	}
	return nil
}

type materializer struct {
	dir   string
	blobs tree.Blobs
	open  map[string]tree.BlobFile
	first map[*tree.Inode]string
}

func (m *materializer) node(n tree.Node) error {
	p := filepath.Join(m.dir, n.Path)
	if to, ok := m.first[n.Inode]; ok {
		return os.Link(to, p)
	}
	switch n.Mode & tree.ModeType {
	case tree.ModeDir:
		if err := os.Mkdir(p, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	case tree.ModeRegular:
		if err := m.content(p, n.Data); err != nil {
			return err
		}
	case tree.ModeSymlink:
		if err := os.Symlink(n.Target, p); err != nil {
			return err
		}
	default:
		if err := unix.Mknod(p, n.Mode&tree.ModeType|0o600, int(unix.Mkdev(n.Major, n.Minor))); err != nil {
			return err
		}
	}
	m.first[n.Inode] = p
	if err := os.Lchown(p, int(n.UID), int(n.GID)); err != nil {
		return err
	}
	if !n.IsSymlink() {
		if err := syscall.Chmod(p, n.Mode&0o7777); err != nil {
			return err
		}
	}
	for name, value := range n.Xattrs {
		if err := unix.Lsetxattr(p, name, []byte(value), 0); err != nil {
			return fmt.Errorf("setting %s: %w", name, err)
		}
	}
	return nil
}

func (m *materializer) content(p string, c tree.Content) error {
	f, err := os.OpenFile(p, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if c.Blob == "" {
		_, err := f.Write(c.Inline)
		return err
	}
	if m.open[c.Blob] == nil {
		if m.open[c.Blob], err = m.blobs.OpenBlob(c.Blob); err != nil {
			return err
		}
	}
	_, err = io.Copy(f, io.NewSectionReader(m.open[c.Blob], c.Off, c.Size))
	return err
}
