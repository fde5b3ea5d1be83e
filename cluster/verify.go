package cluster

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/openyurt"
)

// Verify checks whether the cluster meets the requirements of edgebake's nodes.
func (c *Client) Verify(ctx context.Context, w PrepareOptions, endpoint string) ([]Check, error) {
	var out []Check
	add := func(name, state, detail, fix string) {
		out = append(out, Check{Name: name, State: state, Detail: detail, Fix: fix})
	}
	if _, err := c.clusterInfo(ctx); err != nil {
		add("cluster-info is published", CheckFailed, err.Error(), "kubeadm init phase bootstrap-token")
	} else {
		add("cluster-info is published", CheckOK, "", "")
	}
	version, err := c.poolVersion(ctx)
	if err != nil {
		return nil, err
	}
	if version == "" { // Without OpenYurt, verify at least the objects that native nodes need.
		for _, name := range slices.Sorted(maps.Keys(w.Pools)) {
			add("node pool "+name, CheckFailed, "there is no CRD "+openyurt.PoolCRD, openyurt.InstallManager)
		}
		w.Pools = nil
	}
	desired, err := c.desired(ctx, w)
	if err != nil {
		return nil, err
	}
	for _, w := range desired {
		obj, err := c.get(ctx, w.resource, w.namespace, w.name)
		if err != nil {
			return nil, err
		}
		is := stateOf(obj)
		want, err := w.change(copyOf(is))
		what := describe(w.resource, w.namespace, w.name)
		switch {
		case err != nil:
			add(what, CheckFailed, err.Error(), "")
		case want == nil || strings.Join(lines(want), "\n") == strings.Join(lines(is), "\n"):
			add(what, CheckOK, "", "")
		default:
			add(what, CheckFailed, w.why, "edgebake cluster prepare")
		}
	}
	names, err := c.servingNames(ctx, endpoint, w.VIP)
	if err != nil {
		return nil, err
	}
	out = append(out, names)
	advice, err := c.managerAdvice(ctx)
	if err != nil {
		return nil, err
	}
	out = append(out, advice...)
	if version == "" {
		add("OpenYurt", CheckUnknown, "there is no CRD "+openyurt.PoolCRD+": native nodes can join, edge and cloud nodes cannot", openyurt.InstallManager)
		return out, nil
	}
	manager, err := c.managerChecks(ctx)
	if err != nil {
		return nil, err
	}
	newer, err := c.newerOpenYurt(ctx)
	return slices.Concat(out, manager, newer), err
}

