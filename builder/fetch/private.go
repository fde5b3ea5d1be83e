package fetch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// subdirs are the directories of a cache.
var subdirs = []string{"blobs", "sound", "used", "keys", "locks", "kept", "programs", "tmp"}

// private makes the cache's directories, for this user alone, and rejects those that
// anybody else could have written to. Notes, keys and programs in a cache are
// believed: whoever writes there decides what is run, and what goes into images.
func private(dir string) error {
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
	if err := ours(dir, us); err != nil {
		return err
	}
	var errs []error
	for _, d := range subdirs {
		d = filepath.Join(dir, d)
		if err := os.MkdirAll(d, 0o700); err != nil {
			return err
		}
		errs = append(errs, ours(d, us))
	}
	return errors.Join(errs...)
}

// ownerHere is whom the files of this process belong to in dir: a server may map users.
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

// tighten takes the right to write from others where dir was made for a new cache,
// as volumes of containers are.
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
			return nil // not a new one
		}
	}
	// Where the directory is another user's, ours says so.
	_ = os.Chmod(dir, fi.Mode().Perm()&^0o022)
	return nil
}

// ours reports whether nobody but this user and root can have written to dir. An
// ordinary user trusts root; root trusts nobody else.
func ours(dir string, us uint32) error {
	for _, stat := range []func(string) (fs.FileInfo, error){os.Lstat, os.Stat} {
		fi, err := stat(dir)
		if err != nil {
			return err
		}
		if o := ownerOf(fi); o != us && o != uint32(os.Geteuid()) && o != 0 {
			return fmt.Errorf("%s belongs to user %d, who could exchange programs and inputs in it: name a cache of your own", dir, o)
		}
		if fi.Mode()&fs.ModeSymlink == 0 && fi.Mode()&0o022 != 0 {
			return fmt.Errorf("other users may write to %s, and so could exchange programs and inputs in it: name a new directory; if nobody else has had access to this one, chmod -R go-w %[1]s", dir)
		}
	}
	return nil
}
