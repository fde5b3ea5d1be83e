package api

import (
	"crypto/tls"
	"encoding/pem"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestLongChain: whoever answers at an API server's address decides what it sends.
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
		_, err := ServerName(t.Context(), new(net.Dialer).DialContext, s.Listener.Addr().String(), ca, []string{"example.com"})
		s.Close()
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) || errors.Is(err, ErrServerName) {
			t.Errorf("%d certificates: %v", n, err)
		}
	}
}
