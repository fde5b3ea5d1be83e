//go:build !linux

package fetch

import (
	"io/fs"
	"time"
)

// FileState is always empty: files are read every time.
func FileState(fs.FileInfo) string { return "" }

func changedAt(fs.FileInfo) []time.Time { return nil }
