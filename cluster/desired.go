package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgebake/edgebake/firstboot/servercert"
	"github.com/edgebake/edgebake/openyurt"
)

// The objects that Prepare creates or changes, in addition to node pools.
const (
	mastersName = "edgebake-masters"
	hubName     = openyurt.HubRole
	dnsName     = "kube-dns"
	proxyName   = "kube-proxy"
)

// desiredObject is an object that Prepare creates or changes.
type desiredObject struct {
	resource        schema.GroupVersionResource
	namespace, name string
	// why is printed with the change; then is a command to run afterwards, or "".
	why, then string
	// change returns the desired object for the existing one, which is nil if there is none. It
	// returns its argument if nothing has to change.
	change func(is map[string]any) (map[string]any, error)
}

// desired returns the objects that this cluster needs.
func (c *Client) desired(ctx context.Context, w PrepareOptions) ([]desiredObject, error) {
	masters, err := c.masters(ctx)
	if err != nil {
		return nil, err
	}
	all := mastersObjects(masters)
	pools, err := c.poolVersion(ctx)
	if err != nil {
		return nil, err
	}
	if pools != "" {
		all = append(all, hubObjects()...)
		all = append(all, dnsObject())
		for _, name := range slices.Sorted(maps.Keys(w.Pools)) {
			all = append(all, poolObject(pools, name, w.Pools[name]))
		}
	} else if len(w.Pools) > 0 {
		return nil, errors.New("making node pools: the cluster has no CRD " + openyurt.PoolCRD + ": first " + openyurt.InstallManager)
	}
	if w.VIP != "" {
		all = append(all, proxyObject(w.VIP))
	}
	return all, nil
}

// poolVersion returns the version in which the cluster stores NodePools; "" without OpenYurt.
func (c *Client) poolVersion(ctx context.Context) (string, error) {
	crd, err := c.get(ctx, crds, "", openyurt.PoolCRD)
	if err != nil || crd == nil {
		return "", err
	}
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	for _, v := range versions {
		if m, ok := v.(map[string]any); ok && m["storage"] == true {
			name, _ := m["name"].(string)
			return name, nil
		}
	}
	return "", nil
}

// replaceFields returns a change that sets every field of obj, except metadata, to obj's value.
func replaceFields(obj map[string]any) func(map[string]any) (map[string]any, error) {
	return func(is map[string]any) (map[string]any, error) {
		if is == nil {
			return obj, nil
		}
		for k, v := range obj {
			if k != "metadata" {
				is[k] = v
			}
		}
		return is, nil
	}
}

func rbac(kind, namespace, name string, more map[string]any) map[string]any {
	meta := map[string]any{"name": name}
	if namespace != "" {
		meta["namespace"] = namespace
	}
	obj := map[string]any{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": meta}
	for k, v := range more {
		obj[k] = v
	}
	return obj
}

func anyList(s ...string) []any {
	out := make([]any, len(s))
	for i, w := range s {
		out[i] = w
	}
	return out
}

func bindNodes(kind, name string) map[string]any {
	return map[string]any{
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
		"subjects": []any{nodesGroup()},
	}
}

// mastersObjects returns the objects that publish the list of API servers to nodes whose Sites set
// ipvs.learnMasters.
func mastersObjects(masters []string) []desiredObject {
	const name, why = mastersName, "nodes learn of new masters (ipvs.learnMasters)"
	return []desiredObject{
		{configMaps, publicNamespace, name, why, "", replaceFields(map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": name, "namespace": publicNamespace},
			"data": map[string]any{"masters": strings.Join(masters, "\n") + "\n"}})},
		{roles, publicNamespace, name, why, "", replaceFields(rbac("Role", publicNamespace, name, map[string]any{"rules": []any{
			map[string]any{"apiGroups": anyList(""), "resources": anyList("configmaps"), "resourceNames": anyList(name), "verbs": anyList("get")}}}))},
		{roleBindings, publicNamespace, name, why, "", replaceFields(rbac("RoleBinding", publicNamespace, name, bindNodes("Role", name)))},
	}
}