// newerOpenYurt checks the requirements of OpenYurt after v1.7, if the cluster has it.
func (c *Client) newerOpenYurt(ctx context.Context) ([]Check, error) {
	role, err := c.get(ctx, clusterRoles, "", openyurt.BootstrapRole)
	if err != nil || role == nil {
		return nil, err
	}
	out := []Check{{Name: "OpenYurt is newer than v1.7", State: CheckOK,
		Detail: "the cluster has the ClusterRole " + openyurt.BootstrapRole + ", which edgebake's nodes do not need: their yurthub starts with kubelet's certificate, not with a token"}}
	all, err := c.list(ctx, nodes, "", metav1.ListOptions{})
	if apierrors.IsForbidden(err) {
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	var lacking, fixes []string
	for _, n := range all {
		labels := n.GetLabels()
		if openyurt.Labelled(labels) && !openyurt.IsCloud(labels) && labels[openyurt.LabelZone] == "" {
			lacking = append(lacking, n.GetName())
			fixes = append(fixes, fmt.Sprintf("kubectl label node %s %s=%s", n.GetName(), openyurt.LabelZone, openyurt.PoolOf(labels)))
		}
	}
	if len(lacking) > 0 {
		out = append(out, Check{Name: "edge nodes have their node pool as zone", State: CheckUnknown,
			Detail: strings.Join(lacking, ", ") + " lack the label " + openyurt.LabelZone + ", which this OpenYurt gives to nodes that it converts; it matters where Services prefer their zone (trafficDistribution)",
			Fix:    strings.Join(fixes, "; ") + "; and set the label in their Sites"})
	}
	return out, nil
}

// servingNames checks whether the API server's certificate has the endpoint and the VIP. Other
// clients may need these names; edgebake's nodes do not.
func (c *Client) servingNames(ctx context.Context, endpoint, vip string) (Check, error) {
	const doing = "reading the API server's certificate"
	f := Check{Name: "the API server's certificate has endpoint and VIP", State: CheckOK}
	_, conn, err := c.version(ctx, doing)
	if err != nil {
		return f, err
	}
	if conn == nil || len(conn.PeerCertificates) == 0 {
		f.State, f.Detail = CheckUnknown, "the API server is reached without TLS"
		return f, nil
	}
	var lacks []string
	for _, name := range []string{endpoint, vip} {
		if name != "" && conn.PeerCertificates[0].VerifyHostname(name) != nil {
			lacks = append(lacks, name)
		}
	}
	if len(lacks) > 0 {
		f.State = CheckUnknown
		f.Detail = "it lacks " + strings.Join(lacks, " and ") + "; edgebake's nodes accept the name kubernetes instead, which does not distinguish API servers from yurthubs"
		f.Fix = certSANsStep(lacks)
	}
	return f, nil
}

// managerAdvice checks flags of kube-controller-manager that limit how many nodes a cluster can
// have, or how fast they join.
func (c *Client) managerAdvice(ctx context.Context) ([]Check, error) {
	all, err := c.list(ctx, pods, systemNamespace, metav1.ListOptions{LabelSelector: managerLabel})
	if apierrors.IsForbidden(err) {
		return nil, nil // the check is only advice
	}
	if err != nil || len(all) == 0 {
		return nil, err
	}
	var out []Check
	for _, p := range all {
		args := containerArgs(p.Object, "spec", "containers")
		qps, err := strconv.ParseFloat(cmp.Or(flagOf(args, "kube-api-qps"), "20"), 64)
		if err == nil && qps >= 0 && int(qps) < clusterdoc.ManagerQPS { // negative: no limit
			out = append(out, Check{Name: "many nodes get their certificates quickly", State: CheckUnknown,
				Detail: fmt.Sprintf("kube-controller-manager (%s) sends %d requests a second, two for each certificate; this matters when more than some hundred machines are switched on together", p.GetName(), int(qps)),
				Fix:    managerRateStep()})
			break
		}
	}
	args := containerArgs(all[0].Object, "spec", "containers") // a cluster has one pod network
	list, err := c.list(ctx, nodes, "", metav1.ListOptions{})
	if apierrors.IsForbidden(err) {
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	if capacity := podRoom(args); capacity > 0 && len(list) >= capacity*3/4 {
		out = append(out, Check{Name: "the pod network has space for more nodes", State: CheckUnknown,
			Detail: fmt.Sprintf("--cluster-cidr=%s of kube-controller-manager has space for %d nodes, and the cluster has %d; pods do not start on nodes without a part of it", flagOf(args, "cluster-cidr"), capacity, len(list)),
			Fix:    podRoomStep()})
	}
	return out, nil
}

// flagOf returns the value of the last --name=value argument; "" if there is none.
func flagOf(args []string, name string) (value string) {
	for _, arg := range args {
		if v, ok := strings.CutPrefix(arg, "--"+name+"="); ok {
			value = v
		}
	}
	return value
}

// podRoom returns the number of nodes for which kube-controller-manager's pod network has ranges:
// the smaller number if there are two families, and 0 if no ranges are assigned.
func podRoom(args []string) int {
	if flagOf(args, "allocate-node-cidrs") != "true" {
		return 0
	}
	capacity := 0
	for _, cidr := range strings.Split(flagOf(args, "cluster-cidr"), ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(cidr))
		if err != nil {
			return 0
		}
		family, mask := "ipv4", configs.NodeMask4
		if p.Addr().Is6() {
			family, mask = "ipv6", configs.NodeMask6
		}
		if given := cmp.Or(flagOf(args, "node-cidr-mask-size-"+family), flagOf(args, "node-cidr-mask-size")); given != "" {
			if mask, err = strconv.Atoi(given); err != nil {
				return 0
			}
		}
		if n := 1 << max(0, min(mask-p.Bits(), 30)); capacity == 0 || n < capacity {
			capacity = n
		}
	}
	return capacity
}

// managerLabel selects the pods of kube-controller-manager.
const managerLabel = "component=kube-controller-manager"

// manager is a cluster's yurt-manager Deployment, which approves yurthubs' certificates.
type manager struct {
	deployment *unstructured.Unstructured // nil: not found
	lacks, fix string                     // why it does not approve the certificates, and the fix; empty if it does
}

// manager finds the cluster's yurt-manager Deployment.
func (c *Client) manager(ctx context.Context) (manager, error) {
	obj, err := c.get(ctx, deployments, openyurt.ManagerNamespace, openyurt.Manager)
	if err != nil {
		return manager{}, err
	}
	if obj == nil {
		return manager{
			lacks: "there is no Deployment " + openyurt.Manager + " in " + openyurt.ManagerNamespace + ", which approves yurthub's certificates",
			fix:   openyurt.InstallManager + "; if it is installed under another name, check that it is ready",
		}, nil
	}
	m := manager{deployment: obj}
	if n, _, _ := unstructured.NestedInt64(obj.Object, "status", "availableReplicas"); n == 0 {
		m.lacks = "no replica of " + openyurt.Manager + " is available: no yurthub gets its certificate"
		m.fix = "see why: kubectl -n " + openyurt.ManagerNamespace + " describe deployment " + openyurt.Manager
	}
	return m, nil
}

// managerChecks checks yurt-manager, and kube-controller-manager's controllers that it replaces.
func (c *Client) managerChecks(ctx context.Context) ([]Check, error) {
	var out []Check
	m, err := c.manager(ctx)
	if err != nil {
		return nil, err
	}
	ready := Check{Name: openyurt.Manager + " runs (it approves yurthub's certificates)", State: CheckOK, Detail: m.lacks, Fix: m.fix}
	if m.deployment == nil {
		// A missing Deployment is not a failure here: it may have another name, or the cluster may
		// get no edge nodes. In preflight it is a failure, because a machine would wait for it.
		ready.State = CheckUnknown
		return append(out, ready), nil
	}
	if m.lacks != "" {
		ready.State = CheckFailed
	}
	out = append(out, ready)
	theirs := runs(containerArgs(m.deployment.Object, "spec", "template", "spec", "containers"), openyurt.NodeLifecycle)
	all, err := c.list(ctx, pods, systemNamespace, metav1.ListOptions{LabelSelector: managerLabel})
	if err != nil {
		return out, err
	}
	f := Check{Name: "exactly one controller monitors the nodes (nodelifecycle)", State: CheckOK}
	if len(all) == 0 {
		f.State, f.Detail = CheckUnknown, "kube-controller-manager's pods cannot be seen from here"
		return append(out, f), nil
	}
	version := tagOf(firstImage(m.deployment.Object, "spec", "template", "spec", "containers"))
	for _, p := range all {
		ours := runs(containerArgs(p.Object, "spec", "containers"), openyurt.NodeLifecycle)
		switch {
		case ours && theirs:
			f.State, f.Detail = CheckFailed, "kube-controller-manager ("+p.GetName()+") and "+openyurt.Manager+" both run this controller"
			f.Fix = lifecycleFix(version, true)
		case !ours && !theirs:
			f.State, f.Detail = CheckFailed, "neither kube-controller-manager nor "+openyurt.Manager+" runs this controller: a failed node would stay Ready"
			f.Fix = lifecycleFix(version, false)
		}
	}
	return append(out, f), nil
}

// firstImage returns the image of an object's first container.
func firstImage(obj map[string]any, path ...string) string {
	containers, _, _ := unstructured.NestedSlice(obj, path...)
	if len(containers) == 0 {
		return ""
	}
	first, _ := containers[0].(map[string]any)
	image, _ := first["image"].(string)
	return image
}

func containerArgs(obj map[string]any, path ...string) []string {
	var out []string
	containers, _, _ := unstructured.NestedSlice(obj, path...)
	for _, container := range containers {
		m, _ := container.(map[string]any)
		for _, field := range []string{"command", "args"} {
			list, _, _ := unstructured.NestedStringSlice(m, field)
			out = append(out, list...)
		}
	}
	return out
}

// runs reports whether the argument --controllers enables a controller. As in Kubernetes, the
// controller's name takes precedence over the name with "-" before it, which takes precedence over
// "*".
func runs(args []string, controller string) bool {
	list := []string{"*"}
	for i, a := range args {
		if v, ok := strings.CutPrefix(a, "--controllers="); ok {
			list = strings.Split(v, ",")
		} else if a == "--controllers" && i+1 < len(args) {
			list = strings.Split(args[i+1], ",")
		}
	}
	for i := range list {
		list[i] = strings.Trim(strings.TrimSpace(list[i]), `"'`)
	}
	switch {
	case slices.Contains(list, controller):
		return true
	case slices.Contains(list, "-"+controller):
		return false
	}
	return slices.Contains(list, "*")
}
