//go:build !linux

package device

import (
	"errors"
	"os"
)

// Open opens a file. Disks are supported only on Linux.
func Open(path string) (*Target, error) {
	isFile, err := IsFile(path)
	if err != nil {
		return nil, err
	}
	if !isFile {
		return nil, errors.New("disks can be written on Linux only: write the image with dd")
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	if err := sameKind(f, isFile); err != nil {
		f.Close()
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, err
	}
	return &Target{Size: st.Size(), f: f}, nil
}

func (t *Target) WriteAt(p []byte, off int64) (int, error) { return t.f.WriteAt(p, off) }
func (t *Target) ReadAt(p []byte, off int64) (int, error)  { return t.f.ReadAt(p, off) }
func (t *Target) Sync() error                              { return t.f.Sync() }
func (t *Target) Discard(int64, int64)                     {}
func (t *Target) Reread()                                  {}

// Zero writes zeros.
func (t *Target) Zero(off, n int64) error {
	b := make([]byte, min(n, 4<<20))
	for n > 0 {
		part := min(n, int64(len(b)))
		if _, err := t.f.WriteAt(b[:part], off); err != nil {
			return err
		}
		off, n = off+part, n-part
	}
	return nil
}
