package ext4

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// Stat returns the node at a path relative to the root. It follows symbolic links in the
// directories of the path, but not in its last element. Links never lead out of the image.
func (r *Reader) Stat(name string) (tree.Node, error) {
	in, p, err := r.lookup(name, false)
	if err != nil {
		return tree.Node{}, &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	node, err := r.treeInode(in)
	if err != nil {
		return tree.Node{}, &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	return tree.Node{Path: p, Inode: node}, nil
}

// ReadDir returns the sorted names in a directory. It follows symbolic links.
func (r *Reader) ReadDir(name string) ([]string, error) {
	in, _, err := r.lookup(name, true)
	if err != nil {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: err}
	}
	entries, err := r.readDir(in)
	if err != nil {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: err}
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.name
	}
	return names, nil
}

// OpenFile opens a regular file. It follows symbolic links.
func (r *Reader) OpenFile(name string) (*File, error) {
	in, _, err := r.lookup(name, true)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	if in.mode()&tree.ModeType != tree.ModeRegular {
		return nil, &fs.PathError{Op: "open", Path: name, Err: errors.New("not a regular file")}
	}
	f, err := r.file(in)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return f, nil
}

// ReadFile returns the content of a file of up to 64 MiB. It follows symbolic links.
func (r *Reader) ReadFile(name string) ([]byte, error) {
	f, err := r.OpenFile(name)
	if err != nil {
		return nil, err
	}
	if f.size > maxReadFile {
		return nil, &fs.PathError{Op: "read", Path: name, Err: fmt.Errorf("%d bytes are too many to be read at once", f.size)}
	}
	b := make([]byte, f.size)
	if _, err := f.ReadAt(b, 0); err != nil && err != io.EOF {
		return nil, &fs.PathError{Op: "read", Path: name, Err: err}
	}
	return b, nil
}

// lookup returns the inode at a path, and the path with symbolic links resolved. Links and ".."
// never lead out of the image.
func (r *Reader) lookup(name string, follow bool) (*rawInode, string, error) {
	in, err := r.inode(rootInode)
	if err != nil {
		return nil, "", err
	}
	// dirs has the inodes from the root to the current one, to resolve "..".
	dirs, names := []*rawInode{in}, []string{"."}
	left := strings.Split(name, "/")
	links := 0
	for len(left) > 0 {
		part := left[0]
		left = left[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			if len(dirs) > 1 {
				dirs, names = dirs[:len(dirs)-1], names[:len(names)-1]
			}
			continue
		}
		entries, err := r.readDir(dirs[len(dirs)-1])
		if err != nil {
			return nil, "", err
		}
		i, ok := slices.BinarySearchFunc(entries, part, func(e entry, name string) int { return strings.Compare(e.name, name) })
		if !ok {
			return nil, "", fs.ErrNotExist
		}
		if in, err = r.inode(entries[i].number); err != nil {
			return nil, "", err
		}
		if in.mode()&tree.ModeType == tree.ModeSymlink && (follow || len(left) > 0) {
			if links++; links > maxFollow {
				return nil, "", errors.New("too many symbolic links")
			}
			target, err := r.target(in)
			if err != nil {
				return nil, "", err
			}
			if strings.HasPrefix(target, "/") {
				dirs, names = dirs[:1], names[:1]
			}
			left = append(strings.Split(target, "/"), left...)
			continue
		}
		dirs, names = append(dirs, in), append(names, part)
	}
	return dirs[len(dirs)-1], path.Join(names...), nil
}
