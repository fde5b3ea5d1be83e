package firstboot

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
)

// discoveryOf is how a site finds its cluster.
func discoveryOf(e *Env, site *configs.Site) api.Discovery {
	return api.Discovery{
		Masters: mastersOf(e, site), Token: site.Credentials.Token.Reveal(),
		Pins: site.CACertHashes, SkipPins: site.UnsafeSkipCAVerification, CA: []byte(site.CACert),
		Names: []string{api.SharedName, site.Endpoint}, Dial: e.Dial, Timeout: 10 * time.Second,
	}
}

// discoveryPhase finds the cluster and makes sure that it is the right one.
func discoveryPhase(active *Active) Phase {
	site := active.Site
	return Phase{
		Name: "discovery", Doc: "the cluster is found, and is the pinned one", Timeout: time.Minute,
		Check: func(ctx context.Context, e *Env) (Verdict, error) {
			err := enrolled(e)
			if err == nil || discovered(e, site) {
				return Done, nil
			}
			if site.Credentials.Token.IsZero() {
				if errors.Is(err, errExpired) {
					if err = judgeExpired(ctx, e); err == nil {
						return Done, nil
					}
					return Todo, err
				}
				return Todo, Permanent(fmt.Errorf("%w, and the Site has no bootstrap token", err),
					"put a token into site.yaml (`kubeadm token create`), in the slot or on a stick")
			}
			return Todo, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			d := discoveryOf(e, site)
			e.Waiting("an API server to show its cluster-info (%s)", strings.Join(d.Masters, ", "))
			found, err := api.Discover(ctx, d)
			if err != nil {
				return judgeDiscovery(ctx, e, d.Masters, err)
			}
			if err := nameIsFree(ctx, e, found.Client(d), active.Node); err != nil {
				return err
			}
			if _, err := e.write(ondisk.KubeCA, found.CA, Mode(0o644)); err != nil {
				return fmt.Errorf("writing the cluster's CA: %w", err)
			}
			if slices.Contains(site.Masters, found.Master) {
				if err := keepMasters(e, site, found.CA); err != nil {
					return err
				}
			}
			if err := setEndpointHosts(ctx, e, site, found.Master); err != nil {
				return err
			}
			server, name := "https://"+found.Master, found.ServerName
			if everyAPIServerIsNamed(ctx, e, d.Masters, found.CA, site.Endpoint) && endpointAnswers(ctx, e, site) == nil {
				// The join itself survives a dead API server then, and kubelet need not be
				// turned and restarted afterwards.
				server, name = site.EndpointURL(), ""
			}
			conf, err := api.NewKubeconfig(api.Cluster{
				Server: server, TLSServerName: name,
				CAData: base64.StdEncoding.EncodeToString(found.CA),
			}, api.User{Token: site.Credentials.Token.Reveal()})
			if err != nil {
				return err
			}
			if err := e.WriteFile(discoveryFile, conf, Mode(0o600)); err != nil {
				return fmt.Errorf("writing the discovery file: %w", err)
			}
			return nil
		},
	}
}

// judgeDiscovery tells transient failures from those that a person must fix. One
// address that belongs to another cluster may be a slip of the pen while the
// right API servers are out of reach for now: it stops the run only when all do.
func judgeDiscovery(ctx context.Context, e *Env, masters []string, err error) error {
	var expired x509.CertificateInvalidError
	switch {
	case errors.Is(err, api.ErrPin) && !everyErrorIs(err, api.ErrPin):
		return Advise(err, "an address in masters belongs to another cluster: correct it; the others do not answer")
	case errors.Is(err, api.ErrPin):
		return Permanent(err, "compare caCertHashes in site.yaml with the cluster's (`kubeadm token create --print-join-command` shows it), and the API servers' addresses")
	case errors.Is(err, api.ErrCA) && !everyErrorIs(err, api.ErrCA):
		return Advise(err, "an address in masters belongs to another cluster: correct it; the others do not answer")
	case errors.Is(err, api.ErrCA):
		return Permanent(err, "compare caCert in site.yaml with /etc/kubernetes/pki/ca.crt of a control-plane node, and check the API servers' addresses")
	case errors.Is(err, api.ErrToken), errors.Is(err, api.ErrSignature):
		return Permanent(err, "make a new token (`kubeadm token create`) and put it into site.yaml")
	case errors.Is(err, api.ErrServerName):
		return Permanent(err, "add the endpoint or the API servers' addresses to the API servers' certSANs, or correct endpoint and masters in site.yaml")
	case errors.As(err, &expired) && expired.Reason == x509.Expired:
		waitForNTP(ctx, e)
		return Advise(fmt.Errorf("%w (this machine's clock says %s)", err, e.Now().UTC().Format(time.RFC3339)),
			"if the clock is wrong, name a reachable time server in the Site (network.ntp); if it is right, renew the API servers' certificates")
	case errors.Is(err, api.ErrUnsigned):
		return Advise(err, "the controller manager's bootstrapsigner signs it within seconds; the token must be allowed to sign (usage \"signing\")")
	case errors.Is(err, api.ErrAnonymous):
		// --anonymous-auth=false, or an AuthenticationConfiguration that allows
		// anonymous requests to the health paths only.
		return Advise(err, "give the Site the cluster's CA (caFile: ca.crt when stamping, or caCert in site.yaml; it is /etc/kubernetes/pki/ca.crt of a control-plane node): then nothing is asked anonymously; or allow anonymous requests of /api/v1/namespaces/kube-public/configmaps/cluster-info in the API servers' AuthenticationConfiguration")
	case errors.Is(err, api.ErrNoClusterInfo):
		return Advise(err, "let the cluster publish it: kubeadm init phase bootstrap-token")
	}
	return Advise(err, "check that these are the cluster's API servers ("+strings.Join(masters, ", ")+") and that port and firewall let this node through")
}

// everyErrorIs reports whether all the errors joined in err are target.
func everyErrorIs(err, target error) bool {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return errors.Is(err, target)
	}
	for _, e := range joined.Unwrap() {
		if !errors.Is(e, target) {
			return false
		}
	}
	return true
}

// nameIsFree looks, where the token's rights allow, whether the cluster has a
// Node of our name already.
func nameIsFree(ctx context.Context, e *Env, c *api.Client, name string) error {
	n, err := c.GetNode(ctx, name)
	if err != nil {
		return nil // there is none, or the token may not read nodes; kubeadm looks again
	}
	ready, _ := n.Ready()
	ours := n.Status.NodeInfo.MachineID != "" && n.Status.NodeInfo.MachineID == machineID(e)
	if uuid := e.facts().UUID; uuid != "" && strings.EqualFold(uuid, n.Status.NodeInfo.SystemUUID) {
		ours = true
	}
	fix := otherName(name)
	switch {
	case ready && ours:
		return Advise(fmt.Errorf("the cluster still shows this machine's own Node %s as Ready; it turns NotReady within a minute", name), fix)
	case ready:
		return Permanent(fmt.Errorf("the node name %s is taken: the cluster has a Node of that name, and it is Ready", name), fix)
	}
	e.Log.Warn("the cluster has a stale Node of this name, which keeps its old labels and taints", "node", name, "fix", fix)
	e.Console(fmt.Sprintf("the cluster has a stale Node %s, which keeps its old labels and taints: %s", name, fix))
	return nil
}

// otherName is the fix of a name that the cluster knows already.
func otherName(name string) string {
	return fmt.Sprintf("if the old machine is gone: kubectl delete node %s; else give this one another nodeName in site.yaml", name)
}
