package host

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// WriteTree makes the directory dir, which must not exist, and the nodes of walk below it. Only
// root may have write access to dir's parent.
func (f Files) WriteTree(ctx context.Context, dir string, blobs tree.Blobs, walk func(func(tree.Node) error) error) error {
	w := treeWriter{dir: filepath.Join(f.Root, dir), blobs: blobs, first: map[*tree.Inode]string{}}
	if err := os.Mkdir(w.dir, 0o700); err != nil {
		return err
	}
	err := walk(func(n tree.Node) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := w.node(n); err != nil {
			return fmt.Errorf("writing %s: %w", n.Path, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	// Set times last, because a new file changes the time of its directory.
	for _, d := range w.dirs {
		if err := setTime(filepath.Join(w.dir, d.Path), d.Inode); err != nil {
			return fmt.Errorf("writing %s: %w", d.Path, err)
		}
	}
	return nil
}

type treeWriter struct {
	dir   string
	blobs tree.Blobs
	first map[*tree.Inode]string // first name of each file with hard links
	dirs  []tree.Node
}

func (w *treeWriter) node(n tree.Node) error {
	p := filepath.Join(w.dir, n.Path)
	if n.IsDir() {
		w.dirs = append(w.dirs, n)
		if err := os.Mkdir(p, 0o700); err != nil {
			return err
		}
		return setOwner(p, n.Inode)
	}
	if first, ok := w.first[n.Inode]; ok {
		return os.Link(first, p)
	}
	w.first[n.Inode] = p
	var err error
	switch n.Mode & tree.ModeType {
	case tree.ModeRegular:
		err = w.content(p, n.Data)
	case tree.ModeSymlink:
		err = os.Symlink(n.Target, p)
	default:
		err = unix.Mknod(p, n.Mode&tree.ModeType|0o600, int(unix.Mkdev(n.Major, n.Minor)))
	}
	if err != nil {
		return err
	}
	if err := setOwner(p, n.Inode); err != nil {
		return err
	}
	return setTime(p, n.Inode)
}

// setOwner sets owner, mode and extended attributes, in an order in which no step undoes another.
func setOwner(p string, i *tree.Inode) error {
	if err := os.Lchown(p, int(i.UID), int(i.GID)); err != nil {
		return err
	}
	if !i.IsSymlink() {
		if err := unix.Chmod(p, i.Mode&^tree.ModeType); err != nil {
			return err
		}
	}
	for name, value := range i.Xattrs {
		if err := unix.Lsetxattr(p, name, []byte(value), 0); err != nil {
			return fmt.Errorf("setting %s: %w", name, err)
		}
	}
	return nil
}

func setTime(p string, i *tree.Inode) error {
	t := unix.NsecToTimespec(i.MTime.UnixNano())
	return unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW)
}

func (w *treeWriter) content(p string, c tree.Content) error {
	f, err := os.OpenFile(p, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if c.Blob == "" {
		_, err = f.Write(c.Inline)
	} else {
		var b tree.BlobFile
		if b, err = w.blobs.OpenBlob(c.Blob); err != nil {
			return err
		}
		defer b.Close()
		_, err = io.Copy(f, io.NewSectionReader(b, c.Off, c.Size))
	}
	if err != nil {
		return err
	}
	return f.Close()
}
