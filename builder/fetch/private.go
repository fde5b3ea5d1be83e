package fetch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// subdirs lists the directories in a cache.
var subdirs = []string{"blobs", "sound", "used", "keys", "locks", "programs", "tmp"}

// makePrivateDirs creates the cache's directories for this user alone. It rejects directories that
// another user could write to, because the contents of a cache are trusted: they become programs
// and images.
func makePrivateDirs(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := tighten(dir); err != nil {
		return err
	}
	us, err := ownerHere(dir)
	if err != nil {
		return err
	}
	if err := checkPrivate(dir, us); err != nil {
		return err
	}
	// The cache itself may be a link, and is checked more strictly than its parents.
	if err := checkParents(filepath.Join(dir, "blobs"), us); err != nil {
		return err
	}
	var errs []error
	for _, d := range subdirs {
		d = filepath.Join(dir, d)
		if err := os.MkdirAll(d, 0o700); err != nil {
			return err
		}
		errs = append(errs, checkPrivate(d, us))
	}
	return errors.Join(errs...)
}

// ownerHere returns the owner of files that this process creates in dir. A file server may map this
// user to another one.
func ownerHere(dir string) (uint32, error) {
	f, err := os.CreateTemp(dir, ".owner-")
	if err != nil {
		return 0, err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return ownerOf(fi), nil
}

// tighten removes write permission for group and others from an empty directory, such as a
// container's volume. Such a directory was made for a new cache.
func tighten(dir string) error {
	fi, err := os.Stat(dir)
	if err != nil || fi.Mode()&0o022 == 0 || fi.Mode()&fs.ModeSticky != 0 {
		return err
	}
	list, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range list {
		if e.Name() != "lost+found" {
			return nil // not empty, so not a new cache
		}
	}
	// Ignore the error: if another user owns the directory, checkPrivate rejects it.
	_ = os.Chmod(dir, fi.Mode().Perm()&^0o022)
	return nil
}

// checkParents rejects a cache that other users could replace. It checks the parents of dir and,
// where one is a link, the parents of its target. It accepts sticky directories, such as /tmp, and
// directories that only this user's group or root's group can write to.
func checkParents(dir string, us uint32) error {
	for p := filepath.Dir(dir); ; p = filepath.Dir(p) {
		fi, err := os.Lstat(p)
		if err != nil {
			return err
		}
		if err := checkOwner(p, fi, us); err != nil && ownerOf(fi) != hostRoot() {
			return err
		}
		shared := fi.Mode()&0o002 != 0 || fi.Mode()&0o020 != 0 && groupOf(fi) != 0 && groupOf(fi) != uint32(os.Getegid())
		switch {
		case fi.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			if !filepath.IsAbs(to) {
				from, err := filepath.EvalSymlinks(filepath.Dir(p))
				if err != nil {
					return err
				}
				to = filepath.Join(from, to)
			}
			if err := checkParents(filepath.Join(to, "cache"), us); err != nil {
				return err
			}
		case shared && fi.Mode()&fs.ModeSticky == 0:
			return fmt.Errorf("other users may write to %s, and so could replace the cache below it: use a cache elsewhere, or chmod go-w %[1]s", p)
		}
		if p == filepath.Dir(p) {
			return nil
		}
	}
}

// hostRoot returns the owner of root's files as this process sees it. In a user namespace without
// root, as in a rootless container, that is the overflow user.
func hostRoot() uint32 {
	fi, err := os.Stat("/proc/sys")
	if err != nil {
		return 0
	}
	return ownerOf(fi)
}

// checkOwner returns an error unless a file belongs to this user or to root.
func checkOwner(path string, fi fs.FileInfo, us uint32) error {
	if o := ownerOf(fi); o != us && o != uint32(os.Geteuid()) && o != 0 {
		return fmt.Errorf("%s belongs to user %d, who could replace programs and inputs in it: use your own cache", path, o)
	}
	return nil
}

// checkPrivate returns an error unless only this user and root can write to dir.
func checkPrivate(dir string, us uint32) error {
	for _, stat := range []func(string) (fs.FileInfo, error){os.Lstat, os.Stat} {
		fi, err := stat(dir)
		if err != nil {
			return err
		}
		if err := checkOwner(dir, fi, us); err != nil {
			return err
		}
		if fi.Mode()&fs.ModeSymlink == 0 && fi.Mode()&0o022 != 0 {
			return fmt.Errorf("other users may write to %s, and so could replace programs and inputs in it: use a new directory or, if no other user has had access to this one, chmod -R go-w %[1]s", dir)
		}
	}
	return nil
}
