package builder

import (
	"bytes"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"strings"
)

// checkVersion returns an error for a Go program whose version differs from the Image's. It
// searches the file for the version, because a program for another processor cannot be run. The
// file is blob sha, called name in messages; field is the Image's field with the version. Other
// programs pass.
func (b *buildEnv) checkVersion(sha, name, field, version string) error {
	f, err := b.Cache.OpenBlob(sha)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := buildinfo.Read(f); err != nil {
		return nil
	}
	has, err := hasVersion(io.NewSectionReader(f, 0, 1<<62), version)
	if err != nil {
		return fmt.Errorf("reading %s: %w", name, err)
	}
	if !has {
		return fmt.Errorf("%s is not version %s: use a program of that version, or set %s to the version that `%s --version` prints", name, version, field, name)
	}
	return nil
}

// hasVersion reports whether a Go program contains a version, with or without "v". It ignores the
// versions of modules, which follow a tab or an @, and longer versions: v1.36.30 and v1.36.3-rc.1
// are not v1.36.3. A distributor's suffix (v1.36.3+k3s1) is allowed.
func hasVersion(r io.Reader, version string) (bool, error) {
	want := []byte(strings.TrimPrefix(version, "v"))
	const margin = 8 // bytes that isVersion examines on each side
	buf := make([]byte, 1<<20)
	for kept, from := 0, 0; ; {
		n, err := io.ReadFull(r, buf[kept:])
		last := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !last {
			return false, err
		}
		text := buf[:kept+n]
		for at := from; ; at++ {
			i := bytes.Index(text[at:], want)
			if i < 0 {
				break
			}
			at += i
			end := at + len(want)
			if !last && end+margin > len(text) {
				break // examined together with the next piece
			}
			if isVersion(text[:at], text[end:]) {
				return true, nil
			}
		}
		if last {
			return false, nil
		}
		// The first margin bytes only provide context: matches in them have been examined.
		kept, from = copy(buf, text[len(text)-2*margin-len(want):]), margin
	}
}

// isVersion reports whether a match is a whole version. before and behind are the bytes around it.
// Any text may come before: the linker stores strings without separators.
func isVersion(before, behind []byte) bool {
	if name := bytes.TrimSuffix(before, []byte("v")); bytes.HasSuffix(name, []byte("\t")) || bytes.HasSuffix(name, []byte("@")) {
		return false
	}
	if len(behind) > 0 && isDigit(behind[0]) {
		return false
	}
	for _, early := range []string{"-alpha.", "-beta.", "-rc."} {
		if bytes.HasPrefix(behind, []byte(early)) {
			return false
		}
	}
	return true
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }
