//go:build !linux

package fetch

import "io/fs"

// FileState is empty: files are read every time.
func FileState(fs.FileInfo) string { return "" }
