package kubeapi

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"slices"
	"time"
)

// CAWarning is the remaining validity at which a CA, valid for ten years, is reported and reissued.
// Two years give machines that are seldom restarted time to get the new certificate.
const CAWarning = 2 * 365 * 24 * time.Hour

// Reissued returns cas (PEM), with each certificate replaced by one in offered that has the same
// key and expires later. It returns nil if there is none. offered may come from an unverified
// server, because a CA signs its own certificate.
func Reissued(cas, offered []byte, now time.Time) []byte {
	have, err := ParseCerts(cas)
	if err != nil {
		return nil
	}
	others, err := ParseCerts(offered)
	if err != nil {
		return nil
	}
	var out []byte
	changed := false
	for _, ca := range have {
		for _, o := range others {
			if isReissued(ca, o) && !now.Before(o.NotBefore) {
				ca, changed = o, true
			}
		}
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Raw})...)
	}
	if !changed {
		return nil
	}
	return out
}

// Supersedes reports whether offered (PEM) has a CA with the same key as one of cas and a later
// expiry. It does not use the clock.
func Supersedes(offered, cas []byte) bool {
	have, err := ParseCerts(cas)
	if err != nil {
		return false
	}
	others, err := ParseCerts(offered)
	return err == nil && slices.ContainsFunc(have, func(ca *x509.Certificate) bool {
		return slices.ContainsFunc(others, func(o *x509.Certificate) bool { return isReissued(ca, o) })
	})
}

func isReissued(ca, next *x509.Certificate) bool {
	return next.IsCA && next.NotAfter.After(ca.NotAfter) && next.CheckSignatureFrom(next) == nil &&
		bytes.Equal(ca.RawSubjectPublicKeyInfo, next.RawSubjectPublicKeyInfo) &&
		bytes.Equal(ca.RawSubject, next.RawSubject) && bytes.Equal(ca.SubjectKeyId, next.SubjectKeyId)
}

// FirstExpiry returns when the first of the CAs (PEM) expires.
func FirstExpiry(cas []byte) (time.Time, error) {
	certs, err := ParseCerts(cas)
	if err != nil {
		return time.Time{}, err
	}
	first := certs[0].NotAfter
	for _, c := range certs {
		if c.NotAfter.Before(first) {
			first = c.NotAfter
		}
	}
	return first, nil
}

// PublishedCA returns the CA in the cluster-info of an API server, without verifying it.
func PublishedCA(ctx context.Context, dial DialFunc, master string) ([]byte, error) {
	var cm struct {
		Data map[string]string `json:"data"`
	}
	unverified := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}
	if err := get(ctx, dial, unverified, "https://"+master, clusterInfoPath, "", &cm); err != nil {
		return nil, err
	}
	return clusterCA([]byte(cm.Data[kubeconfigKey]))
}