// ruleObject returns a rule as it is written in a role.
func ruleObject(r openyurt.Rule) map[string]any {
	return map[string]any{"apiGroups": anyList(r.Group), "resources": anyList(r.Resources...), "verbs": anyList(r.Verbs...)}
}

// missingRules returns those of the rules that a role does not have.
func missingRules(role map[string]any, rules []openyurt.Rule) []openyurt.Rule {
	has, _ := role["rules"].([]any)
	var lacked []openyurt.Rule
	for _, r := range rules {
		if !grants(has, ruleObject(r)) {
			lacked = append(lacked, r)
		}
	}
	return lacked
}

// bindsNodes reports whether a binding applies to all nodes.
func bindsNodes(binding map[string]any) bool {
	subjects, _ := binding["subjects"].([]any)
	return slices.ContainsFunc(subjects, func(s any) bool { return reflect.DeepEqual(s, nodesGroup()) })
}

func nodesGroup() map[string]any {
	return map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": servercert.NodesGroup}
}

// hubObjects returns the objects that give yurthub its rights. Existing rules are kept, because
// those of OpenYurt's own chart are wider.
func hubObjects() []desiredObject {
	const name, why = hubName, "without it yurthub never becomes ready"
	return []desiredObject{
		{clusterRoles, "", name, why, "", func(is map[string]any) (map[string]any, error) {
			if is == nil {
				is = rbac("ClusterRole", "", name, nil)
			}
			rules, _ := is["rules"].([]any)
			for _, r := range missingRules(is, openyurt.HubRules()) {
				rules = append(rules, ruleObject(r))
			}
			is["rules"] = rules
			return is, nil
		}},
		{clusterRoleBindings, "", name, why, "", func(is map[string]any) (map[string]any, error) {
			if is == nil {
				return rbac("ClusterRoleBinding", "", name, bindNodes("ClusterRole", name)), nil
			}
			if !bindsNodes(is) {
				subjects, _ := is["subjects"].([]any)
				is["subjects"] = append(subjects, nodesGroup())
			}
			return is, nil
		}},
	}
}

// missingRights describes the rights that hubObjects would add for nodes.
func (c *Client) missingRights(ctx context.Context, rules []openyurt.Rule) ([]string, error) {
	role, err := c.get(ctx, clusterRoles, "", hubName)
	if err != nil {
		return nil, err
	}
	if role == nil {
		return []string{"there is no ClusterRole " + hubName}, nil
	}
	var lacks []string
	for _, r := range missingRules(role.Object, rules) {
		names := slices.Clone(r.Resources)
		if r.Group != "" {
			for i := range names {
				names[i] += "." + r.Group
			}
		}
		lacks = append(lacks, "ClusterRole "+hubName+" does not grant "+strings.Join(r.Verbs, ", ")+" of "+strings.Join(names, ", "))
	}
	binding, err := c.get(ctx, clusterRoleBindings, "", hubName)
	switch {
	case err != nil:
		return nil, err
	case binding == nil:
		lacks = append(lacks, "there is no ClusterRoleBinding "+hubName)
	case !bindsNodes(binding.Object):
		lacks = append(lacks, "ClusterRoleBinding "+hubName+" does not bind the ClusterRole to system:nodes")
	}
	return lacks, nil
}

// grants reports whether one of the rules includes want.
func grants(rules []any, want map[string]any) bool {
	has := func(rule map[string]any, field string) bool {
		list, _ := rule[field].([]any)
		if slices.Contains(list, any("*")) {
			return true
		}
		for _, w := range want[field].([]any) {
			if !slices.Contains(list, w) {
				return false
			}
		}
		return true
	}
	return slices.ContainsFunc(rules, func(r any) bool {
		rule, ok := r.(map[string]any)
		return ok && rule["resourceNames"] == nil && has(rule, "apiGroups") && has(rule, "resources") && has(rule, "verbs")
	})
}

