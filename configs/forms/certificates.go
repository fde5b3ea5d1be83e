package forms

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"

	"github.com/edgebake/edgebake/configs/strict"
)

// maxCA is the largest accepted size of caCert in bytes, enough for a few certificates.
const maxCA = 64 << 10

// ParsePrivateKey parses a PEM private key and returns its public key. Its errors never quote the
// key.
func ParsePrivateKey(text string) (interface{ Equal(crypto.PublicKey) bool }, error) {
	b, rest := pem.Decode([]byte(text))
	if b == nil {
		return nil, errors.New("is not a private key in PEM (-----BEGIN … PRIVATE KEY-----)")
	}
	if len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("has more text after the private key: give only the key")
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
		return nil, fmt.Errorf("is a %s, not an unencrypted private key", strings.ToLower(strict.Shorten(b.Type)))
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

// ParseCA parses the PEM certificates of a cluster's CA.
func ParseCA(text string) ([]*x509.Certificate, error) {
	certs, err := ParseCertificates(text)
	for _, c := range certs {
		if !c.IsCA || !c.BasicConstraintsValid {
			return nil, fmt.Errorf("contains the certificate of %q, which is not a CA; use /etc/kubernetes/pki/ca.crt of a control-plane node", strict.Shorten(c.Subject.CommonName))
		}
	}
	return certs, err
}

// CheckCertificates returns an error unless text consists of PEM certificates.
func CheckCertificates(text string) error {
	_, err := ParseCertificates(text)
	return err
}

// ParseCertificates parses PEM certificates. It rejects all other content: a private key in a Site
// would be copied to every machine.
func ParseCertificates(text string) ([]*x509.Certificate, error) {
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
			return nil, fmt.Errorf("contains a %s, expected only certificates", strings.ToLower(strict.Shorten(b.Type)))
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
