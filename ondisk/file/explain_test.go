package file

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"testing"
)

// TestExplain checks that Explain removes the name in the error, which may be temporary. The caller
// adds the real one.
func TestExplain(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		err  error
		want string
	}{
		{&fs.PathError{Op: "write", Path: "/shop/.a.raw.7-0.tmp", Err: syscall.ENOSPC}, "no space left on device: directory /shop is full; make room or write elsewhere"},
		{&os.LinkError{Op: "rename", Old: "/shop/.a.raw.7-0.tmp", New: "/shop/a.raw", Err: syscall.EACCES}, "permission denied"},
		{os.NewSyscallError("write", syscall.EFBIG), "write: file too large: the file system of directory /shop cannot hold files of this size, or a limit (ulimit -f) forbids it; write elsewhere"},
		{fmt.Errorf("packing: %w", &fs.PathError{Op: "read", Path: "/in/b", Err: syscall.EIO}), "packing: read /in/b: input/output error"},
		{errors.New("as it is"), "as it is"},
	} {
		if got := Explain(tc.err, "/shop"); got.Error() != tc.want || errors.As(got, new(syscall.Errno)) != errors.As(tc.err, new(syscall.Errno)) {
			t.Errorf("%v becomes\n%v, want\n%s", tc.err, got, tc.want)
		}
	}
	if Explain(nil, "/shop") != nil {
		t.Error("Explain(nil) is not nil")
	}
}
