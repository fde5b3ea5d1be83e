// Package disktest has helpers for tests of disk formats: other programs that check edgebake's
// output, and blobs in memory. For tests only.
package disktest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/desk"
	"golang.org/x/sys/unix"
)

// Oracle runs another program that checks edgebake's output, and returns its own output. If the
// program is missing, the test is skipped on a developer's computer and fails in CI.
func Oracle(t testing.TB, name string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		desk.Lacks(t, "the program %s is missing", name)
	}
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Disguise adds a long name to the directory entry with this short name (11 bytes) in the top
// directory of a FAT16 file system. The entry must have no long name yet. Operating systems show
// the long name; firmware opens files by either name.
func Disguise(t testing.TB, img []byte, short, long string) {
	t.Helper()
	le := binary.LittleEndian
	root := (int(le.Uint16(img[14:])) + int(img[16])*int(le.Uint16(img[22:]))) * int(le.Uint16(img[11:]))
	top := img[root:][:int(le.Uint16(img[17:]))*32]
	i := bytes.Index(top, []byte(short))
	if len(short) != 11 || i < 0 || i%32 != 0 {
		t.Fatalf("no entry %q in the top directory", short)
	}
	sum := byte(0)
	for _, c := range []byte(short) {
		sum = sum<<7 | sum>>1
		sum += c
	}
	part := bytes.Repeat([]byte{0xff}, 32)
	part[0], part[11], part[12], part[13] = 0x41, 0x0f, 0, sum
	le.PutUint16(part[26:], 0)
	at := []int{1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30}
	for j, c := range utf16.Encode([]rune(long + "\x00")) {
		le.PutUint16(part[at[j]:], c)
	}
	copy(top[i+32:], bytes.Clone(top[i:len(top)-32]))
	copy(top[i:], part)
}

// Sum returns the digest of a file.
func Sum(t testing.TB, path string) string {
	t.Helper()
	h := sha256.New()
	size := blocks(t, path, func(b []byte, at int64) error {
		fmt.Fprintf(h, "%d bytes at %d\n", len(b), at)
		h.Write(b)
		return nil
	})
	fmt.Fprintf(h, "%d bytes in all\n", size)
	return hex.EncodeToString(h.Sum(nil))
}

// Copy copies a file. Blocks of zeros become holes.
func Copy(t testing.TB, from, to string) {
	t.Helper()
	create(t, to, func(f *os.File) (int64, error) {
		return blocks(t, from, func(b []byte, at int64) error {
			_, err := f.WriteAt(b, at)
			return err
		}), nil
	})
}

// Write writes b to a file. Blocks of zeros become holes.
func Write(t testing.TB, path string, b []byte) {
	t.Helper()
	create(t, path, func(f *os.File) (int64, error) {
		at := int64(0)
		for block := range slices.Chunk(b, blockSize) {
			if !isZero(block) {
				if _, err := f.WriteAt(block, at); err != nil {
					return 0, err
				}
			}
			at += blockSize
		}
		return int64(len(b)), nil
	})
}

// create makes or replaces a file, and sets its size to the one that fill returns.
func create(t testing.TB, path string, fill func(*os.File) (size int64, err error)) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	size, err := fill(f)
	if err := errors.Join(err, f.Truncate(size), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// Contains reports whether a file contains the text, which must not have zero bytes.
func Contains(t testing.TB, path, text string) bool {
	t.Helper()
	found := false
	var last []byte
	end := int64(0) // offset of the end of last in the file
	blocks(t, path, func(b []byte, at int64) error {
		if at != end {
			last = nil
		}
		last, end = append(last, b...), at+int64(len(b))
		found = found || bytes.Contains(last, []byte(text))
		last = append(last[:0], last[max(0, len(last)-len(text)):]...)
		return nil
	})
	return found
}

// Empty reports whether a file is all zeros, as a disk that was never written is.
func Empty(t testing.TB, path string) bool {
	t.Helper()
	empty := true
	blocks(t, path, func([]byte, int64) error {
		empty = false
		return nil
	})
	return empty
}

const blockSize = 64 << 10

var zeros [blockSize]byte

func isZero(b []byte) bool { return bytes.Equal(b, zeros[:len(b)]) }

// blocks calls do with each block of a file that is not all zeros, and returns the file's size. It
// skips holes, which are most of an image.
func blocks(t testing.TB, path string, do func(b []byte, at int64) error) (size int64) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if size, err = f.Seek(0, io.SeekEnd); err != nil {
		t.Fatal(err)
	}
	block := make([]byte, blockSize)
	for at := int64(0); at < size; at += blockSize {
		// For a device, which has no holes, SEEK_DATA fails.
		data, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err == nil {
			at = data / blockSize * blockSize
		}
		n, err := f.ReadAt(block, at)
		if err == io.EOF {
			err = nil
		}
		if err == nil && !isZero(block[:n]) {
			err = do(block[:n], at)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return size
}

// Scratch returns a directory for many or large files. It is in TMPDIR if that is set, because the
// script that runs the tests removes TMPDIR; otherwise it is in memory if possible.
func Scratch(t testing.TB) string {
	t.Helper()
	at := os.Getenv("TMPDIR")
	if at == "" {
		at = "/dev/shm"
	}
	dir, err := os.MkdirTemp(at, "edgebake-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Blobs are blobs in memory, by name.
type Blobs map[string][]byte

// OpenBlob implements tree.Blobs.
func (m Blobs) OpenBlob(name string) (tree.BlobFile, error) {
	b, ok := m[name]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return struct {
		io.ReaderAt
		io.Closer
	}{bytes.NewReader(b), io.NopCloser(nil)}, nil
}

// Mounted runs body with a directory in which the shell script has mounted small or read-only file
// systems. The script gets the directory as "$0". Mounted runs the test program again in separate
// namespaces.
func Mounted(t *testing.T, script string, body func(t *testing.T, dir string)) {
	t.Helper()
	const variable = "EDGEBAKE_TEST_SMALL_DISK"
	if dir := os.Getenv(variable); dir != "" {
		body(t, dir)
		return
	}
	dir := t.TempDir()
	cmd := exec.Command("unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script+`; exec "$@"`,
		dir, os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), variable+"="+dir)
	out, err := cmd.CombinedOutput()
	if err == nil && strings.Contains(string(out), "--- PASS") {
		return
	}
	if !strings.Contains(string(out), "=== RUN") {
		desk.Lacks(t, "this computer does not allow user namespaces: %v\n%s", err, out)
	}
	t.Errorf("%v\n%s", err, out)
}
