// Package registry connects to container registries for pulling and pushing. It uses TLS unless
// plain HTTP is allowed, the logins of docker, and a timeout for every wait. Its errors contain a
// fix.
package registry

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/edgebake/edgebake/builder/transfer"
)

// Access configures the access to a registry.
type Access struct {
	// Insecure allows plain HTTP, and certificates that cannot be verified.
	Insecure bool
	// Stall is how long the registry may send nothing before a request fails.
	Stall time.Duration
}

// Transport returns the HTTP transport for requests to a registry.
func (a Access) Transport() http.RoundTripper {
	base := transfer.Transport(a.Stall, a.Stall)
	rt := transfer.WithStallTimeout(base, a.Stall)
	if a.Insecure {
		base.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} //nolint:gosec // the user allowed this for the host
		return rt
	}
	return tlsOnly{rt}
}

// tlsOnly rejects plain HTTP. Otherwise, the client library would try it for hosts that it
// considers local.
type tlsOnly struct{ base http.RoundTripper }

// ErrPlainHTTP means that a request would not use TLS.
var ErrPlainHTTP = errors.New("plain HTTP is rejected")

func (t tlsOnly) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" {
		return nil, fmt.Errorf("%s: %w", req.URL.Host, ErrPlainHTTP)
	}
	return t.base.RoundTrip(req)
}
