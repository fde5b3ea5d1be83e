package builder

import (
	"bytes"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"strings"
)

// checkVersion rejects a program of the user's that is not of the version that the
// Image says. Its name does not tell, and it may be for another processor, so that it
// cannot be asked; but the linker writes the version into what Go makes. A program
// that was not linked by Go, or that is packed, passes. The file is sha in the cache,
// and called name in messages; field has the version.
func (b *build) checkVersion(sha, name, field, version string) error {
	// Programs are large: what was read once is known.
	note := "version 1 " + version + " " + sha
	if b.Cache.Kept(note) != nil {
		return nil
	}
	f, err := b.Cache.OpenBlob(sha)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := buildinfo.Read(f); err == nil {
		has, err := hasVersion(io.NewSectionReader(f, 0, 1<<62), version)
		if err != nil {
			return fmt.Errorf("reading %s: %w", name, err)
		}
		if !has {
			return fmt.Errorf("%s is not %s: give the program of that version, or set %s to what `%s --version` says", name, version, field, name)
		}
	}
	b.Cache.Keep(note, []byte{})
	return nil
}

// hasVersion tells whether a Go program has a version in it, with or without "v". The
// versions of the modules that it was made from do not count; they follow a tab.
func hasVersion(r io.Reader, version string) (bool, error) {
	want := []byte(strings.TrimPrefix(version, "v"))
	keep := len(want) + len("\tv") - 1 // of what begins in one piece and ends in the next
	buf := make([]byte, 1<<20)
	have := 0
	for {
		n, err := r.Read(buf[have:])
		text := buf[:have+n]
		for at := 0; ; {
			i := bytes.Index(text[at:], want)
			if i < 0 {
				break
			}
			at += i
			before := bytes.TrimSuffix(text[:at], []byte("v"))
			at += len(want)
			if at > have && !bytes.HasSuffix(before, []byte("\t")) { // else the last piece had it whole
				return true, nil
			}
		}
		if errors.Is(err, io.EOF) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		have = copy(buf, text[max(0, len(text)-keep):])
	}
}
