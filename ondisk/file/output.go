package file

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/edgebake/edgebake/configs/bytesize"
	"golang.org/x/sys/unix"
)

// Output is a file without a name until Commit, so nothing remains if the process is killed. On
// systems without nameless files, it has a hidden temporary name until then.
type Output struct {
	*os.File
	path  string
	force bool
	temp  string // temporary name; empty if the file has no name yet
	sync  func() error
	// begun is the offset up to which WriteBehind has started to write data to the disk.
	begun int64
}

// Create creates an output. If the file exists and force is not set, Create or Commit fails.
func Create(path string, perm fs.FileMode, force bool) (*Output, error) {
	return create(path, perm, force, openNameless)
}

// free returns an error if no file may be created at path.
func free(path string, force bool) error {
	st, err := os.Stat(path)
	switch {
	case err != nil:
		return nil
	case st.IsDir():
		return fmt.Errorf("creating %s: it is a directory", path)
	case !st.Mode().IsRegular():
		return fmt.Errorf("creating %s: it is not a regular file; write to a regular file, then copy or flash that file", path)
	case !force:
		return fmt.Errorf("creating %s: %w: choose another name, or --force to replace it", path, fs.ErrExist)
	}
	return nil
}

// Continue opens an output that an earlier run has closed with Keep, or creates one. After a power
// cut, its contents are undefined.
func Continue(path string, perm fs.FileMode, force bool) (*Output, error) {
	if err := free(path, force); err != nil {
		return nil, err
	}
	dir, base := filepath.Split(path)
	name := filepath.Join(dir, "."+base+".partial")
	for {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, perm)
		if errors.Is(err, fs.ErrExist) {
			f, err = openOwn(name)
			if errors.Is(err, fs.ErrNotExist) {
				continue // another run has completed the file
			}
		}
		if err != nil {
			return nil, fmt.Errorf("creating %s: %w", name, explainOpen(err, filepath.Dir(path)))
		}
		err = Lock(f, true)
		if errors.Is(err, ErrLocked) {
			err = fmt.Errorf("another program is writing it (%s): wait until that program has finished", name)
		}
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("creating %s: %w", path, err)
		}
		// Another run may have completed the file in the meantime.
		st, err := f.Stat()
		now, errNow := os.Lstat(name)
		if err == nil && errNow == nil && os.SameFile(st, now) {
			return &Output{File: f, path: path, force: force, temp: name, sync: f.Sync}, nil
		}
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("creating %s: %w", path, err)
		}
	}
}

