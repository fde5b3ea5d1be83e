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

// WriteFile replaces a file at once, and makes missing directories.
func (r Root) WriteFile(p string, data []byte, o Owner) error {
	return r.Stream(p, o, func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	})
}

// Stream is WriteFile for what write gives bit by bit.
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

// Rename moves what is at from, a directory too, to where nothing is.
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

// Symlink makes path a link to target, at once.
func (r Root) Symlink(target, p string) error {
	return r.replace(p, func(at *place, tmp string) error {
		return unix.Symlinkat(target, at.fd(), tmp)
	})
}

// ChownLink gives a link its owner, and nothing but a link: others may have put
// something else there since it was made.
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

// Link makes path another name of target, at once.
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

// replace has create put something under a name that is new, and renames it.
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
	// Also where all went well: renaming one hard link over another of the
	// same file does nothing.
	if err = errors.Join(err, at.unlink(tmp)); err != nil {
		return &fs.PathError{Op: "replace", Path: p, Err: err}
	}
	return syncDir(at.dir)
}

// marker is in the names of what we write, before it gets its own.
const marker = ".edgebake-"

// temporary names what is being written. Where only root may write, the name
// is fixed, so that what a power cut leaves is removed by the next try.
func (p *place) temporary() string {
	if !p.theirs {
		return p.prefix() + "new"
	}
	return p.prefix() + random()
}

func (p *place) prefix() string {
	const most = 200 // of the 255 bytes that a name may have
	return "." + p.name[:min(len(p.name), most)] + marker
}

func random() string {
	b := make([]byte, 16)
	rand.Read(b) // never fails (Go 1.24)
	return hex.EncodeToString(b)
}

// sweep removes what a power cut left of an earlier try. In a directory of
// others its name is not known: whatever is named alike goes, up to a number
// that no power cuts make.
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

// unlink removes a file or an empty directory; nothing there is as good.
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

// takeOver renames tmp to its own name. A directory that somebody else put
// there is moved aside.
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

// aside gives what stands in the way another name, which its owner finds.
func (p *place) aside() error {
	const most = 200
	err := unix.Renameat(p.fd(), p.name, p.fd(), p.name[:min(len(p.name), most)]+".moved-"+random()[:8])
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// Mkdir makes a directory, or gives it its owner and permissions.
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

// foreign reports whether a directory is one that must not be given to its
// new owner: in his own directory he may have put somebody else's under this
// name.
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

// newDir makes a directory that is whose it is to be from the start: a power
// cut leaves none that is half made.
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
		// Over what somebody made meanwhile, this succeeds if it is empty.
		err = unix.Renameat(p.fd(), tmp, p.fd(), p.name)
	}
	if err != nil {
		return errors.Join(err, p.unlink(tmp))
	}
	return syncDir(p.dir)
}

// own gives an open file its owner and permissions. Chown is for root;
// anybody else owns what he writes. Permissions come after it, since it clears
// setuid.
func own(f *os.File, o Owner) error {
	if os.Geteuid() == 0 {
		if err := f.Chown(o.UID, o.GID); err != nil {
			return err
		}
	}
	return f.Chmod(o.Mode)
}

// Remove removes a file, a link or an empty directory; a directory that is
// not empty stays, and nothing there is as good. Where a link of somebody
// else's leads away from the path, there is nothing of ours.
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

// RemoveAll removes a path and all below it. Links are removed, never
// followed.
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
	if errors.Is(err, unix.EINVAL) { // a file system that cannot, such as /run
		return nil
	}
	return err
}
