// Package beneath reads and changes files as root below directories that other users may write to,
// such as their homes, /tmp and any path that a config names.
//
// Users control the names in their directories. Between two system calls, a user may replace .ssh
// with a link to /etc/kubernetes/manifests, authorized_keys with a FIFO, or a file with a hard link
// to another user's file. Therefore:
//
//   - a path is walked one directory at a time. Each directory is opened without following
//     links, and kept open. Owner, permissions and contents are read and changed through
//     the open file, never through its name again;
//   - a link is followed only if nobody but root can have made it, for example /var/run. Below
//     a directory that another user may write to, no link is followed;
//   - an existing file is never opened for writing. The contents are written to a new file,
//     which is then renamed. If others may write to the directory, the new file has a random
//     name at first;
//   - a file that a user put in the way is moved aside. It is neither followed nor an error,
//     because no user may prevent a machine from applying its settings.
//
// After a power cut, every change is either complete or did not happen.
package beneath

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrLink means that a path leads through a link that a user other than root may have made.
var ErrLink = errors.New("it is a symbolic link in a directory that other users may write to, so it is not followed")

// Root is the directory at which all paths start, "/" on a node. The targets of absolute links
// start there too.
type Root struct{ Dir string }

// Owner holds the permissions and the owner of a file.
type Owner struct {
	Mode     fs.FileMode
	UID, GID int
}

// place is a name in an open directory.
type place struct {
	dir  *os.File
	name string
	// theirs is set if users other than root may change the names in dir or in one of its parents.
	theirs bool
}

func (p *place) fd() int      { return int(p.dir.Fd()) }
func (p *place) close() error { return p.dir.Close() }

// child returns the place of another name in the same directory.
func (p *place) child(name string) *place { return &place{dir: p.dir, name: name, theirs: p.theirs} }

// maxLinks is the maximum number of links in one path, as in the kernel.
const maxLinks = 40

// walker resolves a path.
type walker struct {
	stack []*place // open directories, beginning with Root; their names are unused
	todo  []string
	links int
	// make creates missing directories. Where other users may write, it also moves aside files that
	// are in the way.
	make bool
}

func (w *walker) top() *place { return w.stack[len(w.stack)-1] }

func (w *walker) pop() {
	w.top().close()
	w.stack = w.stack[:len(w.stack)-1]
}

func (w *walker) close() {
	for len(w.stack) > 0 {
		w.pop()
	}
}

// at opens the directory that contains p. mk creates missing directories.
func (r Root) at(p string, mk bool) (*place, error) {
	return r.walk(p, mk, false)
}

// follow is like at, but also follows a link at the end of p, if only root can have made it.
func (r Root) follow(p string) (*place, error) {
	return r.walk(p, false, true)
}

func (r Root) walk(p string, mk, last bool) (*place, error) {
	root, err := os.Open(r.Dir)
	if err != nil {
		return nil, err
	}
	w := &walker{stack: []*place{{dir: root}}, todo: elements(path.Clean("/" + p)), make: mk}
	if len(w.todo) == 0 {
		return &place{dir: root, name: "."}, nil
	}
	defer w.close()
	if err := w.judge(w.top()); err != nil {
		return nil, err
	}
	for len(w.todo) > 0 {
		step := w.todo[0]
		w.todo = w.todo[1:]
		if len(w.todo) == 0 && step != ".." {
			if last {
				again, err := w.lastLink(step)
				if err != nil {
					return nil, &fs.PathError{Op: "open", Path: p, Err: err}
				}
				if again {
					continue
				}
			}
			end := w.top()
			w.stack = w.stack[:len(w.stack)-1] // the caller closes it
			end.name = step
			return end, nil
		}
		if err := w.step(step); err != nil {
			return nil, &fs.PathError{Op: "open", Path: p, Err: err}
		}
	}
	return nil, &fs.PathError{Op: "open", Path: p, Err: unix.EISDIR} // p is a link to "/", or to a path that ends with ".."
}

func elements(p string) []string {
	var out []string
	for e := range strings.SplitSeq(p, "/") {
		if e != "" && e != "." {
			out = append(out, e)
		}
	}
	return out
}

// judge sets d.theirs from the owner and mode of d, and from its parent's theirs.
func (w *walker) judge(d *place) error {
	var st unix.Stat_t
	if err := unix.Fstat(d.fd(), &st); err != nil {
		return err
	}
	others := st.Uid != 0 && int(st.Uid) != os.Geteuid() ||
		st.Mode&0o002 != 0 ||
		st.Mode&0o020 != 0 && st.Gid != 0 && int(st.Gid) != os.Getegid()
	d.theirs = others || len(w.stack) > 0 && w.top() != d && w.top().theirs
	return nil
}

