// Package servercert distinguishes an API server's certificate from a node's. The CA and the DNS
// name are not sufficient: the cluster's CA also signs the certificates of kubelet and yurthub, and
// yurthub's certificate contains the DNS name kubernetes, as every kubeadm API server's does.
//
// The package also contains the cache of TLS sessions that first boot and ipvscare use with API
// servers.
package servercert

import (
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/printable"
)

// ErrNode means that the certificate belongs to a node, not to an API server.
var ErrNode = errors.New("the certificate is a node's, not an API server's")

// A kubelet's user name is NodeUser followed by the name of its Node; its group is NodesGroup.
const (
	NodeUser   = "system:node:"
	NodesGroup = "system:nodes"
)

// Check rejects a leaf certificate that belongs to a node. Every signer that issues certificates to
// nodes requires NodeUser as the common name's prefix and the organization NodesGroup.
func Check(leaf *x509.Certificate) error {
	if strings.HasPrefix(leaf.Subject.CommonName, NodeUser) || slices.Contains(leaf.Subject.Organization, NodesGroup) {
		return fmt.Errorf("%w: its subject is %s", ErrNode, printable.Short(leaf.Subject.String(), 100))
	}
	return nil
}
