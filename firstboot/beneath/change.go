package beneath

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// WriteFile replaces a file atomically, and makes missing directories.
func (r Root) WriteFile(p string, data []byte, o Owner) error {
	return r.Stream(p, o, func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	})
}

// Stream is like WriteFile, with contents produced by write.
func (r Root) Stream(p string, o Owner, write func(io.Writer) error) error {
	return r.replace(p, func(at *place, tmp string) error {
		fd, err := unix.Openat(at.fd(), tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), tmp)
		err = write(f)
		if err == nil {
			err = own(f, o)
		}
		if err == nil {
			err = f.Sync()
		}
		return errors.Join(err, f.Close())
	})
}

// Rename moves a file or a directory. It fails if to exists.
func (r Root) Rename(from, to string) error {
	old, err := r.at(from, false)
	if err != nil {
		return err
	}
	defer old.close()
	at, err := r.at(to, true)
	if err != nil {
		return err
	}
	defer at.close()
	if err := unix.Renameat2(old.fd(), old.name, at.fd(), at.name, unix.RENAME_NOREPLACE); err != nil {
		return &fs.PathError{Op: "rename", Path: from, Err: err}
	}
	return errors.Join(syncDir(at.dir), syncDir(old.dir))
}

// Symlink makes p a link to target, atomically.
func (r Root) Symlink(target, p string) error {
	return r.replace(p, func(at *place, tmp string) error {
		return unix.Symlinkat(target, at.fd(), tmp)
	})
}

