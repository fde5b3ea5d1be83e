// Package registry is how container registries are reached, whatever is fetched
// from them or brought there: over TLS unless plain HTTP is allowed, with the
// logins that docker knows, with an end to every wait, and with errors in plain
// words.
package registry

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// Access is how one registry is reached.
type Access struct {
	// Insecure allows plain HTTP and certificates that cannot be verified.
	Insecure bool
	// Stall is how long it may be silent.
	Stall time.Duration
}

// Transport carries requests to a registry.
func (a Access) Transport() http.RoundTripper {
	base := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: a.Stall}).DialContext,
		TLSHandshakeTimeout:   a.Stall,
		ResponseHeaderTimeout: a.Stall,
		IdleConnTimeout:       90 * time.Second,
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   8,
	}
	var rt http.RoundTripper = impatient{base, a.Stall}
	if a.Insecure {
		base.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} //nolint:gosec // the user said so, for this host
		return rt
	}
	return tlsOnly{rt}
}

// tlsOnly refuses plain HTTP, which the client library would otherwise try by
// itself for hosts it takes for local.
type tlsOnly struct{ base http.RoundTripper }

// ErrPlainHTTP says that a registry would be asked without TLS.
var ErrPlainHTTP = errors.New("plain HTTP is refused")

func (t tlsOnly) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" {
		return nil, fmt.Errorf("%s: %w", req.URL.Host, ErrPlainHTTP)
	}
	return t.base.RoundTrip(req)
}

// impatient ends answers that yield nothing for too long. One that is merely
// slow goes on.
type impatient struct {
	base  http.RoundTripper
	limit time.Duration
}

func (i impatient) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	resp, err := i.base.RoundTrip(req.WithContext(ctx))
	if err != nil {
		cancel(nil)
		return nil, err
	}
	resp.Body = watchStall(ctx, resp.Body, cancel, i.limit)
	return resp, nil
}

// ErrStalled says that a transfer yielded nothing for too long.
var ErrStalled = errors.New("no more data came")

type stallReader struct {
	ctx    context.Context
	body   io.ReadCloser
	cancel context.CancelCauseFunc
	timer  *time.Timer
	limit  time.Duration
}

func watchStall(ctx context.Context, body io.ReadCloser, cancel context.CancelCauseFunc, limit time.Duration) io.ReadCloser {
	s := &stallReader{ctx: ctx, body: body, cancel: cancel, limit: limit}
	s.timer = time.AfterFunc(limit, func() { cancel(fmt.Errorf("%w for %v", ErrStalled, limit)) })
	s.timer.Stop()
	return s
}

func (s *stallReader) Read(p []byte) (int, error) {
	// Only waiting for the registry counts, not what the reader does with
	// the data.
	s.timer.Reset(s.limit)
	n, err := s.body.Read(p)
	s.timer.Stop()
	if err != nil && err != io.EOF {
		if cause := context.Cause(s.ctx); cause != nil {
			err = cause
		}
	}
	return n, err
}

func (s *stallReader) Close() error {
	s.timer.Stop()
	err := s.body.Close()
	s.cancel(nil)
	return err
}
