// Package servercert tells an API server's certificate from a node's. The cluster's CA
// signs both: a kubelet's serving certificate is for its host, and that of a yurthub on
// an OpenYurt node is for the name kubernetes, which every API server of kubeadm has.
// So a name and the CA do not make an API server.
package servercert

import (
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/printable"
)

// ErrNode means that the certificate belongs to a node.
var ErrNode = errors.New("the certificate is a node's, not an API server's")

// Check rejects the leaf certificate of a node. Every signer that issues certificates
// to nodes requires this common name and this organization.
func Check(leaf *x509.Certificate) error {
	if strings.HasPrefix(leaf.Subject.CommonName, "system:node:") || slices.Contains(leaf.Subject.Organization, "system:nodes") {
		return fmt.Errorf("%w: it is of %s", ErrNode, printable.Short(leaf.Subject.String(), 100))
	}
	return nil
}
