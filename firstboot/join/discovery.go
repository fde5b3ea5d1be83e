package join

import (
	"cmp"
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// DiscoveryOf returns the parameters with which the Site's cluster is discovered.
func DiscoveryOf(e *machine.Env, active *site.Active) kubeapi.Discovery {
	s := active.Site
	return kubeapi.Discovery{
		Node:    active.Node,
		Masters: member.MastersOf(e, s), Token: s.Credentials.Token.Reveal(),
		Pins: s.CACertHashes, SkipPins: s.UnsafeSkipCAVerification, CA: []byte(s.CACert),
		Names: []string{s.Endpoint, kubeapi.SharedName}, Dialer: e.APIDialer(), Timeout: 10 * time.Second,
	}
}

// DiscoveryPhase finds the cluster, and verifies that it is the Site's.
func DiscoveryPhase(active *site.Active) run.Phase {
	return run.Phase{
		Name: "discovery", Doc: "the cluster is found, and has the CA that the Site pins", Timeout: time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			err := member.Enrolled(e)
			if err == nil || member.Discovered(e, active.Site) {
				return run.Done, nil
			}
			if active.Site.Credentials.Token.IsZero() {
				if member.OutOfTime(err) {
					if err = network.JudgeOutOfTime(ctx, e); err == nil {
						return run.Done, nil
					}
					return run.Todo, err
				}
				return run.Todo, run.NeedsPerson(fmt.Errorf("%w, and the Site has no bootstrap token", err),
					"put a token into site.yaml (`kubeadm token create`), in the slot or on a stick")
			}
			return run.Todo, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			d := OwnDiscovery(e, active)
			e.Waiting("an API server of the Site's cluster (%s)", strings.Join(d.Masters, ", "))
			found, err := FindCluster(ctx, e, d)
			if err != nil {
				return err
			}
			if err := NameIsFree(e, found.Node, active.Node); err != nil {
				return err
			}
			if _, err := e.Write(ondisk.KubeCA, found.CA, machine.Mode(0o644)); err != nil {
				return fmt.Errorf("writing the cluster's CA: %w", err)
			}
			if slices.Contains(active.Site.Masters, found.Master) {
				if err := member.SaveMasters(e, active.Site, found.CA); err != nil {
					return err
				}
			}
			if err := setEndpointHosts(ctx, e, active.Site, found.Master); err != nil {
				return err
			}
			server, name := "https://"+found.Master, found.ServerName
			if member.EveryAPIServerIsNamed(ctx, e, d.Masters, found.CA, active.Site.Endpoint) && endpointAnswers(ctx, e, active.Site) == nil {
				// Through the endpoint, the join also works if an API server fails, and kubelet need
				// not be redirected and restarted afterwards.
				server, name = active.Site.EndpointURL(), ""
			}
			conf, err := kubeapi.NewKubeconfig(kubeapi.Cluster{
				Server: server, TLSServerName: name,
				CAData: base64.StdEncoding.EncodeToString(found.CA),
			}, kubeapi.User{Token: active.Site.Credentials.Token.Reveal()})
			if err != nil {
				return err
			}
			if err := e.WriteFile(member.DiscoveryFile, conf, machine.Mode(0o600)); err != nil {
				return fmt.Errorf("writing the discovery file: %w", err)
			}
			return nil
		},
	}
}

// OwnDiscovery is like DiscoveryOf, but a member that joins again finds only the cluster that it is
// a member of, even if its Site has no pins.
func OwnDiscovery(e *machine.Env, active *site.Active) kubeapi.Discovery {
	d := DiscoveryOf(e, active)
	if len(d.CA) > 0 {
		return d
	}
	// A machine whose join failed is not a member, but its record has the pins of that cluster. If
	// the Site now names another cluster, ownPins returns none of them.
	if own := ownPins(e, active.Site); member.HasCredentials(e) || len(own) > 0 {
		d.Pins, d.SkipPins = own, false
	}
	return d
}

// ownPins returns the CA pins of the machine's current or last cluster. If the Site has pins, it
// returns only those that the Site has too.
func ownPins(e *machine.Env, site *configs.Site) []string {
	own := member.Pins(e)
	if member.Unpinned(site) {
		return own
	}
	return slices.DeleteFunc(own, func(pin string) bool { return !member.IsPinned(pin, site.CAPins()) })
}

