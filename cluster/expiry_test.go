package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// TestExpiryChecks checks that the CA is reported in its last two years, and the operator's
// certificate in its last 60 days.
func TestExpiryChecks(t *testing.T) {
	now := time.Date(2026, 11, 26, 0, 0, 0, 0, time.UTC)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
	cert := func(end time.Time) []byte {
		tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotBefore: now.AddDate(-9, 0, 0), NotAfter: end, IsCA: true, BasicConstraintsValid: true}
		der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	for name, tt := range map[string]struct {
		ca, admin time.Time
		want      string // names of the certificates that expire soon
	}{
		"new":          {now.AddDate(10, 0, 0), now.AddDate(1, 0, 0), ""},
		"year seven":   {now.AddDate(3, 0, 0), now.AddDate(0, 6, 0), ""},
		"year eight":   {now.AddDate(1, 11, 0), now.AddDate(0, 6, 0), "the cluster's CA"},
		"the operator": {now.AddDate(5, 0, 0), now.AddDate(0, 1, 0), "the certificate of this kubeconfig"},
		"over":         {now.AddDate(0, 0, -1), now.AddDate(0, 0, -1), "the cluster's CA, the certificate of this kubeconfig"},
	} {
		t.Run(name, func(t *testing.T) {
			kubeconfig := "apiVersion: v1\nkind: Config\nclusters:\n- name: ''\n  cluster: {server: https://192.0.2.1:6443, certificate-authority-data: " + base64.StdEncoding.EncodeToString(cert(tt.ca)) + "}\n"
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				if err := json.NewEncoder(w).Encode(map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]string{"name": "cluster-info"},
					"data": map[string]string{"kubeconfig": kubeconfig}}); err != nil {
					t.Error(err)
				}
			}))
			defer server.Close()
			c, err := newClient(&rest.Config{Host: server.URL})
			if err != nil {
				t.Fatal(err)
			}
			c.config.CertData, c.config.KeyData = cert(tt.admin), keyPEM
			checks, err := c.ExpiryChecks(t.Context(), now)
			if err != nil {
				t.Fatal(err)
			}
			var ends []string
			for _, check := range checks {
				if (check.State == CheckFailed) != (check.Fix != "") || check.Detail == "" {
					t.Errorf("%+v", check)
				}
				if check.State == CheckFailed {
					ends = append(ends, check.Name)
				}
			}
			if got := strings.Join(ends, ", "); got != tt.want || len(checks) != 2 {
				t.Errorf("%q end, want %q of %+v", got, tt.want, checks)
			}
		})
	}
}
