package store

import (
	"bytes"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"syscall"

	"github.com/edgebake/edgebake/ondisk/tree"
)

// NodeFiles returns Files for a store in a list of nodes.
func NodeFiles(nodes []tree.Node, blobs tree.Blobs) Files {
	byPath := map[string]tree.Node{}
	children := map[string][]string{}
	for _, n := range nodes {
		byPath[n.Path] = n
		children[path.Dir(n.Path)] = append(children[path.Dir(n.Path)], path.Base(n.Path))
	}
	stat := func(name string) (tree.Node, error) {
		n, ok := byPath[name]
		if !ok {
			return n, &fs.PathError{Op: "stat", Path: name, Err: fs.ErrNotExist}
		}
		return n, nil
	}
	return Files{
		Stat:    stat,
		ReadDir: func(name string) ([]string, error) { return children[name], nil },
		Open: func(name string) (io.ReadCloser, error) {
			n, err := stat(name)
			if err != nil {
				return nil, err
			}
			if n.Data.Blob == "" {
				return io.NopCloser(bytes.NewReader(n.Data.Inline)), nil
			}
			f, err := blobs.OpenBlob(n.Data.Blob)
			if err != nil {
				return nil, err
			}
			return struct {
				io.Reader
				io.Closer
			}{io.NewSectionReader(f, n.Data.Off, n.Data.Size), f}, nil
		},
	}
}

// DirFiles returns Files for a store in a directory.
func DirFiles(dir string) Files {
	return Files{
		Stat: func(name string) (tree.Node, error) {
			st, err := os.Lstat(filepath.Join(dir, name))
			if err != nil {
				return tree.Node{}, err
			}
			sys := st.Sys().(*syscall.Stat_t)
			return tree.Node{Path: name, Inode: &tree.Inode{Mode: uint32(sys.Mode), UID: sys.Uid, GID: sys.Gid, MTime: st.ModTime()}}, nil
		},
		ReadDir: func(name string) ([]string, error) {
			entries, err := os.ReadDir(filepath.Join(dir, name))
			var names []string
			for _, e := range entries {
				names = append(names, e.Name())
			}
			return names, err
		},
		Open: func(name string) (io.ReadCloser, error) {
			f, err := os.Open(filepath.Join(dir, name))
			if err != nil {
				return nil, err
			}
			return f, nil
		},
	}
}