// startTime is longer than an API server takes to load its tokens after its start, or a cluster
// takes to sign cluster-info.
const startTime = 20 * time.Second

// FindCluster is kubeapi.Discover with advice in its errors. If the API servers may have rejected the
// token because they have just started, it waits for startTime and tries again.
func FindCluster(ctx context.Context, e *machine.Env, d kubeapi.Discovery) (*kubeapi.Found, error) {
	found, err := kubeapi.Discover(ctx, d)
	waited := false
	if tokenIsRefused(err, true) && !tokenIsRefused(err, false) {
		e.Waiting("the API servers to accept the bootstrap token: an API server that has just started accepts none")
		if err := e.Sleep(ctx, startTime); err != nil {
			return nil, err
		}
		waited = true
		found, err = kubeapi.Discover(ctx, d)
	}
	if joined.AllAre(err, kubeapi.ErrSignature) {
		// After a change of cluster-info, its signature is outdated until bootstrapsigner signs it
		// again.
		e.Waiting("the cluster to sign its cluster-info for the bootstrap token")
		if err := e.Sleep(ctx, startTime); err != nil {
			return nil, err
		}
		found, err = kubeapi.Discover(ctx, d)
	}
	if learned, failed := network.LearnTime(ctx, e, d, err); learned {
		return nil, cmp.Or(failed, run.ErrRestart) // results of earlier phases may depend on the clock
	}
	if err != nil {
		return nil, JudgeDiscovery(ctx, e, d.Masters, err, waited)
	}
	return found, nil
}

// tokenIsRefused reports whether every API server that answers rejects the token, and at least one
// of them is ready. If waited is set, all have had time to start, so one that hides whether it is
// ready counts as ready.
func tokenIsRefused(err error, waited bool) bool {
	forGood := false
	for _, err := range joined.Errors(err) {
		switch {
		case errors.Is(err, kubeapi.ErrToken):
			forGood = forGood || !errors.Is(err, kubeapi.ErrStarting) && (waited || !errors.Is(err, kubeapi.ErrReadyHidden))
		case answered(err):
			return false
		}
	}
	return forGood
}

// answered reports whether an error of discovery comes from an API server, not from the network.
func answered(err error) bool {
	return kubeapi.Code(err) != 0 || slices.ContainsFunc([]error{
		kubeapi.ErrPin, kubeapi.ErrSignature, kubeapi.ErrToken, kubeapi.ErrUnsigned, kubeapi.ErrNoClusterInfo, kubeapi.ErrAnonymous, kubeapi.ErrCA, kubeapi.ErrServerName,
	}, func(word error) bool { return errors.Is(err, word) })
}

