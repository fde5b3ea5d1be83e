package kubeapi

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"strings"
	"testing"
	"time"
)

// FuzzObjects reads arbitrary manifests. Each object must be valid JSON with apiVersion, kind and
// name.
func FuzzObjects(f *testing.F) {
	for _, doc := range []string{
		"apiVersion: v1\nkind: Secret\nmetadata: {name: a, namespace: b}\nstringData: {password: x}\n",
		"---\n---\napiVersion: v1\nkind: List\nitems:\n- {apiVersion: apps/v1, kind: Deployment, metadata: {name: a}}\n- {kind: ListList, items: []}\n",
		"apiVersion: v1\nkind: A\nmetadata: {name: &a x}\ndata: {x: *a, y: .nan, 2026-01-01: yes, ? [b] : c}\n",
		"kind: List\nitems: [" + strings.Repeat("{kind: List, items: [", 50) + strings.Repeat("]}", 50) + "]\n",
		"a: [\n", "a: &a [*a]\n", "kind: !!binary aGVsbG8=\n",
	} {
		f.Add([]byte(doc))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		objects, err := Objects("file", text)
		if err != nil && len(objects) > 0 {
			t.Errorf("%d objects and %v", len(objects), err)
		}
		for _, o := range objects {
			if !json.Valid(o.json) || o.kind == "" || o.name == "" || o.apiVersion == "" {
				t.Errorf("%s: %q", o.Where, o.json)
			}
		}
	})
}

// chain makes a CA, an intermediate CA and a leaf certificate, and returns them in PEM.
func chain(f *testing.F) (ca, inter, leaf []byte) {
	f.Helper()
	var parent *x509.Certificate
	var signer *ecdsa.PrivateKey
	var out [][]byte
	for i, name := range []string{"kubernetes", "between", "kube-apiserver"} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			f.Fatal(err)
		}
		c := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: name}, DNSNames: []string{"kubernetes"},
			NotBefore: time.Unix(1e9, 0), NotAfter: time.Unix(9e9, 0), BasicConstraintsValid: true, IsCA: i < 2,
		}
		if parent == nil {
			parent, signer = c, key
		}
		der, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), signer)
		if err != nil {
			f.Fatal(err)
		}
		if parent, err = x509.ParseCertificate(der); err != nil {
			f.Fatal(err)
		}
		signer = key
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	}
	return out[0], out[1], out[2]
}

// FuzzChain reads arbitrary text as a cluster's CAs. Only pinned certificates may be kept, and
// parsing them again must give the same certificates.
func FuzzChain(f *testing.F) {
	ca, inter, leaf := chain(f)
	pins, err := Pins(ca)
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range [][]byte{ca, bytes.Join([][]byte{leaf, inter, ca}, nil), append(ca, ca...), ca[:len(ca)/2],
		[]byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"), []byte(strings.Repeat("-----BEGIN ", 50))} {
		f.Add(seed, pins[0])
	}
	f.Fuzz(func(t *testing.T, text []byte, pin string) {
		certs, err := ParseCerts(text)
		if _, poolErr := Pool(text); (err == nil) != (poolErr == nil) {
			t.Errorf("parsed: %v, in a pool: %v", err, poolErr)
		}
		if err != nil {
			return
		}
		d := Discovery{Pins: []string{pin}}
		kept := d.pinned(certs)
		if len(kept) == 0 {
			return
		}
		again, err := ParseCerts(kept)
		if err != nil {
			t.Fatalf("parsing the shortened kubeconfig: %v", err)
		}
		for _, c := range again {
			if !strings.EqualFold(Pin(c), strings.TrimSpace(pin)) {
				t.Errorf("%s was kept, pinned is %s", Pin(c), pin)
			}
		}
		if twice := d.pinned(again); !bytes.Equal(twice, kept) {
			t.Errorf("kept %q, then %q", kept, twice)
		}
	})
}
