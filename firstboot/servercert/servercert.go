// Package servercert distinguishes an API server's certificate from a node's. CA and name do not:
// the cluster's CA signs kubelets' and yurthubs' certificates too, and a yurthub's has the name
// kubernetes, like that of every kubeadm API server.
//
// It also has the cache of TLS sessions that first boot and ipvscare use with API servers.
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
// nodes requires this common name and this organization.
func Check(leaf *x509.Certificate) error {
	if strings.HasPrefix(leaf.Subject.CommonName, NodeUser) || slices.Contains(leaf.Subject.Organization, NodesGroup) {
		return fmt.Errorf("%w: its subject is %s", ErrNode, printable.Short(leaf.Subject.String(), 100))
	}
	return nil
}
