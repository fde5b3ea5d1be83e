package registry

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
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

// TestNobodyListens: a registry of a private network that is down is not taken
// for one that sends elsewhere.
func TestNobodyListens(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	host := l.Addr().String()
	l.Close()
	r, err := name.NewRegistry(host)
	if err != nil {
		t.Fatal(err)
	}
	_, err = transport.NewWithContext(t.Context(), r, authn.Anonymous, Access{Stall: time.Second}.Transport(), nil)
	err = &Error{Host: host, Err: err}
	if got := err.Error(); !strings.HasPrefix(got, host+" cannot be reached: ") {
		t.Error(got)
	}
	if got := Fix(err, Words{Insecure: "add --insecure"}); got != "check its name, its port and the network; add --insecure if plain HTTP is meant" {
		t.Error(got)
	}
}
