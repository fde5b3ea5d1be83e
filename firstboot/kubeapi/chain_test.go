package kubeapi

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// TestLongChain checks that an unverified server that sends too many certificates is rejected.
func TestLongChain(t *testing.T) {
	for n, want := range map[int]string{maxChain: "", maxChain + 1: "it sends 9 certificates"} {
		s := httptest.NewUnstartedServer(http.NotFoundHandler())
		s.StartTLS()
		cert := s.TLS.Certificates[0]
		s.Close()
		s = httptest.NewUnstartedServer(http.NotFoundHandler())
		long := cert
		for len(long.Certificate) < n {
			long.Certificate = append(long.Certificate[:len(long.Certificate):len(long.Certificate)], cert.Certificate[0])
		}
		s.TLS = &tls.Config{Certificates: []tls.Certificate{long}}
		s.StartTLS()
		ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]})
		_, err := Dialer{Dial: new(net.Dialer).DialContext}.ServerName(t.Context(), s.Listener.Addr().String(), ca, []string{"example.com"})
		s.Close()
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) || errors.Is(err, ErrServerName) {
			t.Errorf("%d certificates: %v", n, err)
		}
	}
}

// TestEarlyCertificates checks which certificates prove that their start has passed: those signed
// with the CA's key, and self-signed CAs.
func TestEarlyCertificates(t *testing.T) {
	day := func(n int) time.Time { return time.Date(2026, 11, n, 0, 0, 0, 0, time.UTC) }
	newKey := func() *ecdsa.PrivateKey {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	key, stranger, leafKey := newKey(), newKey(), newKey()
	sign := func(tmpl, parent *x509.Certificate, public any, by *ecdsa.PrivateKey) []byte {
		der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, public, by)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	ca := func(from time.Time, by *ecdsa.PrivateKey) []byte {
		tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotBefore: from, NotAfter: from.AddDate(10, 0, 0),
			IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, SubjectKeyId: []byte{1}}
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: sign(tmpl, tmpl, key.Public(), by)})
	}
	for name, tt := range map[string]struct {
		now, leaf time.Time
		by        *ecdsa.PrivateKey
		ca        []byte
		want      time.Time // zero: no proof
		ok        bool
	}{
		"valid":                       {day(20), day(10), key, ca(day(1), key), time.Time{}, true},
		"a leaf is early":             {day(5), day(10), key, ca(day(1), key), day(10), false},
		"it and its CA are early":     {time.Unix(0, 0), day(10), key, ca(day(1), key), day(10), false},
		"a CA that was issued again":  {day(12), day(10), key, ca(day(15), key), day(15), false},
		"a CA that a stranger dated":  {day(5), day(10), key, ca(day(25), stranger), time.Time{}, false},
		"a leaf of a stranger":        {day(5), day(10), stranger, ca(day(1), key), time.Time{}, false},
		"a leaf that has expired":     {day(30), day(10), key, ca(day(1), key), time.Time{}, false},
		"the stranger's, not yet due": {day(12), day(10), key, ca(day(25), stranger), time.Time{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			tmpl := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "kube-apiserver"}, NotBefore: tt.leaf, NotAfter: day(28),
				DNSNames: []string{SharedName}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
			parent := &x509.Certificate{Subject: pkix.Name{CommonName: "kubernetes"}, SubjectKeyId: []byte{1}}
			s := httptest.NewUnstartedServer(http.NotFoundHandler())
			s.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{sign(tmpl, parent, leafKey.Public(), tt.by)}, PrivateKey: leafKey}}}
			s.StartTLS()
			defer s.Close()
			_, err := Dialer{Dial: new(net.Dialer).DialContext, Now: func() time.Time { return tt.now }}.ServerName(t.Context(), s.Listener.Addr().String(), tt.ca, []string{SharedName})
			var from time.Time
			if early := (*EarlyError)(nil); errors.As(err, &early) {
				from = early.From
			}
			if (err == nil) != tt.ok || !from.Equal(tt.want) {
				t.Errorf("%v: it shows %s, want %s", err, from, tt.want)
			}
		})
	}
}