// dnsObject keeps DNS traffic within a node pool, so that DNS works while the pool is offline.
func dnsObject() desiredObject {
	return desiredObject{services, systemNamespace, dnsName, "pods of a disconnected pool use the DNS of their own pool", "", func(is map[string]any) (map[string]any, error) {
		if is == nil {
			return nil, nil // the cluster's DNS has another name
		}
		annotations, _, _ := unstructured.NestedStringMap(is, "metadata", "annotations")
		if annotations[openyurt.TopologyKey] != "" {
			return is, nil
		}
		return is, unstructured.SetNestedField(is, openyurt.PoolTopology, "metadata", "annotations", openyurt.TopologyKey)
	}}
}

func poolObject(version, name, kind string) desiredObject {
	return desiredObject{nodePools(version), "", name, "edge and cloud nodes need an existing node pool", "", func(is map[string]any) (map[string]any, error) {
		if is == nil {
			return map[string]any{"apiVersion": openyurt.Group + "/" + version, "kind": openyurt.KindPool, "metadata": map[string]any{"name": name}, "spec": map[string]any{"type": kind}}, nil
		}
		if has, _, _ := unstructured.NestedString(is, "spec", "type"); has != kind {
			return nil, fmt.Errorf("making the node pool %s: it already exists with type %s, which cannot change; name another pool", name, has)
		}
		return is, nil
	}}
}

// proxyObject keeps kube-proxy in mode ipvs from removing the virtual server of the VIP.
func proxyObject(vip string) desiredObject {
	return desiredObject{configMaps, systemNamespace, proxyName, "in mode ipvs kube-proxy removes virtual servers that it did not make",
		"kubectl -n kube-system rollout restart daemonset kube-proxy",
		func(is map[string]any) (map[string]any, error) {
			text, _, _ := unstructured.NestedString(is, "data", "config.conf")
			changed, err := excludeVIP(text, vip)
			if err != nil || changed == text {
				return is, err
			}
			return is, unstructured.SetNestedField(is, changed, "data", "config.conf")
		}}
}

// excludeVIP adds the VIP to ipvs.excludeCIDRs in kube-proxy's configuration if the mode is ipvs.
// Every other line is kept as it is.
func excludeVIP(text, vip string) (string, error) {
	const doing = "reading config.conf of ConfigMap kube-proxy in namespace kube-system"
	addr, err := netip.ParseAddr(vip)
	if err != nil {
		return "", fmt.Errorf("the VIP %q is not an IP address", vip)
	}
	want := netip.PrefixFrom(addr, addr.BitLen()).String()
	var config struct {
		Mode string
		IPVS struct {
			ExcludeCIDRs []string `yaml:"excludeCIDRs"`
		} `yaml:"ipvs"`
	}
	if err := yamltree.Unmarshal([]byte(text), &config); err != nil {
		return "", fmt.Errorf("%s: %w", doing, err)
	}
	covered := slices.ContainsFunc(config.IPVS.ExcludeCIDRs, func(s string) bool {
		p, err := netip.ParsePrefix(s)
		return err == nil && p.Contains(addr)
	})
	if config.Mode != "ipvs" || covered {
		return text, nil
	}
	root, err := yamltree.Parse([]byte(text))
	if err != nil {
		return "", fmt.Errorf("%s: %w", doing, err)
	}
	if len(root.Content) != 1 {
		return "", fmt.Errorf("%s: it must have exactly one YAML document", doing)
	}
	ipvs := yamltree.Child(root.Content[0], "ipvs", yaml.MappingNode)
	list := yamltree.Child(ipvs, "excludeCIDRs", yaml.SequenceNode)
	list.Content = append(list.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: want})
	changed, err := encode(root)
	if err != nil {
		return "", fmt.Errorf("%s: %w", doing, err)
	}
	return changed, nil
}
