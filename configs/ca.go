package configs

import (
	"bytes"
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// maxCA bounds caCert: a few certificates, and no more.
const maxCA = 64 << 10

// CAPins are the hashes that the cluster's CA must have one of: caCertHashes,
// and those of the certificates in caCert. None: whatever answers is joined.
func (s *Site) CAPins() []string {
	pins := slices.Clone(s.CACertHashes)
	certs, _ := parseCA(s.CACert) // a valid Site has good ones, or none
	for _, c := range certs {
		if pin := caPin(c); !slices.ContainsFunc(pins, func(p string) bool { return strings.EqualFold(p, pin) }) {
			pins = append(pins, pin)
		}
	}
	return pins
}

func caPin(c *x509.Certificate) string {
	sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// validateCA checks caCert and caFile. On a node, not at a desk, nobody puts a
// file into caCert any more.
func (s *Site) validateCA(atDesk bool, probs *Problems) {
	switch {
	case s.CACert != "" && s.CAFile != "":
		probs.add("caCert", "give either caCert or caFile, not both")
	case s.CAFile != "" && !atDesk:
		probs.add("caFile", "is read by `edgebake stamp` only; on a stick or in the slot put the certificate itself into caCert")
	}
	if s.CACert == "" {
		return
	}
	certs, err := parseCA(s.CACert)
	if err != nil {
		probs.add("caCert", "%v", err)
		return
	}
	pinned := func(c *x509.Certificate) bool {
		return slices.ContainsFunc(s.CACertHashes, func(p string) bool { return strings.EqualFold(p, caPin(c)) })
	}
	if len(s.CACertHashes) > 0 && !slices.ContainsFunc(certs, pinned) {
		probs.add("caCert", "has none of caCertHashes (it is %s): the two are of different clusters; keep the one of yours", caPin(certs[0]))
	}
}

// parsePrivateKey reads a private key, PEM, and returns its public one. No error
// quotes any of it.
func parsePrivateKey(text string) (interface{ Equal(crypto.PublicKey) bool }, error) {
	b, rest := pem.Decode([]byte(text))
	if b == nil {
		return nil, errors.New("is not a private key in PEM (-----BEGIN … PRIVATE KEY-----)")
	}
	if len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("has more behind the private key: give the key alone")
	}
	var key any
	var err error
	switch b.Type {
	case "EC PRIVATE KEY":
		key, err = x509.ParseECPrivateKey(b.Bytes)
	case "RSA PRIVATE KEY":
		key, err = x509.ParsePKCS1PrivateKey(b.Bytes)
	case "PRIVATE KEY":
		key, err = x509.ParsePKCS8PrivateKey(b.Bytes)
	default:
		return nil, fmt.Errorf("is a %s, not a private key in clear", strings.ToLower(shorten(b.Type)))
	}
	if err != nil {
		return nil, errors.New("is a damaged private key")
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, errors.New("is a private key that cannot sign")
	}
	public, ok := signer.Public().(interface{ Equal(crypto.PublicKey) bool })
	if !ok {
		return nil, errors.New("is a private key of an unknown kind")
	}
	return public, nil
}

// parseCA reads the certificates of a cluster's CA.
func parseCA(text string) ([]*x509.Certificate, error) {
	certs, err := parseCertificates(text)
	for _, c := range certs {
		if !c.IsCA || !c.BasicConstraintsValid {
			return nil, fmt.Errorf("contains the certificate of %q, which is not a CA; it is /etc/kubernetes/pki/ca.crt of a control-plane node", shorten(c.Subject.CommonName))
		}
	}
	return certs, err
}

// CheckCertificates rejects a text that is not certificates in PEM and nothing else.
func CheckCertificates(text string) error {
	_, err := parseCertificates(text)
	return err
}

// parseCertificates reads certificates and nothing else: a private key in a
// Site is a slip with consequences.
func parseCertificates(text string) ([]*x509.Certificate, error) {
	if len(text) > maxCA {
		return nil, fmt.Errorf("has %d bytes; a CA certificate has about a thousand", len(text))
	}
	var certs []*x509.Certificate
	for rest := []byte(text); ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			break
		}
		if strings.Contains(b.Type, "PRIVATE KEY") {
			return nil, errors.New("contains a private key, which must never leave the control plane: give the certificate alone (ca.crt, not ca.key)")
		}
		if b.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("contains a %s, expected only certificates", strings.ToLower(shorten(b.Type)))
		}
		c, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			return nil, fmt.Errorf("contains a damaged certificate: %w", err)
		}
		certs = append(certs, c)
	}
	if len(certs) > 0 {
		return certs, nil
	}
	if raw, err := base64.StdEncoding.DecodeString(strings.Join(strings.Fields(text), "")); err == nil && bytes.Contains(raw, []byte("-----BEGIN")) {
		return nil, errors.New("is base64 as in a kubeconfig (certificate-authority-data); decode it first: base64 -d")
	}
	return nil, errors.New("contains no PEM certificate (-----BEGIN CERTIFICATE-----)")
}
