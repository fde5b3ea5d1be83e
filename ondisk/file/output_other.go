//go:build !linux

package file

import (
	"errors"
	"io/fs"
	"os"
)

// openNameless is supported only on Linux.
func openNameless(string, fs.FileMode) (*os.File, error) { return nil, errors.ErrUnsupported }

func nameIt(*os.File, string) error { return errors.ErrUnsupported }

// PunchHole does nothing: it is supported only on Linux.
func (o *Output) PunchHole(int64, int64) {}

func writeBehind(*os.File, int64, int64) {}
