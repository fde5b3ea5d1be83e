package join

import (
	"context"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/yamltree"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// ReportedVIP is the file with the VIP that was reported to be in the
// cluster's service range. A reboot removes it.
const ReportedVIP = ondisk.RunMark + "vip"

// ClusterFiles lists this package's files that belong to the machine's cluster.
var ClusterFiles = []string{ReportedVIP}

// VIPPhase checks that no Service has the VIP as its address, since on this node the VIP leads
// to the API servers. Only a member may query the cluster.
func VIPPhase(site *configs.Site) run.Phase {
	const fix = "choose another vip in site.yaml, outside of the cluster's service ranges (kubeadm: networking.serviceSubnet)"
	return run.Phase{
		Name: "vip", Doc: "the VIP is not a Service's address", Timeout: time.Minute,
		Check: func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
			if site.IPVS.Disabled || e.Text(ReportedVIP) == site.VIP {
				return run.Done, nil
			}
			in, service, err := vipInCluster(ctx, e, site)
			switch {
			case err != nil:
				// The node is offline, or the cluster does not let nodes read this.
				e.Log.Info("cannot check whether the VIP is free in the cluster", "error", err)
				return run.Done, nil
			case service != "" && !e.Exists(member.ReadyMark):
				return run.Todo, run.NeedsPerson(fmt.Errorf("the VIP %s is the address of the cluster's Service %s, which this node cannot reach", site.VIP, service), fix)
			case in.IsValid():
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			in, service, err := vipInCluster(ctx, e, site)
			if err != nil {
				return fmt.Errorf("checking whether the VIP is free in the cluster: %w", err)
			}
			line := fmt.Sprintf("the VIP %s is in the cluster's service range %s: no Service has this address yet; this node could not reach a Service that gets it later; %s", site.VIP, in, fix)
			if service != "" {
				// Only a note: a user who may create Services must not stop nodes that were Ready.
				line = fmt.Sprintf("the VIP %s is the address of the cluster's Service %s, which this node cannot reach; %s", site.VIP, service, fix)
			}
			e.Log.Warn(line)
			e.Console(line)
			return e.WriteFile(ReportedVIP, []byte(site.VIP), machine.Mode(0o600))
		},
	}
}

// vipInCluster returns the service range that contains the VIP, if any, and the
// Service whose address it is, as "namespace/name".
func vipInCluster(ctx context.Context, e *machine.Env, site *configs.Site) (in netip.Prefix, service string, err error) {
	vip, err := netip.ParseAddr(site.VIP)
	if err != nil {
		return in, "", fmt.Errorf("reading the VIP: %w", err)
	}
	c, err := member.NodeClient(e)
	if err == nil {
		c, err = c.Kept()
	}
	if err != nil {
		return in, "", err
	}
	ranges, err := serviceRanges(ctx, c)
	if err != nil {
		return in, "", err
	}
	i := slices.IndexFunc(ranges, func(p netip.Prefix) bool { return p.Contains(vip) })
	if i < 0 {
		return in, "", nil
	}
	// A field selector keeps the response small. It matches only a Service's first
	// address, and API servers before 1.31 respond with status 400.
	if vip.Is4() == ranges[0].Addr().Is4() {
		service, err = serviceWith(ctx, c, vip, "&fieldSelector="+url.QueryEscape("spec.clusterIP="+vip.String()))
		if kubeapi.Code(err) != 400 {
			return ranges[i], service, err
		}
	}
	service, err = serviceWith(ctx, c, vip, "")
	return ranges[i], service, err
}

// serviceRanges returns the cluster's service ranges from its ServiceCIDRs (Kubernetes 1.33 and later),
// or from kubeadm-config, which every node may read.
func serviceRanges(ctx context.Context, c *kubeapi.Client) ([]netip.Prefix, error) {
	var cidrs struct {
		Items []struct {
			Spec struct {
				CIDRs []string `json:"cidrs"`
			} `json:"spec"`
		} `json:"items"`
	}
	err := c.Get(ctx, "/apis/networking.k8s.io/v1/servicecidrs", &cidrs)
	if err == nil && len(cidrs.Items) > 0 {
		var all []string
		for _, i := range cidrs.Items {
			all = append(all, i.Spec.CIDRs...)
		}
		return parsePrefixes(all)
	}
	if err != nil && kubeapi.Code(err) == 0 {
		return nil, err // no answer
	}
	var cm struct {
		Data map[string]string `json:"data"`
	}
	if err := c.Get(ctx, "/api/v1/namespaces/kube-system/configmaps/kubeadm-config", &cm); err != nil {
		return nil, fmt.Errorf("reading the cluster's service ranges: %w", err)
	}
	var conf struct {
		Networking struct {
			ServiceSubnet string `yaml:"serviceSubnet"`
		} `yaml:"networking"`
	}
	if err := yamltree.Unmarshal([]byte(cm.Data["ClusterConfiguration"]), &conf); err != nil {
		return nil, fmt.Errorf("reading the ConfigMap kubeadm-config: %w", err)
	}
	if conf.Networking.ServiceSubnet == "" {
		return nil, fmt.Errorf("reading the ConfigMap kubeadm-config: it has no serviceSubnet")
	}
	return parsePrefixes(strings.Split(conf.Networking.ServiceSubnet, ","))
}

func parsePrefixes(texts []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, t := range texts {
		p, err := netip.ParsePrefix(strings.TrimSpace(t))
		if err != nil {
			return nil, fmt.Errorf("reading the cluster's service ranges: %w", err)
		}
		out = append(out, p)
	}
	return out, nil
}

// maxServices is the maximum number of Services to search, in pages of servicesPage.
const (
	servicesPage = 250
	maxServices  = 20_000
)

// serviceWith returns the Service with this address among those that
// match selector; "" if none of the first maxServices has it.
func serviceWith(ctx context.Context, c *kubeapi.Client, addr netip.Addr, selector string) (string, error) {
	next := ""
	for range maxServices / servicesPage {
		var list struct {
			Metadata struct {
				Continue string `json:"continue"`
			} `json:"metadata"`
			Items []struct {
				Metadata struct {
					Namespace string `json:"namespace"`
					Name      string `json:"name"`
				} `json:"metadata"`
				Spec struct {
					ClusterIP  string   `json:"clusterIP"`
					ClusterIPs []string `json:"clusterIPs"`
				} `json:"spec"`
			} `json:"items"`
		}
		path := fmt.Sprintf("/api/v1/services?limit=%d%s", servicesPage, selector)
		if next != "" {
			path += "&continue=" + url.QueryEscape(next)
		}
		if err := c.Get(ctx, path, &list); err != nil {
			return "", fmt.Errorf("looking for a Service with the VIP: %w", err)
		}
		for _, s := range list.Items {
			for _, ip := range append(s.Spec.ClusterIPs, s.Spec.ClusterIP) {
				if a, err := netip.ParseAddr(ip); err == nil && a == addr { // "None" is not an address
					return s.Metadata.Namespace + "/" + s.Metadata.Name, nil
				}
			}
		}
		if next = list.Metadata.Continue; next == "" {
			return "", nil
		}
	}
	return "", nil
}
