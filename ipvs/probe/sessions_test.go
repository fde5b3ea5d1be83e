package probe

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/servercert"
)

// TestSessions checks that a second connection resumes the TLS session, so that the server need not
// sign again, but not with another client certificate. Each connection verifies the CA.
func TestSessions(t *testing.T) {
	from, to := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	ca := issue(t, "ca", authority(from, to), nil)
	certificate := func(ca *issued) *tls.Certificate {
		c := issue(t, "kube-apiserver", server(from, to, CertName), ca)
		return &tls.Certificate{Certificate: [][]byte{c.Raw}, PrivateKey: c.key}
	}
	var serving atomic.Pointer[tls.Certificate]
	serving.Store(certificate(ca))
	resumed := make(chan bool, 8)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { resumed <- r.TLS.DidResume }))
	srv.TLS = &tls.Config{ClientAuth: tls.RequestClientCert,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return serving.Load(), nil }}
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	roots := func(ca *issued) *Roots {
		r, err := ParseRoots("ca.crt", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Raw}))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	client := func() *tls.Certificate {
		c := issue(t, "system:node:n1", x509.Certificate{NotBefore: from, NotAfter: to}, ca)
		return &tls.Certificate{Certificate: [][]byte{c.Raw}, PrivateKey: c.key}
	}
	target := Target{Addr: netip.MustParseAddrPort(srv.Listener.Addr().String()), Name: "127.0.0.1", SNI: CertName,
		Probe: Spec{Method: "GET", Path: "/readyz"}, Roots: roots(ca), Sessions: &Sessions{}}
	ask := func(t *testing.T, target Target) bool {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		l, err := Dial(ctx, target, BodyLimit)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := l.Ask(); err != nil {
			t.Fatal(err)
		}
		for e := range l.Events {
			if e.Kind == EventResponse {
				return <-resumed
			}
			if e.Kind == EventClosed {
				t.Fatal(e.Err)
			}
		}
		return false
	}
	first, second := client(), client()
	for i, tt := range []struct {
		client *tls.Certificate
		want   bool
	}{{nil, false}, {nil, true}, {first, false}, {first, true}, {nil, true}, {second, false}, {second, true}} {
		target.Client = tt.client
		if got := ask(t, target); got != tt.want {
			t.Errorf("connection %d: resumed is %t", i, got)
		}
	}
	// A handshake that was given up does not remove the session.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	late, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	hangs := target
	hangs.Dial = func(ctx context.Context, _ netip.AddrPort) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", silent.Addr().String())
	}
	if _, err := Dial(late, hangs, BodyLimit); err == nil {
		t.Fatal("a handshake without an answer succeeded")
	}
	if !ask(t, target) {
		t.Error("after a handshake that was given up, the session was not resumed")
	}
	// A session has an end, because a server with another certificate would still resume it.
	target.Sessions.withCert.Began = time.Now().Add(-servercert.MaxSessionAge - time.Minute)
	if ask(t, target) {
		t.Errorf("a session was resumed after more than %s", servercert.MaxSessionAge)
	}
	// The running server gets a certificate of another CA.
	other := issue(t, "other", authority(from, to), nil)
	serving.Store(certificate(other))
	target.Roots = roots(other)
	if ask(t, target) {
		t.Error("the session of the old certificate was resumed")
	}
	if !ask(t, target) {
		t.Error("the session of the new certificate was not resumed")
	}
	target.Roots = roots(ca)
	var alien *IdentityError
	if _, err := Dial(t.Context(), target, BodyLimit); !errors.As(err, &alien) {
		t.Errorf("with another CA: %v", err)
	}
}
