package file

import (
	"fmt"
	"os"
	"path/filepath"
)

// Same reports whether two names refer to the same existing file. It follows symbolic links.
func Same(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// NotInput returns an error if output and name are the same file, so that writing the output would
// overwrite an input. The message contains flag and what, a description of the input. An empty name
// is ignored.
func NotInput(flag, output, what, name string) error {
	if name != "" && (Same(output, name) || withoutLinks(output) == withoutLinks(name)) {
		return fmt.Errorf("%s %s: it is %s: name another file", flag, output, what)
	}
	return nil
}

// withoutLinks resolves symbolic links in a file name. The file need not exist.
func withoutLinks(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil {
		return filepath.Clean(path)
	}
	if real, err := filepath.EvalSymlinks(abs); err == nil {
		return real
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(abs))
	if err != nil {
		return abs
	}
	return filepath.Join(dir, filepath.Base(abs))
}
