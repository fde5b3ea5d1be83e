package hub

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// hubForConvert returns the configuration of yurthub for a convert of this node.
func hubForConvert(ctx context.Context, e *machine.Env, n *kubeapi.Node, active *site.Active, o ConvertOptions) (hub, error) {
	version, err := canRunHub(ctx, e, o)
	if err != nil {
		return hub{}, err
	}
	servers, err := serversFor(e, active, o)
	if err != nil {
		return hub{}, err
	}
	ca, err := e.Read(ondisk.KubeCA)
	if err != nil {
		return hub{}, fmt.Errorf("reading the cluster's CA: %w", err)
	}
	if servers, err = usableServers(ctx, e, servers, ca); err != nil {
		return hub{}, err
	}
	address, err := addressTowards(ctx, e, n, servers[0])
	if err != nil {
		return hub{}, err
	}
	pins, err := kubeapi.Pins(ca)
	if err != nil {
		return hub{}, err
	}
	return hub{openPort: o.OpenPort, clients: o.LocalClients, Hub: openyurt.Hub{
		Version: version, Node: n.Metadata.Name, Pool: o.NodePool, NodeIP: address, Cloud: o.Cloud, Dummy: hasDummy(ctx, e), Servers: servers, Pins: pins,
		Namespace: cmp.Or(o.Namespace, openyurt.DefaultNamespace), LBMode: cmp.Or(o.LBMode, openyurt.LBPriority), Extra: o.Extra,
	}}, nil
}

// canRunHub checks that the machine has everything that yurthub needs, and returns the version of
// yurthub's program.
func canRunHub(ctx context.Context, e *machine.Env, o ConvertOptions) (version string, err error) {
	if o.NodePool == "" {
		return "", errors.New("no node pool is given: " + openyurt.Unpooled)
	}
	if !e.Exists(openyurt.Program) {
		return "", run.Advise(fmt.Errorf("there is no %s", openyurt.Program), "install there the yurthub program of the OpenYurt release that the cluster runs")
	}
	release, err := hubProgram(ctx, e)
	if err != nil {
		return "", err
	}
	if release != "" && !openyurt.UsesKubeletCertificate(release) {
		first := openyurt.Release(openyurt.FirstUnit)
		return "", run.Advise(fmt.Errorf("%s is %s: a node that has joined needs %s or later, which can use kubelet's certificate", openyurt.Program, release, first),
			"install yurthub's program of "+first+" or later there")
	}
	version = openyurt.FirstOf(release)
	for _, a := range o.Extra {
		name, _, _ := strings.Cut(strings.TrimPrefix(a, "--"), "=")
		if bad := openyurt.BadFlag(name, version); bad != "" {
			return "", fmt.Errorf("--yurthub-arg --%s %s", name, bad)
		}
	}
	if !e.Exists(member.ClientCert) {
		return "", run.Advise(fmt.Errorf("there is no %s, the kubelet certificate that yurthub would use", member.ClientCert), "kubelet must run with rotateCertificates: true, as kubeadm sets it")
	}
	return version, checkPortRules(ctx, e)
}

// serversFor returns the servers in o. If o has none, it returns kubelet's present server and the
// Site's API servers.
func serversFor(e *machine.Env, active *site.Active, o ConvertOptions) ([]string, error) {
	server, _, err := member.KubeletServer(e)
	if err != nil || len(o.Servers) > 0 {
		return o.Servers, err
	}
	servers := []string{server}
	if active != nil {
		for _, m := range member.MastersOf(e, active.Site) {
			servers = append(servers, "https://"+m)
		}
	}
	return servers, nil
}

// addressTowards returns this node's address. The source address towards server is the last choice:
// if server is the machine's own VIP, the source may be any of the machine's addresses.
func addressTowards(ctx context.Context, e *machine.Env, n *kubeapi.Node, server string) (string, error) {
	u, err := url.Parse(server)
	if err != nil {
		return "", fmt.Errorf("reading server %s: %w", server, err)
	}
	if address := network.NodeAddress(e); address != "" {
		return address, nil
	}
	if address := internalIP(n); address != "" {
		return address, nil
	}
	ip, err := e.Source(ctx, u.Host)
	if err != nil {
		return "", fmt.Errorf("finding the address from which this node connects to %s: %w", u.Host, err)
	}
	return ip.String(), nil
}

// hasDummy reports whether the kernel has dummy interfaces. It first loads the module, because a
// node that edgebake did not build may not have loaded it.
func hasDummy(ctx context.Context, e *machine.Env) bool {
	const module = "/sys/module/dummy"
	if !e.Exists(module) {
		if err := e.Run(ctx, machine.Cmd{Args: []string{"modprobe", "dummy"}}); err != nil {
			e.Log.Info("this kernel has no dummy interface", "error", err)
		}
	}
	return e.Exists(module)
}

// internalIP returns the Node's InternalIP, or "" if it has none.
func internalIP(n *kubeapi.Node) string {
	for _, a := range n.Status.Addresses {
		if a.Type == "InternalIP" {
			return a.Address
		}
	}
	return ""
}

// hubProgram runs yurthub's program, and returns the release that it reports, for example v1.7, or
// "" if it reports none.
func hubProgram(ctx context.Context, e *machine.Env) (release string, err error) {
	var out strings.Builder
	if err := e.Run(ctx, machine.Cmd{Args: []string{openyurt.Program, "--version"}, Output: &out}); err != nil {
		var start *fs.PathError
		if errors.As(err, &start) {
			err = start.Err // the rest repeats the name of the program
		}
		return "", run.Advise(fmt.Errorf("trying %s: %w", openyurt.Program, err), "install yurthub's program there, built for this machine's processor")
	}
	return openyurt.Reported(out.String()), nil
}

// CheckServers returns an error for each server whose URL yurthub does not accept.
func CheckServers(servers []string) error {
	var errs []error
	for _, s := range servers {
		if u, err := url.Parse(s); err != nil || u.Scheme != "https" || u.Hostname() == "" || u.Port() == "" {
			errs = append(errs, fmt.Errorf("server %q is not of the form https://host:port", s))
		}
	}
	return errors.Join(errs...)
}

// certHasOwnName checks that a server's certificate has the host name of its URL, because yurthub
// has no setting for another TLS server name.
func certHasOwnName(ctx context.Context, e *machine.Env, server string, ca []byte) error {
	u, err := url.Parse(server)
	if err != nil {
		return fmt.Errorf("reading server %s: %w", server, err)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err = e.APIDialer().ServerName(ctx, u.Host, ca, []string{u.Hostname()})
	return err
}

// usableServers returns servers without those whose certificate lacks the host name of the URL.
// Servers that do not answer now are kept, but at least one must be usable now.
func usableServers(ctx context.Context, e *machine.Env, servers []string, ca []byte) ([]string, error) {
	var out []string
	var errs []error
	answers := false
	if err := CheckServers(servers); err != nil {
		return nil, err
	}
	for _, s := range servers {
		err := certHasOwnName(ctx, e, s, ca)
		if err == nil {
			answers = true
		} else {
			errs = append(errs, err)
		}
		if errors.Is(err, kubeapi.ErrServerName) {
			e.Log.Warn("skipping this server for yurthub: its certificate lacks the host name of the URL", "server", s, "error", err)
			continue
		}
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	if !answers {
		return nil, fmt.Errorf("yurthub can use none of the servers: %w", errors.Join(errs...))
	}
	return out, nil
}