// step enters a directory, or follows a link.
func (w *walker) step(name string) error {
	if name == ".." { // from a link: path.Clean has removed every ".." in p
		if len(w.stack) > 1 {
			w.pop()
		}
		return nil
	}
	err := w.enter(name)
	if !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ENOENT) {
		return err
	}
	if errors.Is(err, unix.ENOTDIR) {
		target, err := readlink(w.top().fd(), name)
		if err == nil && !w.top().theirs {
			return w.goOn(target)
		}
		if !w.make || !w.top().theirs {
			if err == nil {
				return ErrLink
			}
			return unix.ENOTDIR
		}
		if err := w.top().child(name).aside(); err != nil {
			return err
		}
	} else if !w.make {
		return err
	}
	if err := w.top().child(name).newDir(Owner{Mode: 0o755}); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return w.enter(name)
}

func (w *walker) enter(name string) error {
	fd, err := unix.Openat(w.top().fd(), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	d := &place{dir: os.NewFile(uintptr(fd), name)}
	if err := w.judge(d); err != nil {
		return errors.Join(err, d.close())
	}
	w.stack = append(w.stack, d)
	return nil
}

// goOn continues at the target of a link.
func (w *walker) goOn(target string) error {
	if w.links++; w.links > maxLinks {
		return unix.ELOOP
	}
	if strings.HasPrefix(target, "/") {
		for len(w.stack) > 1 {
			w.pop()
		}
	}
	w.todo = append(elements(target), w.todo...)
	return nil
}

// lastLink reports whether the last element of a path is a link. If so, the walk continues at its
// target.
func (w *walker) lastLink(name string) (bool, error) {
	target, err := readlink(w.top().fd(), name)
	if err != nil {
		return false, nil // not a link: opening it shows its type
	}
	if w.top().theirs {
		return false, ErrLink
	}
	return true, w.goOn(target)
}

func readlink(dir int, name string) (string, error) {
	b := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(dir, name, b)
	if err != nil {
		return "", err
	}
	return string(b[:n]), nil
}

// Info describes the file at a path.
type Info struct {
	fs.FileInfo
	// Link is the target of a symbolic link.
	Link string
	// Theirs is set if users other than root may replace the file.
	Theirs bool
}

// Lstat describes the file at p. It does not follow a link at the end of p.
func (r Root) Lstat(p string) (Info, error) {
	at, err := r.at(p, false)
	if err != nil {
		return Info{}, err
	}
	defer at.close()
	f, err := at.open(unix.O_PATH)
	if err != nil {
		return Info{Theirs: at.theirs}, &fs.PathError{Op: "lstat", Path: p, Err: err}
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return Info{}, err
	}
	i := Info{FileInfo: st, Theirs: at.theirs}
	if st.Mode()&fs.ModeSymlink != 0 {
		if i.Link, err = readlink(int(f.Fd()), ""); err != nil {
			return Info{}, &fs.PathError{Op: "readlink", Path: p, Err: err}
		}
	}
	return i, nil
}

// IsDir reports whether p is a directory, or a link to a directory that may be followed.
func (r Root) IsDir(p string) bool {
	at, err := r.follow(p)
	if err != nil {
		return errors.Is(err, unix.EISDIR)
	}
	defer at.close()
	f, err := at.open(unix.O_PATH | unix.O_DIRECTORY)
	if err != nil {
		return false
	}
	return f.Close() == nil
}

// MaxFile is the maximum size in bytes of a file for ReadFile.
const MaxFile = 64 << 20

// ReadFile returns the contents of a file and its FileInfo, both from the same open file. A link at
// the end of p is followed if only root can have made it.
func (r Root) ReadFile(p string) ([]byte, fs.FileInfo, error) {
	at, err := r.follow(p)
	if err != nil {
		return nil, nil, err
	}
	defer at.close()
	// Without O_NONBLOCK, opening a FIFO would wait for a writer.
	f, err := at.open(unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY)
	if err != nil {
		return nil, nil, &fs.PathError{Op: "open", Path: p, Err: err}
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, nil, &fs.PathError{Op: "read", Path: p, Err: errors.New("it is not a regular file")}
	}
	if st.Size() > MaxFile {
		return nil, nil, &fs.PathError{Op: "read", Path: p, Err: fmt.Errorf("it has %d bytes, which exceeds the limit of %d", st.Size(), MaxFile)}
	}
	b := make([]byte, 0, st.Size()+1)
	for len(b) <= MaxFile {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := f.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if n == 0 || err != nil {
			if err == nil || errors.Is(err, io.EOF) {
				return b, st, nil
			}
			return nil, nil, err
		}
	}
	return nil, nil, &fs.PathError{Op: "read", Path: p, Err: errors.New("it grew while it was read")}
}

// open opens the file at the place. It does not follow a link.
func (p *place) open(flags int) (*os.File, error) {
	fd, err := unix.Openat(p.fd(), p.name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), p.name), nil
}
