//go:build !linux

package builder

import "io/fs"

// statKey is empty: files are read every time.
func statKey(fs.FileInfo) string { return "" }