// openOwn opens a file that an earlier run left. It rejects another user's file, because that user
// could change the file after it is verified.
func openOwn(name string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil {
		sys, ok := st.Sys().(*syscall.Stat_t)
		// File systems without owners show root as the owner. Root can change any file anyway.
		foreign := ok && int(sys.Uid) != os.Geteuid() && sys.Uid != 0
		if foreign || !st.Mode().IsRegular() {
			err = errors.New("the file belongs to another user or is not a regular file: remove it, or write elsewhere")
		}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Keep closes an output under its temporary name. A later Continue opens it again.
func (o *Output) Keep() error { return o.File.Close() }

// Temp returns the temporary name of an output from Continue, until Commit.
func (o *Output) Temp() string { return o.temp }

func create(path string, perm fs.FileMode, force bool, nameless func(dir string, perm fs.FileMode) (*os.File, error)) (*Output, error) {
	if err := free(path, force); err != nil {
		return nil, err
	}
	o := &Output{path: path, force: force}
	dir := filepath.Dir(path)
	f, err := nameless(dir, perm)
	if err != nil {
		err = o.tempName(func(name string) (err error) {
			f, err = os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, perm)
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("creating %s: %w", path, explainOpen(err, dir))
	}
	o.File, o.sync = f, f.Sync
	return o, nil
}

// tempName calls try with temporary names as long as it returns fs.ErrExist.
func (o *Output) tempName(try func(name string) error) error {
	for i := 0; ; i++ {
		name := filepath.Join(filepath.Dir(o.path), fmt.Sprintf(".%s.%d-%d.tmp", filepath.Base(o.path), os.Getpid(), i))
		err := try(name)
		if err == nil {
			o.temp = name
		}
		if i == 100 || !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
}

// Commit syncs the file and gives it its name. After a power cut, the name refers to the whole new
// file or to the old one.
func (o *Output) Commit() error {
	err := o.sync()
	if err == nil {
		err = o.commit()
	}
	if err == nil {
		err = SyncDir(filepath.Dir(o.path))
	}
	if err != nil {
		o.Discard()
		if errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("creating %s: %w: it was created in the meantime; choose another name", o.path, fs.ErrExist)
		}
		return fmt.Errorf("creating %s: %w", o.path, Explain(err, filepath.Dir(o.path)))
	}
	return o.File.Close()
}

// WriteBehind starts to write the file to disk up to offset to, so that Commit takes less time.
func (o *Output) WriteBehind(to int64) {
	const step = 16 << 20
	if to-o.begun >= step {
		writeBehind(o.File, o.begun, to-o.begun)
		o.begun = to
	}
}

func (o *Output) commit() error {
	// The file already has its final permissions: perm without the bits of the umask.
	name := func(to string) error {
		if o.temp == "" {
			return nameIt(o.File, to)
		}
		return os.Link(o.temp, to)
	}
	if !o.force {
		err := name(o.path)
		if o.temp == "" || err != nil && !errors.Is(err, errors.ErrUnsupported) && !errors.Is(err, syscall.EPERM) {
			return err
		}
		if err == nil {
			return os.Remove(o.temp)
		}
		// The file system has no hard links.
		if _, err := os.Lstat(o.path); err == nil {
			return fs.ErrExist
		}
		return os.Rename(o.temp, o.path)
	}
	if o.temp == "" {
		if err := o.tempName(name); err != nil {
			return err
		}
	}
	return os.Rename(o.temp, o.path)
}

// Discard removes the file. It does nothing after Commit.
func (o *Output) Discard() {
	if o.File.Close() == nil && o.temp != "" {
		os.Remove(o.temp)
	}
}

// Explain adds the fix to an error that occurred while writing in dir. It removes the path, which
// may be a temporary name; the caller names the file.
func Explain(err error, dir string) error {
	switch e := err.(type) {
	case *fs.PathError:
		err = e.Err
	case *os.LinkError:
		err = e.Err
	}
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w: directory %s is full; make room or write elsewhere", err, dir)
	case errors.Is(err, syscall.EFBIG):
		return fmt.Errorf("%w: the file system of directory %s cannot hold files of this size, or a limit (ulimit -f) forbids it; write elsewhere", err, dir)
	}
	return err
}

// explainOpen is like Explain, for an error that occurred while creating a file in dir.
func explainOpen(err error, dir string) error {
	if e := (*fs.PathError)(nil); errors.As(err, &e) {
		err = e.Err
	}
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w: directory %s cannot be written by this user; write elsewhere", err, dir)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: make directory %s first", err, dir)
	}
	return Explain(err, dir)
}

// MakeDirectory is like MakeDir with mode 0777, minus the umask. Its error includes the fix.
func MakeDirectory(dir string) (undo func(), err error) {
	undo, err = MakeDir(dir, 0o777)
	switch {
	case err == nil:
		return undo, nil
	case errors.Is(err, syscall.ENOTDIR):
		return nil, fmt.Errorf("making directory %s: a file with that name exists: choose another directory", dir)
	}
	return nil, fmt.Errorf("making directory %s: %w", dir, explainOpen(err, filepath.Dir(filepath.Clean(dir))))
}

// Writable returns an error if no file can be created in dir, so that callers can fail before long
// work.
func Writable(dir string) error {
	f, err := os.CreateTemp(dir, ".edgebake-*")
	if err != nil {
		return explainOpen(err, dir)
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// CheckSpace returns an error if n bytes do not fit in dir, so that callers can fail before long
// work. what describes the bytes in the message, as in "the image".
func CheckSpace(dir string, n int64, what string) error {
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) != nil {
		return nil // writing will report the error
	}
	if free := int64(st.Bavail) * int64(st.Bsize); free < n {
		return fmt.Errorf("%w: directory %s has %s free, too little for %s of at least %s; make room or write elsewhere",
			syscall.ENOSPC, dir, bytesize.MiB(free), what, bytesize.MiB(n))
	}
	return nil
}

// ExistsError is an fs.ErrExist whose message includes the fix.
type ExistsError struct{ Path string }

func (e *ExistsError) Error() string        { return e.Path + " exists; --force replaces it" }
func (e *ExistsError) Is(target error) bool { return target == fs.ErrExist }

// Check returns an error if path cannot be written: it exists and replace is not set, or its
// directory is not writable. So callers can fail before long work.
func Check(path string, replace bool) error {
	if fi, err := os.Lstat(path); err == nil {
		switch {
		case fi.IsDir():
			return fmt.Errorf("%s is a directory; name a file", path)
		case !replace:
			return &ExistsError{path}
		}
	}
	if err := Writable(filepath.Dir(path)); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// Write atomically writes a small file, or replaces it. Its mode is perm minus the umask.
func Write(path string, data []byte, perm fs.FileMode) error {
	out, err := Create(path, perm, true)
	if err != nil {
		return err
	}
	defer out.Discard()
	if _, err := out.Write(data); err != nil {
		return fmt.Errorf("writing %s: %w", path, Explain(err, filepath.Dir(path)))
	}
	return out.Commit()
}
