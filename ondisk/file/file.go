// Package file replaces files atomically: after a power cut, a file has either its old contents or
// the new. It also computes SHA-256 digests. In directories of other users, code that runs as root
// must use firstboot/beneath instead.
package file

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Replace atomically writes a file with mode 0600, and syncs it.
func Replace(path string, data []byte) error {
	if err := replace(path, data, true); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// unfinished is the prefix of the names of files that are being written.
const unfinished = ".new-"

// Unfinished reports whether name is that of an incomplete file of Replace or Swap, which may
// contain part of a secret.
func Unfinished(name string) bool { return strings.HasPrefix(name, unfinished) }

// Swap is like Replace, but does not sync.
func Swap(path string, data []byte) error { return replace(path, data, false) }

func replace(path string, data []byte, sync bool) error {
	f, err := os.CreateTemp(filepath.Dir(path), unfinished+"*") // 0600
	if err == nil {
		_, err = f.Write(data)
		if sync && err == nil {
			err = f.Sync()
		}
		err = cmp.Or(err, f.Close())
		if err == nil {
			err = os.Rename(f.Name(), path)
		}
		if err != nil {
			os.Remove(f.Name())
		}
	}
	// The temporary name means nothing to a user, so leave it out of the error.
	switch e := err.(type) {
	case *fs.PathError:
		err = e.Err
	case *os.LinkError:
		err = e.Err
	}
	if err != nil {
		return &fs.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}

// SyncDir syncs the entries of a directory. It does nothing if the file system does not support
// that, or the directory is not readable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if errors.Is(err, fs.ErrPermission) {
		return nil
	}
	if err != nil {
		return err
	}
	err = d.Sync()
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, errors.ErrUnsupported) {
		err = nil
	}
	return errors.Join(err, d.Close())
}

// SHA256 returns the SHA-256 digest of a file in hexadecimal.
func SHA256(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("reading %s: %w", path, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
