// Package transfer contains the timeouts and retries of all network transfers: registries,
// downloads, and images that an installer or a machine reads from a web server.
//
// A transfer fails if nothing arrives for some time, but may take as long as it needs. Pauses
// between attempts grow, and last at least as long as the server demands, up to a minute. The
// caller decides which errors are temporary, and how often to try.
package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"syscall"
	"time"
)

// Transport returns an HTTP transport. connect limits the times for connecting and for the TLS
// handshake, and silence limits the wait for a response.
func Transport(connect, silence time.Duration) *http.Transport {
	return &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: connect}).DialContext,
		TLSHandshakeTimeout:   connect,
		ResponseHeaderTimeout: silence,
		IdleConnTimeout:       90 * time.Second,
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   8,
	}
}

// WithStallTimeout wraps a transport. Reading a response fails with ErrStalled if the server sends
// nothing for the duration silence.
func WithStallTimeout(base http.RoundTripper, silence time.Duration) http.RoundTripper {
	return stallTimeout{base, silence}
}

type stallTimeout struct {
	base  http.RoundTripper
	limit time.Duration
}

func (i stallTimeout) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	resp, err := i.base.RoundTrip(req.WithContext(ctx))
	if err != nil {
		cancel(nil)
		return nil, err
	}
	resp.Body = watch(ctx, resp.Body, cancel, i.limit)
	return resp, nil
}

func (i stallTimeout) CloseIdleConnections() {
	if c, ok := i.base.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// ErrStalled means that a transfer made no progress for too long.
var ErrStalled = errors.New("no data")

func stalled(limit time.Duration) error { return fmt.Errorf("%w for %v", ErrStalled, limit) }

// IsTimeout reports whether an error means that the other side did not respond in time.
func IsTimeout(err error) bool {
	var ne net.Error
	return errors.Is(err, ErrStalled) || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &ne) && ne.Timeout()
}

// IsBroken reports whether an error means that a transfer was interrupted, as opposed to rejected
// or wrong.
func IsBroken(err error) bool {
	return IsTimeout(err) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

type responseBody struct {
	ctx    context.Context
	body   io.ReadCloser
	cancel context.CancelCauseFunc
	timer  *time.Timer
	limit  time.Duration
}

func watch(ctx context.Context, body io.ReadCloser, cancel context.CancelCauseFunc, limit time.Duration) io.ReadCloser {
	in := &responseBody{ctx: ctx, body: body, cancel: cancel, limit: limit}
	in.timer = time.AfterFunc(limit, func() { cancel(stalled(limit)) })
	in.timer.Stop()
	return in
}

func (in *responseBody) Read(p []byte) (int, error) {
	// Run the timer only while waiting for the server, not while the reader is busy.
	in.timer.Reset(in.limit)
	n, err := in.body.Read(p)
	in.timer.Stop()
	if err != nil && err != io.EOF {
		if cause := context.Cause(in.ctx); cause != nil {
			err = cause
		}
	}
	return n, err
}

func (in *responseBody) Close() error {
	in.timer.Stop()
	err := in.body.Close()
	in.cancel(nil)
	return err
}

// Send calls send with a body. The call fails with ErrStalled if nothing of the body is sent for
// the time limit.
func Send(ctx context.Context, body io.Reader, limit time.Duration, send func(context.Context, io.Reader) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := &requestBody{r: body, limit: limit}
	out.timer = time.AfterFunc(limit, func() { cancel(stalled(limit)) })
	defer out.timer.Stop()
	err := send(ctx, out)
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, ErrStalled) {
		return cause
	}
	return err
}

type requestBody struct {
	r     io.Reader
	timer *time.Timer
	limit time.Duration
}

func (o *requestBody) Read(p []byte) (int, error) {
	// Once the whole body is sent, the transport limits the wait for the response.
	if o.timer.Stop() {
		o.timer.Reset(o.limit)
	}
	n, err := o.r.Read(p)
	if err == io.EOF {
		o.timer.Stop()
	}
	return n, err
}
