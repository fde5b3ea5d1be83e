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

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/network"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// hubForConvert is yurthub as a convert sets it up on this node.
func hubForConvert(ctx context.Context, e *machine.Env, n *api.Node, active *site.Active, o ConvertOptions) (hub, error) {
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
	pins, err := api.Pins(ca)
	if err != nil {
		return hub{}, err
	}
	return hub{openPort: o.OpenPort, clients: o.LocalClients, Hub: openyurt.Hub{
		Version: version, Node: n.Metadata.Name, Pool: o.NodePool, NodeIP: address, Cloud: o.Cloud, Dummy: hasDummy(ctx, e), Servers: servers, Pins: pins,
		Namespace: cmp.Or(o.Namespace, openyurt.DefaultNamespace), LBMode: cmp.Or(o.LBMode, openyurt.LBPriority), Extra: o.Extra,
	}}, nil
}

// canRunHub looks for what yurthub needs on the machine, and returns the version
// of its program.
func canRunHub(ctx context.Context, e *machine.Env, o ConvertOptions) (version string, err error) {
	if o.NodePool == "" {
		return "", errors.New("no node pool is given: " + openyurt.Unpooled)
	}
	if !e.Exists(openyurt.Program) {
		return "", run.Advise(fmt.Errorf("there is no %s", openyurt.Program), "put yurthub's program there, of the release that the cluster runs")
	}
	release, err := hubProgram(ctx, e)
	if err != nil {
		return "", err
	}
	if release != "" && !openyurt.CanBorrow(release) {
		first := openyurt.Release(openyurt.FirstUnit)
		return "", run.Advise(fmt.Errorf("%s is %s: only %s and later can use kubelet's certificate, as a node that has joined must", openyurt.Program, release, first),
			"put yurthub's program of "+first+" or later there")
	}
	version = openyurt.FirstOf(release)
	for _, a := range o.Extra {
		name, _, _ := strings.Cut(strings.TrimPrefix(a, "--"), "=")
		if bad := openyurt.BadFlag(name, version); bad != "" {
			return "", fmt.Errorf("--yurthub-arg --%s %s", name, bad)
		}
	}
	if !e.Exists(member.ClientCert) {
		return "", run.Advise(fmt.Errorf("there is no %s, the certificate that yurthub borrows", member.ClientCert), "kubelet must run with rotateCertificates: true, as kubeadm sets it")
	}
	return version, portsClosable(ctx, e)
}

// serversFor are those that were asked for, or where kubelet goes now and the
// site's API servers.
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

// addressTowards is this node's address. On the way to a VIP of its own a
// machine may have any source address, so that is asked for last.
func addressTowards(ctx context.Context, e *machine.Env, n *api.Node, server string) (string, error) {
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
		return "", fmt.Errorf("looking for this node's address on the way to %s: %w", u.Host, err)
	}
	return ip.String(), nil
}

// hasDummy reports whether the kernel has dummy interfaces. On a node that
// edgebake did not build nobody may have loaded them yet.
func hasDummy(ctx context.Context, e *machine.Env) bool {
	const module = "/sys/module/dummy"
	if !e.Exists(module) {
		if err := e.Run(ctx, machine.Cmd{Args: []string{"modprobe", "dummy"}}); err != nil {
			e.Log.Info("this kernel has no dummy interface", "error", err)
		}
	}
	return e.Exists(module)
}

// internalIP is the address that the cluster knows the node by. Towards a
// balancer on the node itself the way has another.
func internalIP(n *api.Node) string {
	for _, a := range n.Status.Addresses {
		if a.Type == "InternalIP" {
			return a.Address
		}
	}
	return ""
}

// hubProgram asks yurthub's program for its release, e.g. v1.7; "": it was built
// by hand, without one.
func hubProgram(ctx context.Context, e *machine.Env) (release string, err error) {
	var out strings.Builder
	if err := e.Run(ctx, machine.Cmd{Args: []string{openyurt.Program, "--version"}, Output: &out}); err != nil {
		var start *fs.PathError
		if errors.As(err, &start) {
			err = start.Err // the rest names the program once more
		}
		return "", run.Advise(fmt.Errorf("trying %s: %w", openyurt.Program, err), "put yurthub's program itself there, for this machine's processor")
	}
	return openyurt.Reported(out.String()), nil
}

// CheckServers reports all that are not URLs of API servers as yurthub takes
// them.
func CheckServers(servers []string) error {
	var errs []error
	for _, s := range servers {
		if u, err := url.Parse(s); err != nil || u.Scheme != "https" || u.Hostname() == "" || u.Port() == "" {
			errs = append(errs, fmt.Errorf("server %q is not of the form https://host:port", s))
		}
	}
	return errors.Join(errs...)
}

// certHasOwnName asks a server for a certificate with the name of its own URL:
// yurthub takes no tls-server-name.
func certHasOwnName(ctx context.Context, e *machine.Env, server string, ca []byte) error {
	u, err := url.Parse(server)
	if err != nil {
		return fmt.Errorf("reading server %s: %w", server, err)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err = api.ServerName(ctx, e.Dial, e.Now, u.Host, ca, []string{u.Hostname()})
	return err
}

// usableServers are the servers that yurthub can verify. One that does not answer
// now stays in the list, if another does.
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
		if errors.Is(err, api.ErrServerName) {
			e.Log.Warn("yurthub does not get this server", "server", s, "error", err)
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
