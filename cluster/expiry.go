package cluster

import (
	"context"
	"crypto/tls"
	"fmt"
	"time"

	"k8s.io/client-go/rest"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
)

// adminWarning is the remaining validity at which the certificates in the operator's kubeconfig are
// reported.
const adminWarning = 60 * 24 * time.Hour

// ExpiryChecks checks when the cluster's CA and the operator's kubeconfig expire. Machines do not
// report these dates.
func (c *Client) ExpiryChecks(ctx context.Context, now time.Time) ([]Check, error) {
	var out []Check
	add := func(name string, end time.Time, before time.Duration, fix string) {
		check := Check{Name: name, State: CheckOK, Detail: "it is valid until " + end.UTC().Format(time.DateOnly)}
		if now.Add(before).After(end) {
			check.State, check.Fix = CheckFailed, fix
		}
		out = append(out, check)
	}
	const again = "run `edgebake cluster new` with the Cluster document"
	if info, err := c.clusterInfo(ctx); err == nil { // Verify reports the error of clusterInfo
		end, err := kubeapi.FirstExpiry(info.ca)
		if err != nil {
			return nil, err
		}
		add("the cluster's CA", end, kubeapi.CAWarning, again+" to issue it again with the same key; then stamp the Sites of the control-plane nodes, and restart these one by one. For a cluster that edgebake did not make, see kubeadm's documentation")
	}
	config := rest.CopyConfig(c.config)
	if err := rest.LoadTLSFiles(config); err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	const name = "the certificate of this kubeconfig"
	if len(config.CertData) > 0 {
		pair, err := tls.X509KeyPair(config.CertData, config.KeyData)
		if err != nil {
			return nil, fmt.Errorf("reading the kubeconfig: its client certificate: %w", err)
		}
		add(name, pair.Leaf.NotAfter, adminWarning, again+" to make a new admin.conf")
	}
	if end, err := kubeapi.FirstExpiry(config.CAData); err == nil && now.Add(adminWarning).After(end) {
		add("the CA in this kubeconfig", end, adminWarning, again+" to make a new admin.conf")
	}
	return out, nil
}
