package registry

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"
)

// A read that yields nothing ends at the limit, to the second; slow ones go on.
func TestStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		r, w := io.Pipe()
		context.AfterFunc(ctx, func() { w.CloseWithError(ctx.Err()) }) // as a connection does
		s := watchStall(ctx, r, cancel, 30*time.Second)
		defer s.Close()
		go func() {
			for range 3 {
				time.Sleep(29 * time.Second)
				w.Write([]byte("slow"))
			}
		}()
		start := time.Now()
		got, err := io.ReadAll(s)
		if d := time.Since(start); string(got) != "slowslowslow" || !errors.Is(err, ErrStalled) || d != 117*time.Second {
			t.Errorf("%q, %v after %v", got, err, d)
		}
	})
}
