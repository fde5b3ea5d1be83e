package configs

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/forms"
)

// CAPins returns the hashes of the accepted cluster CAs: those in caCertHashes, and those of the
// certificates in caCert. If there are none, the node joins any cluster.
func (s *Site) CAPins() []string {
	pins := slices.Clone(s.CACertHashes)
	certs, _ := forms.ParseCA(s.CACert) // in a valid Site, caCert is empty or valid
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

// validateCA validates caCert and caFile. atDesk means that the edgebake command validates the
// Site: no other program reads caFile.
func (s *Site) validateCA(atDesk bool, probs *Problems) {
	switch {
	case s.CACert != "" && s.CAFile != "":
		probs.Add("caCert", "give either caCert or caFile, not both")
	case s.CAFile != "" && !atDesk:
		probs.Add("caFile", "is read by `edgebake stamp` only; on a stick or in the slot put the certificate itself into caCert")
	}
	if s.CACert == "" {
		return
	}
	certs, err := forms.ParseCA(s.CACert)
	if err != nil {
		probs.Add("caCert", "%v", err)
		return
	}
	pinned := func(c *x509.Certificate) bool {
		return slices.ContainsFunc(s.CACertHashes, func(p string) bool { return strings.EqualFold(p, caPin(c)) })
	}
	if len(s.CACertHashes) > 0 && !slices.ContainsFunc(certs, pinned) {
		probs.Add("caCert", "does not match caCertHashes (its hash is %s): the certificate and the hashes belong to different clusters; keep the one of your cluster", caPin(certs[0]))
	}
}
