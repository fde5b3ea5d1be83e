package cluster

import (
	"context"
	"errors"
	"io"
	"net"
	"net/url"
	"testing"

	"k8s.io/client-go/rest"
)

// TestExplain checks that the error of a failed request names the server exactly once.
func TestExplain(t *testing.T) {
	c := &Client{config: &rest.Config{Host: "https://192.0.2.1:6443"}}
	for _, x := range []struct {
		err  error
		want string
	}{
		{io.EOF, "listing nodes: asking https://192.0.2.1:6443: EOF"},
		{&net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}, "listing nodes: https://192.0.2.1:6443 does not answer: dial tcp: connection refused"},
		{context.DeadlineExceeded, "listing nodes: https://192.0.2.1:6443 does not answer: context deadline exceeded"},
	} {
		err := c.explain("listing nodes", &url.Error{Op: "Get", URL: "https://192.0.2.1:6443/api/v1/nodes?limit=500", Err: x.err})
		if err == nil || err.Error() != x.want || !errors.Is(err, x.err) {
			t.Errorf("%v, want %s", err, x.want)
		}
	}
}