// JudgeDiscovery adds advice to err, an error of discovery. It returns an error that a person must
// fix only if all API servers agree on it: if only one fails so, its address may be a typo. waited
// is as in tokenIsRefused.
func JudgeDiscovery(ctx context.Context, e *machine.Env, masters []string, err error, waited bool) error {
	var expired x509.CertificateInvalidError
	early := (*kubeapi.EarlyError)(nil)
	switch {
	case errors.Is(err, kubeapi.ErrPin) && !joined.AllAre(err, kubeapi.ErrPin):
		return run.Advise(err, "an address in masters belongs to another cluster: correct it. No other API server could be used, for the reasons above")
	case errors.Is(err, kubeapi.ErrPin):
		return run.NeedsPerson(err, "compare caCertHashes in site.yaml with the cluster's (`kubeadm token create --print-join-command` shows it), and the API servers' addresses")
	case errors.Is(err, kubeapi.ErrCA) && !joined.AllAre(err, kubeapi.ErrCA):
		return run.Advise(err, "an address in masters belongs to another cluster: correct it. No other API server could be used, for the reasons above")
	case errors.Is(err, kubeapi.ErrCA):
		return run.NeedsPerson(err, "compare caCert in site.yaml with /etc/kubernetes/pki/ca.crt of a control-plane node, and check the API servers' addresses")
	case joined.AllAre(err, kubeapi.ErrNode):
		return run.Advise(err, "correct masters: a node's kubelet or yurthub answers there; if they are right, look for the machine that answers in place of the API servers")
	case tokenIsRefused(err, waited), joined.AllAre(err, kubeapi.ErrSignature):
		return run.NeedsPerson(err, newTokenFix)
	case errors.Is(err, kubeapi.ErrToken):
		return run.Advise(err, "an API server accepts no token for some seconds after its start; if this persists, "+newTokenFix)
	case errors.Is(err, kubeapi.ErrSignature):
		return run.Advise(err, newTokenFix+", or correct masters. No other API server could be used, for the reasons above")
	case errors.Is(err, kubeapi.ErrServerName) && !joined.AllAre(err, kubeapi.ErrServerName):
		return run.Advise(err, serverNameFix+". No other API server could be used, for the reasons above")
	case errors.Is(err, kubeapi.ErrServerName):
		return run.NeedsPerson(err, serverNameFix)
	case errors.As(err, &early):
		return run.Advise(fmt.Errorf("%w (this machine's clock says %s)", err, e.Now().UTC().Format(time.RFC3339)),
			"correct the wrong clock, for example with a time server in the Site (network.ntp): this machine's clock is behind, or that of the API servers was ahead when their certificates were made")
	case errors.As(err, &expired) && expired.Reason == x509.Expired:
		network.WaitForNTP(ctx, e, network.NTPTimeout)
		return run.Advise(fmt.Errorf("%w (this machine's clock says %s)", err, e.Now().UTC().Format(time.RFC3339)),
			"if the clock is wrong, name a reachable time server in the Site (network.ntp); if it is right, renew the API servers' certificates")
	case errors.Is(err, kubeapi.ErrUnsigned):
		return run.Advise(err, "the bootstrapsigner in the controller manager signs cluster-info within seconds; if this persists, make a token with the usage \"signing\"")
	case errors.Is(err, kubeapi.ErrAnonymous):
		// --anonymous-auth=false, or an AuthenticationConfiguration that allows
		// anonymous requests to the health paths only.
		return run.Advise(err, "add the cluster's CA (/etc/kubernetes/pki/ca.crt on a control-plane node) to the Site, with caFile when stamping or as caCert in site.yaml; or allow anonymous requests for /api/v1/namespaces/kube-public/configmaps/cluster-info in the API servers' AuthenticationConfiguration")
	case errors.Is(err, kubeapi.ErrNoClusterInfo):
		return run.Advise(err, "publish it on a control-plane node: kubeadm init phase bootstrap-token")
	}
	return run.Advise(err, "check that these are the cluster's API servers ("+strings.Join(masters, ", ")+") and that no firewall blocks this node")
}

const (
	newTokenFix   = "make a new token (`kubeadm token create`) and put it into site.yaml"
	serverNameFix = "add the endpoint or the API servers' addresses to the API servers' certSANs, or correct endpoint and masters in site.yaml"
)

// NameIsFree returns an error if n, the cluster's Node with this name, is Ready. A stale Node is
// only logged.
func NameIsFree(e *machine.Env, n *kubeapi.Node, name string) error {
	if n == nil {
		return nil // no such Node, or the token may not read Nodes; kubeadm checks again
	}
	ready, _ := n.Ready()
	ours := n.Status.NodeInfo.MachineID != "" && n.Status.NodeInfo.MachineID == machine.ID(e)
	if uuid := e.Facts().UUID; uuid != "" && strings.EqualFold(uuid, n.Status.NodeInfo.SystemUUID) {
		ours = true
	}
	fix := kubeadm.OtherName(name)
	switch {
	case ready && ours:
		return run.Advise(fmt.Errorf("the cluster still shows this machine's own Node %s as Ready; it turns NotReady within a minute", name), fix)
	case ready:
		return run.NeedsPerson(fmt.Errorf("the node name %s is taken: the cluster has a Node of that name, and it is Ready", name), fix)
	}
	e.Log.Warn("the cluster has a stale Node of this name, which keeps its old labels and taints", "node", name, "fix", fix)
	e.Console(fmt.Sprintf("the cluster has a stale Node %s, which keeps its old labels and taints: %s", name, fix))
	return nil
}
