//go:build !linux

package tree

import "io/fs"

// inodeID identifies a file of the host.
type inodeID struct{}

// On other systems hard links are packed as copies, and there are no file
// capabilities.
func linked(fs.FileInfo) (inodeID, bool) { return inodeID{}, false }

func readCapability(string) (string, error) { return "", nil }
