package probe

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/firstboot/servercert"
)

// Skew describes a certificate that is correct except for its validity period.
type Skew struct {
	off      bool // not valid according to this node's clock
	early    bool // because it is not valid yet
	notAfter time.Time
}

// Roots are the CAs of the cluster.
type Roots struct {
	Pool  *x509.CertPool
	Certs []*x509.Certificate
}

// An API server sends few certificates: its own, and some more if the cluster's CA is an
// intermediate one. The sender is not verified yet, and each certificate costs signature checks
// that no deadline interrupts, so both are limited.
const (
	maxChain      = 8
	maxChainBytes = 64 << 10
)

// verify checks a chain for server authentication and for one of the names. If only the validity
// period is wrong, verify returns the skew and no error.
func (r *Roots) verify(ctx context.Context, chain []*x509.Certificate, names []string, now time.Time) (Skew, error) {
	if len(chain) == 0 {
		return Skew{}, errors.New("no certificate")
	}
	size := 0
	for _, c := range chain {
		size += len(c.Raw)
	}
	if len(chain) > maxChain || size > maxChainBytes {
		return Skew{}, fmt.Errorf("it sends %d certificates with %d bytes: at most %d with %d are accepted", len(chain), size, maxChain, maxChainBytes)
	}
	leaf := chain[0]
	opts := x509.VerifyOptions{Roots: r.Pool, Intermediates: x509.NewCertPool(), CurrentTime: now,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	for _, c := range chain[1:] {
		opts.Intermediates.AddCert(c)
	}
	if err := servercert.Check(leaf); err != nil {
		return Skew{}, err
	}
	named := slices.ContainsFunc(names, func(n string) bool { return n != "" && leaf.VerifyHostname(n) == nil })
	if !named {
		return Skew{}, fmt.Errorf("its certificate is for %s: it must match one of %s",
			printable.Names(slices.Concat(leaf.DNSNames, addresses(leaf.IPAddresses))), strings.Join(names, " "))
	}
	_, err := leaf.Verify(opts)
	var invalid x509.CertificateInvalidError
	if err == nil {
		return Skew{}, nil
	}
	if !errors.As(err, &invalid) || invalid.Reason != x509.Expired {
		return Skew{}, &certificateError{err}
	}
	// Find a time at which the whole chain was valid. It is sufficient to try the limits of the
	// validity periods, but not those of intermediate certificates: the peer may send any number of
	// them.
	moments := []time.Time{leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) / 2), leaf.NotBefore, leaf.NotAfter}
	for _, c := range r.Certs {
		moments = append(moments, c.NotBefore, c.NotAfter)
	}
	for _, m := range moments {
		if ctx.Err() != nil {
			return Skew{}, ctx.Err()
		}
		if m.Before(leaf.NotBefore) || m.After(leaf.NotAfter) {
			continue
		}
		opts.CurrentTime = m
		if _, verr := leaf.Verify(opts); verr == nil {
			return Skew{off: true, early: now.Before(leaf.NotBefore), notAfter: leaf.NotAfter}, nil
		}
	}
	return Skew{}, &certificateError{err}
}

// certificateError is an error that quotes a certificate from an unverified
// peer.
type certificateError struct{ err error }

func (e *certificateError) Error() string { return printable.Short(e.err.Error(), 300) }
func (e *certificateError) Unwrap() error { return e.err }

func addresses(ips []net.IP) []string {
	var s []string
	for _, ip := range ips {
		s = append(s, ip.String())
	}
	return s
}

// ParseRoots parses a PEM file of CA certificates.
func ParseRoots(name string, pemData []byte) (*Roots, error) {
	r := &Roots{Pool: x509.NewCertPool()}
	certs, err := parseCertificates(pemData)
	if err != nil {
		return nil, fmt.Errorf("reading CA file %s: %w", name, err)
	}
	for i, c := range certs {
		if !c.IsCA {
			return nil, fmt.Errorf("reading CA file %s: certificate %d (%s) is not a CA: use the cluster's ca.crt", name, i+1, c.Subject)
		}
		r.Pool.AddCert(c)
	}
	r.Certs = certs
	return r, nil
}

func parseCertificates(data []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		certs = append(certs, c)
	}
	if bytes.Contains(data, []byte("-----BEGIN")) {
		return nil, errors.New("its last PEM block is truncated: use the cluster's ca.crt")
	}
	if len(certs) == 0 {
		return nil, errors.New("it contains no PEM certificate: use the cluster's ca.crt")
	}
	return certs, nil
}
