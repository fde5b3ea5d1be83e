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
	note := "version 2 " + version + " " + sha
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
// versions of the modules that it was made from do not count: in the list of them they
// follow a tab, and in the names of their files an @. Nor does the beginning of another
// version: v1.36.30 and v1.36.3-rc.1 are not v1.36.3. What a distributor appends
// (v1.36.3+k3s1) is of that version.
func hasVersion(r io.Reader, version string) (bool, error) {
	want := []byte(strings.TrimPrefix(version, "v"))
	const before, behind = len("\tv"), len("-alpha.") // what is looked at on either side
	buf := make([]byte, 1<<20)
	have, from := 0, 0 // what is left of the last piece, and where in it the search goes on
	for {
		n, err := r.Read(buf[have:])
		if err != nil && !errors.Is(err, io.EOF) {
			return false, err
		}
		text := buf[:have+n]
		// A match that is nearer to the end is looked at with the next piece.
		end := len(text)
		if err == nil {
			end = max(0, end-behind)
		}
		for at := from; at < end; {
			i := bytes.Index(text[at:end], want)
			if i < 0 {
				break
			}
			at += i
			if isVersion(text[:at], text[at+len(want):]) {
				return true, nil
			}
			at++
		}
		if err != nil {
			return false, nil
		}
		next := max(from, end-len(want)+1) // where a match could begin that was not looked at
		left := max(0, next-before)
		from = next - left
		have = copy(buf, text[left:])
	}
}

// isVersion tells whether a version that was found between two texts is one by itself.
// Before it may stand anything: a linker puts one text behind another. A version that it
// was told has a zero behind it.
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
