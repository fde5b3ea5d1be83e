package mint

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/configs/sealed"
	"github.com/edgebake/edgebake/ondisk/file"
)

// secretFile reports whether the file of this name must stay secret.
func secretFile(name string) bool {
	return strings.HasSuffix(name, ".key") || strings.HasPrefix(name, "tokens/") || strings.HasPrefix(name, "manifests/") || name == fileAdmin || name == fileDocument
}

// storedName returns the name under which a file is stored in a directory with these recipients.
func storedName(name string, recipients []string) string {
	if len(recipients) > 0 && secretFile(name) {
		return name + sealed.Extension
	}
	return name
}

// writeFile writes a file into dir atomically, and syncs it.
func writeFile(dir, name string, data []byte, recipients []string) error {
	if err := put(dir, name, data, recipients); err != nil {
		return writing(dir, storedName(name, recipients), err)
	}
	return nil
}

func put(dir, name string, data []byte, recipients []string) error {
	stored := storedName(name, recipients)
	if stored != name {
		var err error
		if data, err = sealed.Seal(data, recipients); err != nil {
			return err
		}
	}
	p := filepath.Join(dir, filepath.FromSlash(stored))
	if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
		return err
	}
	return file.Replace(p, data)
}

// writing returns the error of writing a file into dir. It names the file instead of the temporary
// file in the system call's error.
func writing(dir, name string, err error) error {
	if e := (*fs.PathError)(nil); errors.As(err, &e) {
		err = e.Err
	}
	if e := (*os.LinkError)(nil); errors.As(err, &e) {
		err = e.Err
	}
	fix := ""
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		fix = "; free some space and run the command again"
	}
	return fmt.Errorf("writing %s: %w%s", filepath.Join(dir, filepath.FromSlash(name)), err, fix)
}

// readFile reads a file that may be encrypted.
func readFile(dir, name string, id sealed.Identity) ([]byte, error) {
	p := filepath.Join(dir, filepath.FromSlash(name))
	data, err := os.ReadFile(p)
	if errors.Is(err, fs.ErrNotExist) {
		if encrypted, sealedErr := os.ReadFile(p + sealed.Extension); sealedErr == nil {
			return id.Open(p+sealed.Extension, encrypted)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%w: restore the directory from your copy of it", err)
	}
	return data, nil
}

// hold resolves links to a minted directory and locks it until held is closed.
func hold(dir string) (real string, held *os.File, err error) {
	if real, err = realDir(dir); err == nil {
		held, err = lock(real)
	}
	return real, held, err
}

// lock locks a directory for this process until the file is closed.
func lock(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("%s is in use by another edgebake process; wait until it has ended", dir)
	}
	// Between opening and locking, another process may have renamed the directory, so that the path
	// now names another directory or none.
	held, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, err
	}
	if named, err := os.Lstat(dir); err != nil || !os.SameFile(held, named) {
		f.Close()
		return nil, fmt.Errorf("%s was replaced by another program in the meantime; run the command again", dir)
	}
	return f, nil
}

// create makes dir with the files atomically, even if the power is cut meanwhile.
func create(dir string, files map[string][]byte, recipients []string) error {
	parent, base := filepath.Split(filepath.Clean(dir))
	if parent == "" {
		parent = "."
	}
	undo, err := file.MakeDir(parent, 0o777)
	if err != nil {
		return err
	}
	defer undo()
	// The name is fixed, so that the next run finds and removes an unfinished directory.
	work := filepath.Join(parent, "."+base+".minting")
	if err := os.Mkdir(work, 0o700); errors.Is(err, fs.ErrExist) {
		if err := leftOver(work, os.Geteuid()); err != nil {
			return err
		}
	} else if err != nil {
		var at *fs.PathError
		if errors.As(err, &at) {
			err = at.Err // without the name of the temporary directory
		}
		return fmt.Errorf("making directory %s: %w; choose another directory, or make its parent writable", dir, err)
	}
	held, err := lock(work)
	if err != nil {
		return err
	}
	defer held.Close()
	if err := empty(work); err != nil {
		return err
	}
	if err := os.Chmod(work, 0o700); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := put(work, name, files[name], recipients); err != nil {
			return errors.Join(writing(dir, storedName(name, recipients), err), os.RemoveAll(work))
		}
	}
	for _, sub := range []string{"pki/etcd", "pki", "tokens", "manifests", "."} {
		if err := file.SyncDir(filepath.Join(work, sub)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	// rename(2) replaces dir only if it is an empty directory. (os.Rename rejects even an empty
	// one.)
	if err := unix.Rename(work, dir); err != nil {
		return errors.Join(err, os.RemoveAll(work))
	}
	return file.SyncDir(parent)
}

// leftOver returns an error unless work is a directory owned by uid, as an interrupted run leaves
// it. Another user could have put a symlink or directory there.
func leftOver(work string, uid int) error {
	fi, err := os.Lstat(work)
	switch {
	case err != nil:
		return err
	case !fi.IsDir():
		return fmt.Errorf("%s is not a directory, and edgebake did not make it; check and remove it", work)
	case ownerOf(fi) != uid:
		return fmt.Errorf("%s belongs to another user (%d); check and remove it, or name another directory with --output", work, ownerOf(fi))
	}
	return nil
}

func ownerOf(fi fs.FileInfo) int {
	return int(fi.Sys().(*syscall.Stat_t).Uid)
}

func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

// checkModes returns an error for each file that other users can read or change.
func checkModes(dir string, uid int) error {
	var errs []error
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		if d.Type()&fs.ModeSymlink == 0 && fi.Mode().Perm()&0o077 != 0 {
			errs = append(errs, fmt.Errorf("%s is accessible to other users (mode %04o), who may have copied its keys; if this computer has no other users, run chmod -R go= %s", p, fi.Mode().Perm(), dir))
		}
		if owner := ownerOf(fi); owner != uid {
			errs = append(errs, fmt.Errorf("%s belongs to another user (%d), who can read and change it; run the command as that user, or, to take the keys over, run chown -R %d %s", p, owner, uid, dir))
		}
		return nil
	})
	return errors.Join(append(errs, err)...)
}

// sweep removes the files of an interrupted run: partial files, and tokens and manifests that are
// not in the record.
func sweep(dir string, r *Record) error {
	var errs []error
	for _, sub := range []string{".", "pki", "pki/etcd", "tokens", "manifests"} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		gone := false
		for _, e := range entries {
			stray := file.Unfinished(e.Name()) || sub == "tokens" && strayToken(e.Name(), r) || sub == "manifests" && strayManifest(e.Name(), r)
			if stray && e.Type().IsRegular() {
				gone = true
				errs = append(errs, os.Remove(filepath.Join(dir, sub, e.Name())))
			}
		}
		if gone {
			errs = append(errs, file.SyncDir(filepath.Join(dir, sub)))
		}
	}
	return errors.Join(errs...)
}

// strayManifest reports whether a file in manifests/ is not in the record.
func strayManifest(file string, r *Record) bool {
	return !slices.ContainsFunc(r.Manifests, func(f File) bool {
		return "manifests/"+file == storedName(f.Name, r.Recipients)
	})
}

// strayToken reports whether a file in tokens/ is a token that is not in the record.
func strayToken(file string, r *Record) bool {
	if !strings.HasSuffix(strings.TrimSuffix(file, sealed.Extension), ".yaml") {
		return false
	}
	return !slices.ContainsFunc(r.Tokens, func(t Token) bool {
		return "tokens/"+file == storedName(tokenFile(t.Node), r.Recipients)
	})
}