// ChownLink changes the owner of a symbolic link. It fails if another user has replaced the link
// with a file.
func (r Root) ChownLink(p string, uid, gid int) error {
	at, err := r.at(p, false)
	if err != nil {
		return err
	}
	defer at.close()
	f, err := at.open(unix.O_PATH)
	if err != nil {
		return &fs.PathError{Op: "chown", Path: p, Err: err}
	}
	defer f.Close()
	st, err := f.Stat()
	if err == nil && st.Mode()&fs.ModeSymlink == 0 {
		err = unix.EINVAL
	}
	if err == nil {
		err = unix.Fchownat(int(f.Fd()), "", uid, gid, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
	}
	if err != nil {
		return &fs.PathError{Op: "chown", Path: p, Err: err}
	}
	return nil
}

// Link makes p another name of target, atomically.
func (r Root) Link(target, p string) error {
	from, err := r.at(target, false)
	if err != nil {
		return err
	}
	defer from.close()
	return r.replace(p, func(at *place, tmp string) error {
		return unix.Linkat(from.fd(), from.name, at.fd(), tmp, 0)
	})
}

// replace calls create with a temporary name, and renames the result to p.
func (r Root) replace(p string, create func(at *place, tmp string) error) error {
	at, err := r.at(p, true)
	if err != nil {
		return err
	}
	defer at.close()
	tmp := at.temporary()
	if err := at.sweep(tmp); err != nil {
		return &fs.PathError{Op: "unlink", Path: path.Join(path.Dir(p), tmp), Err: err}
	}
	err = create(at, tmp)
	if err == nil {
		err = at.takeOver(tmp)
	}
	// Unlink after success too: if both names are links of the same file, rename does nothing.
	if err = errors.Join(err, at.unlink(tmp)); err != nil {
		return &fs.PathError{Op: "replace", Path: p, Err: err}
	}
	return syncDir(at.dir)
}

// marker is part of all temporary names.
const marker = ".edgebake-"

// temporary returns a temporary name. Where only root may write, it is always the same, so that the
// next attempt removes the leftovers of a power cut.
func (p *place) temporary() string {
	if !p.theirs {
		return p.prefix() + "new"
	}
	return p.prefix() + random()
}

func (p *place) prefix() string {
	const most = 200 // a name may have 255 bytes
	return "." + p.name[:min(len(p.name), most)] + marker
}

func random() string {
	b := make([]byte, 16)
	rand.Read(b) // never fails (Go 1.24)
	return hex.EncodeToString(b)
}

// sweep removes temporary files left by a power cut. Where others may write, temporary names are
// random, so sweep removes every file with such a name among the first 10000.
func (p *place) sweep(tmp string) error {
	names := []string{tmp}
	if p.theirs {
		const most = 10000
		all, err := p.dir.Readdirnames(most)
		if _, seek := p.dir.Seek(0, 0); seek != nil {
			return seek
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		names = nil
		for _, name := range all {
			rest, ok := strings.CutPrefix(name, p.prefix())
			if _, err := hex.DecodeString(rest); ok && err == nil && len(rest) == 32 {
				names = append(names, name)
			}
		}
	}
	for _, name := range names {
		if err := p.unlink(name); err != nil && !p.theirs {
			return err
		}
	}
	return nil
}

// unlink removes a file or an empty directory. A missing one is no error.
func (p *place) unlink(name string) error {
	err := unix.Unlinkat(p.fd(), name, 0)
	if errors.Is(err, unix.EISDIR) {
		err = unix.Unlinkat(p.fd(), name, unix.AT_REMOVEDIR)
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// takeOver renames tmp to the name of the place. It moves aside a directory that another user has
// put there.
func (p *place) takeOver(tmp string) error {
	const tries = 3
	for n := 1; ; n++ {
		err := unix.Renameat(p.fd(), tmp, p.fd(), p.name)
		if !p.theirs || n == tries || !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENOTEMPTY) {
			return err
		}
		if err := p.aside(); err != nil {
			return err
		}
	}
}

// aside renames a file that is in the way, so that its owner can still find it.
func (p *place) aside() error {
	const most = 200
	err := unix.Renameat(p.fd(), p.name, p.fd(), p.name[:min(len(p.name), most)]+".moved-"+random()[:8])
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// Mkdir makes a directory, or sets owner and permissions of an existing one.
func (r Root) Mkdir(p string, o Owner) error {
	at, err := r.at(p, true)
	if err != nil {
		return err
	}
	defer at.close()
	if err := at.mkdir(o); err != nil {
		return &fs.PathError{Op: "mkdir", Path: p, Err: err}
	}
	return syncDir(at.dir)
}

func (p *place) mkdir(o Owner) error {
	d, err := p.open(unix.O_RDONLY | unix.O_DIRECTORY)
	switch {
	case err == nil:
		defer d.Close()
		if foreign, err := p.foreign(d, o); err != nil || !foreign {
			if err != nil {
				return err
			}
			return own(d, o)
		}
	case errors.Is(err, unix.ENOENT):
		return p.newDir(o)
	case !errors.Is(err, unix.ENOTDIR) || !p.theirs:
		return err
	}
	if err := p.aside(); err != nil {
		return err
	}
	return p.newDir(o)
}

// foreign reports whether a directory must not get the owner in o: where others may write, it may
// be another user's directory that was moved there.
func (p *place) foreign(d *os.File, o Owner) (bool, error) {
	if !p.theirs {
		return false, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(d.Fd()), &st); err != nil {
		return false, err
	}
	return os.Geteuid() == 0 && int(st.Uid) != o.UID, nil
}

// newDir makes a directory. The directory gets its name after its owner and permissions, so a power
// cut never leaves it without them.
func (p *place) newDir(o Owner) error {
	tmp := p.temporary()
	if err := p.sweep(tmp); err != nil {
		return err
	}
	if err := unix.Mkdirat(p.fd(), tmp, 0o700); err != nil {
		return err
	}
	d, err := p.child(tmp).open(unix.O_RDONLY | unix.O_DIRECTORY)
	if err == nil {
		err = errors.Join(own(d, o), d.Close())
	}
	if err == nil {
		// If another user has made a directory of this name meanwhile, renaming succeeds only if
		// that directory is empty.
		err = unix.Renameat(p.fd(), tmp, p.fd(), p.name)
	}
	if err != nil {
		return errors.Join(err, p.unlink(tmp))
	}
	return syncDir(p.dir)
}

// own sets the owner and permissions of an open file; only root can change the owner. Chmod comes
// last, because chown clears setuid.
func own(f *os.File, o Owner) error {
	if os.Geteuid() == 0 {
		if err := f.Chown(o.UID, o.GID); err != nil {
			return err
		}
	}
	return f.Chmod(o.Mode)
}

// Remove removes a file, a link or an empty directory. It is no error if the directory is not
// empty, or if p does not exist or leads through another user's link.
func (r Root) Remove(p string) error {
	at, err := r.at(p, false)
	if gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer at.close()
	err = at.unlink(at.name)
	switch {
	case errors.Is(err, unix.ENOTEMPTY):
		return nil
	case err != nil:
		return &fs.PathError{Op: "remove", Path: p, Err: err}
	}
	return syncDir(at.dir)
}

func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, ErrLink)
}

// RemoveAll removes p and everything below it. Links at p or below it are removed, not followed.
func (r Root) RemoveAll(p string) error {
	at, err := r.at(p, false)
	if gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer at.close()
	root, err := os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", at.fd()))
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.RemoveAll(at.name); err != nil {
		return err
	}
	return syncDir(at.dir)
}

func syncDir(d *os.File) error {
	err := d.Sync()
	if errors.Is(err, unix.EINVAL) { // not supported by the file system
		return nil
	}
	return err
}
