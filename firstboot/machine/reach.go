package machine

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"
)

// HasRoute returns nil if this machine has an address and a route towards at least one API server.
func HasRoute(ctx context.Context, e *Env, masters []string) error {
	var errs []error
	try := func(addr string) bool {
		_, err := e.Source(ctx, addr)
		if err != nil {
			errs = append(errs, fmt.Errorf("no route to %s: %w", addr, err))
		}
		return err == nil
	}
	named := false
	for _, m := range masters {
		host, _, err := net.SplitHostPort(m)
		if err != nil {
			return fmt.Errorf("reading the API server's address %q: %w", m, err)
		}
		if _, err := netip.ParseAddr(host); err != nil {
			named = true
		} else if try(m) {
			return nil
		}
	}
	// If an API server's name cannot be resolved now, its address is unknown. Then try
	// documentation addresses, to which only a default route leads (RFC 5737, RFC 3849).
	if named && (try("192.0.2.1:6443") || try("[2001:db8::1]:6443")) {
		return nil
	}
	return errors.Join(errs...)
}

// probeTimeout is the default of Network.ProbeTimeout.
const probeTimeout = 4 * time.Second

// ForProbe returns a context for a connection to one API server.
func (e *Env) ForProbe(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, cmp.Or(e.ProbeTimeout, probeTimeout))
}

// PlainNet removes the address from a dial error, for callers that print it themselves.
func PlainNet(err error) error {
	var op *net.OpError
	if errors.As(err, &op) && op.Err != nil {
		return op.Err
	}
	return err
}

// Answers returns nil if a connection to addr succeeds.
func Answers(ctx context.Context, e *Env, addr string) error {
	ctx, cancel := e.ForProbe(ctx)
	defer cancel()
	conn, err := e.Dial(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	return conn.Close()
}

// LocalGet sends an HTTP request to a server on this node. body is truncated to 4096 bytes.
func LocalGet(ctx context.Context, e *Env, addr, path string) (body string, code int, err error) {
	conn, err := e.Dial(ctx, "tcp", addr)
	if err != nil {
		return "", 0, err
	}
	defer conn.Close()
	if end, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(end); err != nil {
			return "", 0, err
		}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return "", 0, err
	}
	req.Close = true
	if err := req.Write(conn); err != nil {
		return "", 0, err
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), req)
	if err != nil {
		return "", 0, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, 4096))
	return strings.TrimSpace(string(b)), res.StatusCode, err
}
