package firstboot

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"net/http"
	"testing"
)

// listener is a server's, on a socket without a file: thousands of machines are
// booted, and each asks its masters a dozen times.
type listener struct{ net.Listener }

// serve serves, by TLS where it is configured, until the test ends.
func serve(t *testing.T, srv *http.Server) listener {
	l, err := net.Listen("unix", "@firstboot-test-"+rand.Text())
	if err != nil {
		t.Fatal(err)
	}
	run := srv.Serve
	if srv.TLSConfig != nil {
		run = func(l net.Listener) error { return srv.ServeTLS(l, "", "") }
	}
	done := make(chan error)
	go func() { done <- run(l) }()
	t.Cleanup(func() {
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return listener{l}
}

func (l listener) dial(ctx context.Context) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "unix", l.Addr().String())
}
