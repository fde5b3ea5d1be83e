package configs

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"
)

// testCert makes a certificate and returns it in PEM, with its pin.
func testCert(t *testing.T, name string, isCA bool) (pemText, pin string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: isCA, BasicConstraintsValid: true,
		NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<32, 0),
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), caPin(c)
}

// siteWith returns a Site with these further lines, which must identify the CA.
func siteWith(lines ...string) []byte {
	return []byte("apiVersion: edgebake.io/v1alpha1\nkind: Site\nmasters: [10.0.0.1:6443]\ncredentials: {token: abcdef.0123456789abcdef}\n" + strings.Join(lines, "\n") + "\n")
}

func inlineCert(text string) string {
	return "caCert: |\n  " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n  ")
}

func TestSiteCA(t *testing.T) {
	ca, pin := testCert(t, "kubernetes", true)
	next, nextPin := testCert(t, "kubernetes-next", true)
	leaf, _ := testCert(t, "kube-apiserver", false)
	key := string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: []byte("x")}))
	other := "sha256:" + strings.Repeat("ab", 32)
	for _, c := range []struct {
		name  string
		lines []string
		want  string // part of the problem; empty if the Site is valid
		pins  []string
	}{
		{"the CA alone", []string{inlineCert(ca)}, "", []string{pin}},
		{"two", []string{inlineCert(ca + next)}, "", []string{pin, nextPin}},
		{"with its pin", []string{inlineCert(ca), "caCertHashes: ['" + pin + "']"}, "", []string{pin}},
		{"with another's pin", []string{inlineCert(ca), "caCertHashes: ['" + other + "']"}, "does not match caCertHashes (its hash is " + pin, nil},
		{"and no verification", []string{inlineCert(ca), "unsafeSkipCAVerification: true"}, "contradicts caCert", nil},
		{"in a file too", []string{inlineCert(ca), "caFile: ca.crt"}, "either caCert or caFile", nil},
		{"with its key", []string{inlineCert(ca + key)}, "contains a private key", nil},
		{"the server's", []string{inlineCert(leaf)}, `certificate of "kube-apiserver", which is not a CA`, nil},
		{"as a kubeconfig has it", []string{"caCert: " + base64.StdEncoding.EncodeToString([]byte(ca))}, "base64 -d", nil},
		{"a path", []string{"caCert: /etc/kubernetes/pki/ca.crt"}, "no PEM certificate", nil},
		{"damaged", []string{inlineCert(string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")})))}, "damaged", nil},
		{"too much", []string{inlineCert(strings.Repeat(ca, 1+64<<10/len(ca)))}, "about a thousand", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := ParseSite("site.yaml", siteWith(c.lines...))
			if c.want != "" {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Fatalf("%v", err)
				}
				return
			}
			if err != nil || !slices.Equal(s.CAPins(), c.pins) {
				t.Fatalf("%v, %v", s, err)
			}
			slot, err := EncodeSlot(s)
			if err != nil {
				t.Fatal(err)
			}
			if again := mustSite(t, string(slot)); again.CACert != s.CACert {
				t.Errorf("the round trip changed the document:\n%s", again.CACert)
			}
		})
	}
}

// TestCAFileIsForStamping checks that caFile is rejected on a node, where the file does not exist:
// the node must not join a cluster that it cannot verify.
func TestCAFileIsForStamping(t *testing.T) {
	if _, err := ParseSite("site.yaml", siteWith("caFile: ca.crt")); err != nil {
		t.Error(err)
	}
	if _, err := ParsePublicSite("site.yaml", siteWith("caFile: ca.crt")); err == nil || !strings.Contains(err.Error(), "put the certificate itself into caCert") {
		t.Error(err)
	}
}
