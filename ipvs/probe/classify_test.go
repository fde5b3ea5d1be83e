package probe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"testing"
)

func TestClassify(t *testing.T) {
	for _, tt := range []struct {
		err  error
		noCA bool
		want Outcome
	}{
		{&IdentityError{Err: errors.New("x")}, false, Identity},
		{ErrNotTLS, true, TCPOnly},
		{ErrNotTLS, false, Identity},
		{os.NewSyscallError("connect", syscall.ECONNREFUSED), false, Refused},
		{os.NewSyscallError("connect", syscall.EHOSTUNREACH), false, Unreachable},
		{context.DeadlineExceeded, false, Timeout},
		{io.EOF, false, Closed},
	} {
		if got := Classify(fmt.Errorf("dialling: %w", tt.err), tt.noCA); got != tt.want {
			t.Errorf("%v: got %s, want %s", tt.err, got, tt.want)
		}
	}
}
