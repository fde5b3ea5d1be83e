package cluster

import (
	"context"
	"errors"
	"io"
	"net"
	"net/url"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

func forbidden(message string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{Reason: metav1.StatusReasonForbidden, Message: message}}
}

// TestExplain checks that the error of a failed request has the cause, and names the server at most
// once.
func TestExplain(t *testing.T) {
	c := &Client{config: &rest.Config{Host: "https://192.0.2.1:6443"}}
	for _, x := range []struct {
		err  error
		want string
	}{
		{io.EOF, "listing nodes: request to https://192.0.2.1:6443 failed: EOF"},
		{&net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}, "listing nodes: https://192.0.2.1:6443 does not answer: dial tcp: connection refused"},
		{forbidden(`nodes is forbidden: User "eve" cannot list resource "nodes"`), `listing nodes: the kubeconfig's user has no permission: nodes is forbidden: User "eve" cannot list resource "nodes"`},
		{forbidden(`admission webhook "a.example.com" denied the request: not today`), `listing nodes: the API server rejects it: admission webhook "a.example.com" denied the request: not today`},
		{context.DeadlineExceeded, "listing nodes: https://192.0.2.1:6443 does not answer: context deadline exceeded"},
	} {
		err := c.explain("listing nodes", &url.Error{Op: "Get", URL: "https://192.0.2.1:6443/api/v1/nodes?limit=500", Err: x.err})
		if err == nil || err.Error() != x.want || !errors.Is(err, x.err) {
			t.Errorf("%v, want %s", err, x.want)
		}
	}
}
