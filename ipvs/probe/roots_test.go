package probe

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"
	"unicode"
)

// issued is a certificate with its key.
type issued struct {
	*x509.Certificate
	key *ecdsa.PrivateKey
}

// issue makes a certificate; without a parent it is self-signed.
func issue(t *testing.T, name string, c x509.Certificate, parent *issued) *issued {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c.Subject, c.SerialNumber = pkix.Name{CommonName: name}, big.NewInt(1)
	if parent == nil {
		parent = &issued{&c, key}
	}
	der, err := x509.CreateCertificate(rand.Reader, &c, parent.Certificate, key.Public(), parent.key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &issued{cert, key}
}

func authority(from, to time.Time) x509.Certificate {
	return x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, NotBefore: from, NotAfter: to}
}

func server(from, to time.Time, names ...string) x509.Certificate {
	return x509.Certificate{DNSNames: names, NotBefore: from, NotAfter: to, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
}

func TestVerifyChain(t *testing.T) {
	now := time.Now()
	at := func(days int) time.Time { return now.AddDate(0, 0, days) }
	ca := issue(t, "kubernetes", authority(at(-100), at(100)), nil)
	old := issue(t, "kubernetes", authority(at(-100), at(-10)), nil)
	inter := issue(t, "between", authority(at(-90), at(90)), ca)
	r := &Roots{Pool: x509.NewCertPool(), Certs: []*x509.Certificate{ca.Certificate, old.Certificate}}
	r.Pool.AddCert(ca.Certificate)
	r.Pool.AddCert(old.Certificate)
	chain := func(all ...*issued) (out []*x509.Certificate) {
		for _, c := range all {
			out = append(out, c.Certificate)
		}
		return out
	}
	foreign := issue(t, "kubernetes", authority(at(-100), at(100)), nil)
	many := []*issued{issue(t, "s", server(at(-1), at(1), "kubernetes"), ca)}
	for len(many) <= maxChain {
		many = append(many, foreign)
	}
	large := server(at(-1), at(1), "kubernetes")
	for len(large.DNSNames) < 900 {
		large.DNSNames = append(large.DNSNames, strings.Repeat("x", 200))
	}
	ugly := server(at(-1), at(1))
	for len(ugly.DNSNames) < 200 {
		ugly.DNSNames = append(ugly.DNSNames, "\x1b]0;owned\x07\x1b[2J"+strings.Repeat("n", 200))
	}
	for _, tc := range []struct {
		name  string
		chain []*x509.Certificate
		off   bool
		early bool
		want  string
	}{
		{"good", chain(issue(t, "s", server(at(-1), at(1), "kubernetes"), ca)), false, false, ""},
		{"expired", chain(issue(t, "s", server(at(-9), at(-1), "kubernetes"), ca)), true, false, ""},
		{"early", chain(issue(t, "s", server(at(1), at(9), "kubernetes"), ca)), true, true, ""},
		{"expired with its authority", chain(issue(t, "s", server(at(-90), at(-5), "kubernetes"), old)), true, false, ""},
		{"expired, with an intermediate authority", chain(issue(t, "s", server(at(-9), at(-1), "kubernetes"), inter), inter), true, false, ""},
		{"foreign", chain(issue(t, "s", server(at(-1), at(1), "kubernetes"), foreign)), false, false, "unknown authority"},
		{"expired and foreign", chain(issue(t, "s", server(at(-9), at(-1), "kubernetes"), foreign)), false, false, "expired"},
		{"a node's", chain(issue(t, "system:node:edge-1", server(at(-1), at(1), "kubernetes"), ca)), false, false, "a node's, not an API server's"},
		{"too many", chain(many...), false, false, "it sends 9 certificates"},
		{"too large", chain(issue(t, "s", large, ca)), false, false, "it sends 1 certificates with"},
		{"of others", chain(issue(t, "s", ugly, nil)), false, false, "and 195 more: it must match"},
	} {
		s, err := r.verify(t.Context(), tc.chain, []string{"10.0.0.1", "kubernetes"}, now)
		if s.off != tc.off || s.early != tc.early || (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %+v %v", tc.name, s, err)
		}
		if err != nil && (len(err.Error()) > 600 || strings.ContainsFunc(err.Error(), unicode.IsControl)) {
			t.Errorf("%s: the error is %q", tc.name, err)
		}
	}
	// The reader's deadline ends the context.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.verify(ctx, chain(issue(t, "s", server(at(-9), at(-1), "kubernetes"), foreign)), []string{"kubernetes"}, now); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// lateConn delivers the peer's data only after the reader's deadline.
type lateConn struct {
	net.Conn
	ctx context.Context
	got []byte
}

func (c *lateConn) Read(p []byte) (int, error) {
	if c.got == nil {
		c.got = make([]byte, 64<<10)
		time.Sleep(100 * time.Millisecond) // until the peer has sent all of its handshake
		n, err := c.Conn.Read(c.got)
		if err != nil {
			return 0, err
		}
		c.got = c.got[:n]
		<-c.ctx.Done()
	}
	if len(c.got) == 0 {
		return 0, os.ErrDeadlineExceeded
	}
	n := copy(p, c.got)
	c.got = c.got[n:]
	return n, nil
}

// TestStalledWhileVerifying checks that a node that stalls until the timeout returns no verdict on
// the API server's identity.
func TestStalledWhileVerifying(t *testing.T) {
	now := time.Now()
	ca := issue(t, "kubernetes", authority(now.AddDate(0, 0, -100), now.AddDate(0, 0, 100)), nil)
	leaf := issue(t, "s", server(now.AddDate(0, 0, -9), now.AddDate(0, 0, -1), "kubernetes"), ca) // expired according to this node's clock
	r := &Roots{Pool: x509.NewCertPool(), Certs: []*x509.Certificate{ca.Certificate}}
	r.Pool.AddCert(ca.Certificate)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{leaf.Raw}, PrivateKey: leaf.key}}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go conn.(*tls.Conn).Handshake()
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err = Dial(ctx, Target{SNI: CertName, Roots: r, Probe: Spec{Method: "GET", Path: "/readyz"},
		Dial: func(ctx context.Context, _ netip.AddrPort) (net.Conn, error) {
			conn, err := net.Dial("tcp", l.Addr().String())
			return &lateConn{Conn: conn, ctx: ctx}, err
		}}, 1<<10)
	if outcome := Classify(err, false); outcome != Timeout {
		t.Errorf("%s: %v", outcome, err)
	}
}
