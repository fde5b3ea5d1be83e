package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/yamltree"
	"go.yaml.in/yaml/v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/edgebake/edgebake/openyurt"
)

// recordName is the ConfigMap in kube-system that holds what objects were
// before Prepare.
const recordName = "edgebake-prepared"

const fieldManager = "edgebake"

// The objects that Prepare makes or changes, beside node pools.
const (
	mastersName = "edgebake-masters"
	hubName     = openyurt.HubRole
	dnsName     = "kube-dns"
	proxyName   = "kube-proxy"
)

// Wanted is what Prepare is asked for.
type Wanted struct {
	VIP string
	// Pools are node pools to make, by name: Edge or Cloud.
	Pools map[string]string
}

// Change is one object as it is and as it should be. Before is nil where it is
// to be made.
type Change struct {
	Resource  schema.GroupVersionResource `json:"resource"`
	Namespace string                      `json:"namespace,omitempty"`
	Name      string                      `json:"name"`
	Why       string                      `json:"why"`
	Before    map[string]any              `json:"before"`
	After     map[string]any              `json:"after"`

	// then is what a person has to do besides.
	then string
}

func (c *Change) String() string { return describe(c.Resource, c.Namespace, c.Name) }

// Then is what has to follow the change, "" for nothing.
func (c *Change) Then() string { return c.then }

// Diff shows the change as lines of YAML.
func (c *Change) Diff() string { return diff(lines(c.Before), lines(c.After)) }

// wish is a Change before the cluster has been asked.
type wish struct {
	resource        schema.GroupVersionResource
	namespace, name string
	why, then       string
	// change returns the object as it should be; of nil, a new one. It may
	// return what it was given: then nothing is to be done.
	change func(is map[string]any) (map[string]any, error)
}

// Plan finds out what Prepare would change, by the API server's own word: each
// change is tried there without being carried out.
func (c *Client) Plan(ctx context.Context, w Wanted) ([]Change, error) {
	wishes, err := c.wishes(ctx, w)
	if err != nil {
		return nil, err
	}
	if err := c.need(ctx, "preparing the cluster", rightsFor(wishes)...); err != nil {
		return nil, err
	}
	noted, _, err := c.recorded(ctx)
	if err != nil {
		return nil, err
	}
	var plan []Change
	var errs []error
	for _, w := range wishes {
		change, err := c.try(ctx, w)
		if err != nil {
			errs = append(errs, err)
		} else if change != nil {
			if i := noteOf(noted, change); i >= 0 && !noted[i].knows(change.Before) {
				change.Why += "; somebody changed it since it was prepared before: revert will bring back what he made of it, not what it was before that"
			}
			plan = append(plan, *change)
		}
	}
	return plan, errors.Join(errs...)
}

func rightsFor(wishes []wish) []right {
	all := []right{{"get", configMaps, systemNamespace, recordName}, {"create", configMaps, systemNamespace, ""}, {"update", configMaps, systemNamespace, recordName}}
	for _, w := range wishes {
		all = append(all, right{"get", w.resource, w.namespace, w.name}, right{"create", w.resource, w.namespace, ""}, right{"update", w.resource, w.namespace, w.name})
	}
	slices.SortFunc(all, func(a, b right) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(all)
}

// try has the API server say what would come of a wish; nil: nothing.
func (c *Client) try(ctx context.Context, w wish) (*Change, error) {
	obj, err := c.get(ctx, w.resource, w.namespace, w.name)
	if err != nil {
		return nil, err
	}
	is := stateOf(obj)
	want, err := w.change(copyOf(is))
	if err != nil || want == nil || reflect.DeepEqual(is, want) {
		return nil, err
	}
	change := &Change{Resource: w.resource, Namespace: w.namespace, Name: w.name, Why: w.why, Before: is, then: w.then}
	after, err := c.write(ctx, change, want, obj, metav1.DryRunAll)
	if err != nil {
		return nil, err
	}
	if change.After = clean(after.Object); reflect.DeepEqual(is, change.After) {
		return nil, nil
	}
	return change, nil
}

// write makes or replaces an object; dryRun may keep the API server from
// doing it.
func (c *Client) write(ctx context.Context, at *Change, want map[string]any, is *unstructured.Unstructured, dryRun ...string) (*unstructured.Unstructured, error) {
	obj := &unstructured.Unstructured{Object: copyOf(want)}
	r := c.resource(at.Resource, at.Namespace)
	if is == nil {
		done, err := r.Create(ctx, obj, metav1.CreateOptions{DryRun: dryRun, FieldManager: fieldManager})
		return done, c.explain("making "+at.String(), err)
	}
	// Somebody else's change in between is a conflict, not overwritten.
	obj.SetResourceVersion(is.GetResourceVersion())
	if status, ok := is.Object["status"]; ok {
		obj.Object["status"] = status
	}
	done, err := r.Update(ctx, obj, metav1.UpdateOptions{DryRun: dryRun, FieldManager: fieldManager})
	return done, c.explain("changing "+at.String(), err)
}

// stateOf is an object that was read, as clean has it; nil where there was none.
func stateOf(obj *unstructured.Unstructured) map[string]any {
	if obj == nil {
		return nil
	}
	return clean(obj.Object)
}

// clean is an object without what the API server keeps for itself.
func clean(obj map[string]any) map[string]any {
	out := copyOf(obj)
	delete(out, "status")
	if meta, ok := out["metadata"].(map[string]any); ok {
		for _, k := range []string{"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink"} {
			delete(meta, k)
		}
	}
	return out
}

func copyOf(obj map[string]any) map[string]any {
	if obj == nil {
		return nil
	}
	return (&unstructured.Unstructured{Object: obj}).DeepCopy().Object
}

// Prepare carries a plan out. What the objects were before is recorded in the
// cluster first, for Revert.
func (c *Client) Prepare(ctx context.Context, plan []Change) error {
	if len(plan) == 0 {
		return nil
	}
	if err := c.record(ctx, plan); err != nil {
		return err
	}
	for i := range plan {
		p := &plan[i]
		obj, err := c.get(ctx, p.Resource, p.Namespace, p.Name)
		if err != nil {
			return err
		}
		if !reflect.DeepEqual(stateOf(obj), p.Before) {
			return fmt.Errorf("changing %s: somebody changed it since it was read: run the command again", p)
		}
		if _, err := c.write(ctx, p, p.After, obj); err != nil {
			return err
		}
	}
	return nil
}

// note is a Change as the record has it.
type note struct {
	Change
	// Earlier is what Prepare had made of the object before this change; nil:
	// nothing. A power cut may have kept it from becoming After.
	Earlier map[string]any `json:"earlier,omitempty"`
}

// knows reports whether an object in this state is without a change by
// somebody else.
func (n *note) knows(is map[string]any) bool {
	return reflect.DeepEqual(is, n.Before) || n.made(is)
}

// made reports whether Prepare left an object in this state.
func (n *note) made(is map[string]any) bool {
	return is != nil && (reflect.DeepEqual(is, n.After) || reflect.DeepEqual(is, n.Earlier))
}

// noteOf is where the record has an object, -1 if nowhere.
func noteOf(all []note, of *Change) int {
	return slices.IndexFunc(all, func(n note) bool { return n.String() == of.String() })
}

// preparable reports whether Prepare could have recorded the change: the record
// is carried out with an administrator's rights, and others may write to it.
func preparable(c *Change) bool {
	pool := nodePools(c.Resource.Version)
	switch {
	case c.After == nil || !names(c.After, c) || c.Before != nil && !names(c.Before, c):
		return false
	case c.Resource == pool:
		return c.Namespace == "" && len(validation.IsDNS1035Label(c.Resource.Version)) == 0 && len(validation.IsDNS1123Subdomain(c.Name)) == 0
	}
	return slices.ContainsFunc([]Change{
		{Resource: configMaps, Namespace: publicNamespace, Name: mastersName},
		{Resource: roles, Namespace: publicNamespace, Name: mastersName},
		{Resource: roleBindings, Namespace: publicNamespace, Name: mastersName},
		{Resource: clusterRoles, Name: hubName},
		{Resource: clusterRoleBindings, Name: hubName},
		{Resource: services, Namespace: systemNamespace, Name: dnsName},
		{Resource: configMaps, Namespace: systemNamespace, Name: proxyName},
	}, func(of Change) bool {
		return of.Resource == c.Resource && of.Namespace == c.Namespace && of.Name == c.Name
	})
}

// names reports whether an object is the one that the change is of.
func names(obj map[string]any, c *Change) bool {
	u := unstructured.Unstructured{Object: obj}
	return u.GetName() == c.Name && u.GetNamespace() == c.Namespace
}

// recorded reads the record; nil if it is not found.
func (c *Client) recorded(ctx context.Context) ([]note, *unstructured.Unstructured, error) {
	obj, err := c.get(ctx, configMaps, systemNamespace, recordName)
	if err != nil || obj == nil {
		return nil, nil, err
	}
	text, _, _ := unstructured.NestedString(obj.Object, "data", "changes.json")
	var all []note
	reading := "reading " + describe(configMaps, systemNamespace, recordName)
	// Numbers as the API server's answers have them, or nothing would compare
	// equal.
	if err := utiljson.Unmarshal([]byte(text), &all); err != nil {
		return nil, nil, fmt.Errorf("%s: it is damaged: %w", reading, err)
	}
	for i := range all {
		if !preparable(&all[i].Change) || noteOf(all[:i], &all[i].Change) >= 0 {
			return nil, nil, fmt.Errorf("%s: it is damaged: `edgebake cluster prepare` does not write what it says of %s; nothing was changed: find out who wrote it (kubectl -n kube-system get configmap %s -o yaml --show-managed-fields), take back by hand what prepare did, and remove it", reading, &all[i].Change, recordName)
		}
	}
	return all, obj, nil
}

// record notes what the objects of a plan were before. What is noted already
// stays: the first state is the one to come back to, unless somebody else has
// changed the object since, which revert must not lose.
func (c *Client) record(ctx context.Context, plan []Change) error {
	all, obj, err := c.recorded(ctx)
	if err != nil {
		return err
	}
	for _, p := range plan {
		i := noteOf(all, &p)
		if i < 0 {
			all = append(all, note{Change: p})
			continue
		}
		was := all[i]
		all[i] = note{Change: p}
		if was.knows(p.Before) {
			all[i].Before = was.Before
		}
		if was.made(p.Before) {
			all[i].Earlier = p.Before
		}
	}
	return c.writeRecord(ctx, all, obj)
}

func (c *Client) writeRecord(ctx context.Context, all []note, is *unstructured.Unstructured) error {
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	at := &Change{Resource: configMaps, Namespace: systemNamespace, Name: recordName}
	_, err = c.write(ctx, at, map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]any{"name": recordName, "namespace": systemNamespace},
		"data":     map[string]any{"changes.json": string(text)},
	}, is)
	return err
}

// Reverted is what became of one recorded object.
type Reverted struct {
	Change
	// Kept says why it was left as it is; "": it is as it was before.
	Kept string
}

const keptChanged = "somebody changed it since: take edgebake's part out by hand (--dry-run shows the difference)"

// RevertPlan is what Revert would do: each recorded change, turned round.
func (c *Client) RevertPlan(ctx context.Context) ([]Reverted, error) {
	all, _, err := c.recorded(ctx)
	if err != nil {
		return nil, err
	}
	return c.turnRound(ctx, all)
}

func (c *Client) turnRound(ctx context.Context, all []note) ([]Reverted, error) {
	var out []Reverted
	for _, n := range slices.Backward(all) {
		obj, err := c.get(ctx, n.Resource, n.Namespace, n.Name)
		if err != nil {
			return nil, err
		}
		back := Reverted{Change: Change{Resource: n.Resource, Namespace: n.Namespace, Name: n.Name, Why: n.Why, Before: stateOf(obj), After: n.Before}}
		switch {
		case reflect.DeepEqual(back.Before, back.After):
			continue // never carried out, or taken back by hand
		case !n.made(back.Before):
			back.Kept = keptChanged
		}
		out = append(out, back)
	}
	return out, nil
}

// Revert makes every recorded object what it was, but for those that somebody
// else has changed since, which stay and stay recorded.
func (c *Client) Revert(ctx context.Context) ([]Reverted, error) {
	all, record, err := c.recorded(ctx)
	if err != nil || record == nil {
		return nil, err
	}
	plan, err := c.turnRound(ctx, all)
	if err != nil {
		return nil, err
	}
	rights := []right{{"delete", configMaps, systemNamespace, recordName}, {"update", configMaps, systemNamespace, recordName}}
	for _, p := range plan {
		verb := "update"
		if p.After == nil {
			verb = "delete"
		}
		rights = append(rights, right{verb, p.Resource, p.Namespace, p.Name})
	}
	if err := c.need(ctx, "reverting the cluster", rights...); err != nil {
		return nil, err
	}
	var kept []note
	for i := range plan {
		p := &plan[i]
		if p.Kept == "" {
			if p.Kept, err = c.putBack(ctx, &p.Change); err != nil {
				return nil, err
			}
		}
		if p.Kept != "" {
			kept = append(kept, all[noteOf(all, &p.Change)])
		}
	}
	slices.Reverse(kept) // in the order they were made
	if len(kept) > 0 {
		err = c.writeRecord(ctx, kept, record)
	} else {
		err = c.remove(ctx, &Change{Resource: configMaps, Namespace: systemNamespace, Name: recordName}, record)
	}
	if apierrors.IsConflict(err) {
		return nil, fmt.Errorf("reverting the cluster: another edgebake cluster prepare or revert ran at the same time: run the command again: %w", err)
	}
	return plan, err
}

// putBack turns one object back, unless somebody has changed it since it was
// read; then it says so.
func (c *Client) putBack(ctx context.Context, p *Change) (kept string, err error) {
	obj, err := c.get(ctx, p.Resource, p.Namespace, p.Name)
	if err != nil {
		return "", err
	}
	is := stateOf(obj)
	switch {
	case reflect.DeepEqual(is, p.After):
		return "", nil
	case !reflect.DeepEqual(is, p.Before):
		return keptChanged, nil
	case p.After != nil:
		_, err = c.write(ctx, p, p.After, obj)
	default:
		err = c.remove(ctx, p, obj)
	}
	if apierrors.IsConflict(err) {
		return keptChanged, nil
	}
	return "", err
}

// remove removes an object as it was read; not found is as good.
func (c *Client) remove(ctx context.Context, at *Change, is *unstructured.Unstructured) error {
	uid, version := is.GetUID(), is.GetResourceVersion()
	err := c.resource(at.Resource, at.Namespace).Delete(ctx, at.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &version}})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return c.explain("removing "+at.String(), err)
}

// wishes are what a cluster should have, by what it has.
func (c *Client) wishes(ctx context.Context, w Wanted) ([]wish, error) {
	masters, err := c.masters(ctx)
	if err != nil {
		return nil, err
	}
	all := mastersWishes(masters)
	pools, err := c.poolVersion(ctx)
	if err != nil {
		return nil, err
	}
	if pools != "" {
		all = append(all, hubWishes()...)
		all = append(all, dnsWish())
		for _, name := range slices.Sorted(maps.Keys(w.Pools)) {
			all = append(all, poolWish(pools, name, w.Pools[name]))
		}
	} else if len(w.Pools) > 0 {
		return nil, errors.New("making node pools: the cluster has no CRD " + openyurt.PoolCRD + ": install OpenYurt's yurt-manager first")
	}
	if w.VIP != "" {
		all = append(all, proxyWish(w.VIP))
	}
	return all, nil
}

// poolVersion is the version of NodePool that the cluster stores; "" where it
// has none, and so no OpenYurt.
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

// exactly wants an object to be this, whatever it was.
func exactly(obj map[string]any) func(map[string]any) (map[string]any, error) {
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

func words(s ...string) []any {
	out := make([]any, len(s))
	for i, w := range s {
		out[i] = w
	}
	return out
}

func bindNodes(kind, name string) map[string]any {
	return map[string]any{
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
		"subjects": []any{map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes"}},
	}
}

// mastersWishes publish the masters, for Sites with ipvs.learnMasters.
func mastersWishes(masters []string) []wish {
	const name, why = mastersName, "nodes learn of new masters (ipvs.learnMasters)"
	return []wish{
		{configMaps, publicNamespace, name, why, "", exactly(map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": name, "namespace": publicNamespace},
			"data": map[string]any{"masters": strings.Join(masters, "\n") + "\n"}})},
		{roles, publicNamespace, name, why, "", exactly(rbac("Role", publicNamespace, name, map[string]any{"rules": []any{
			map[string]any{"apiGroups": words(""), "resources": words("configmaps"), "resourceNames": words(name), "verbs": words("get")}}}))},
		{roleBindings, publicNamespace, name, why, "", exactly(rbac("RoleBinding", publicNamespace, name, bindNodes("Role", name)))},
	}
}

// hubRules are what yurthub asks for in its node's name.
func hubRules() []any {
	return []any{
		map[string]any{"apiGroups": words(""), "resources": words("configmaps"), "verbs": words("get", "list", "watch")},
		map[string]any{"apiGroups": words(openyurt.Group), "resources": words("nodepools"), "verbs": words("list", "watch")},
		map[string]any{"apiGroups": words("discovery.k8s.io"), "resources": words("endpointslices"), "verbs": words("list", "watch")},
	}
}

// hubWishes give yurthub its rights. Rules that are there already stay: those
// of OpenYurt's own chart are wider.
func hubWishes() []wish {
	const name, why = hubName, "without it yurthub never becomes ready"
	return []wish{
		{clusterRoles, "", name, why, "", func(is map[string]any) (map[string]any, error) {
			if is == nil {
				return rbac("ClusterRole", "", name, map[string]any{"rules": hubRules()}), nil
			}
			rules, _ := is["rules"].([]any)
			for _, rule := range hubRules() {
				if !grants(rules, rule.(map[string]any)) {
					rules = append(rules, rule)
				}
			}
			is["rules"] = rules
			return is, nil
		}},
		{clusterRoleBindings, "", name, why, "", func(is map[string]any) (map[string]any, error) {
			if is == nil {
				return rbac("ClusterRoleBinding", "", name, bindNodes("ClusterRole", name)), nil
			}
			want := bindNodes("ClusterRole", name)["subjects"].([]any)[0]
			subjects, _ := is["subjects"].([]any)
			if !slices.ContainsFunc(subjects, func(s any) bool { return reflect.DeepEqual(s, want) }) {
				is["subjects"] = append(subjects, want)
			}
			return is, nil
		}},
	}
}

// grants reports whether one of the rules gives all that want does.
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

const topologyKey = openyurt.TopologyKey

// dnsWish keeps DNS within a node pool, where it works without the link.
func dnsWish() wish {
	return wish{services, systemNamespace, dnsName, "pods of a cut-off pool ask the DNS of their own pool", "", func(is map[string]any) (map[string]any, error) {
		if is == nil {
			return nil, nil // the cluster's DNS has another name
		}
		annotations, _, _ := unstructured.NestedStringMap(is, "metadata", "annotations")
		if annotations[topologyKey] != "" {
			return is, nil
		}
		return is, unstructured.SetNestedField(is, openyurt.PoolTopology, "metadata", "annotations", topologyKey)
	}}
}

func poolWish(version, name, kind string) wish {
	return wish{nodePools(version), "", name, "edge and cloud nodes join a pool that exists", "", func(is map[string]any) (map[string]any, error) {
		if is == nil {
			return map[string]any{"apiVersion": openyurt.Group + "/" + version, "kind": "NodePool", "metadata": map[string]any{"name": name}, "spec": map[string]any{"type": kind}}, nil
		}
		if has, _, _ := unstructured.NestedString(is, "spec", "type"); has != kind {
			return nil, fmt.Errorf("making the node pool %s: it exists and is of type %s, which cannot change: name another pool", name, has)
		}
		return is, nil
	}}
}

// proxyWish keeps kube-proxy in mode ipvs from clearing the VIP's rules.
func proxyWish(vip string) wish {
	return wish{configMaps, systemNamespace, proxyName, "in mode ipvs kube-proxy removes virtual servers that it did not make",
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

// excludeVIP adds the VIP to ipvs.excludeCIDRs of kube-proxy's configuration,
// in mode ipvs, and leaves every other line as it is.
func excludeVIP(text, vip string) (string, error) {
	const doing = "reading config.conf of configmaps kube-proxy in namespace kube-system"
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
	if err := yaml.Unmarshal([]byte(text), &config); err != nil {
		return "", fmt.Errorf("%s: %w", doing, err)
	}
	covered := slices.ContainsFunc(config.IPVS.ExcludeCIDRs, func(s string) bool {
		p, err := netip.ParsePrefix(s)
		return err == nil && p.Contains(addr)
	})
	if config.Mode != "ipvs" || covered {
		return text, nil
	}
	var root yaml.Node
	if err := yaml.Unmarshal([]byte(text), &root); err != nil || len(root.Content) != 1 {
		return "", fmt.Errorf("%s: it is not one document: %w", doing, err)
	}
	ipvs := yamltree.Child(root.Content[0], "ipvs", yaml.MappingNode)
	list := yamltree.Child(ipvs, "excludeCIDRs", yaml.SequenceNode)
	list.Content = append(list.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: want})
	changed, err := encode(&root)
	if err != nil {
		return "", fmt.Errorf("%s: %w", doing, err)
	}
	return changed, nil
}

// encode is YAML as people write it.
func encode(v any) (string, error) {
	var b strings.Builder
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	err := errors.Join(enc.Encode(v), enc.Close())
	return b.String(), err
}

// lines are an object as YAML.
func lines(obj map[string]any) []string {
	if obj == nil {
		return nil
	}
	text, err := encode(obj)
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimRight(text, "\n"), "\n")
}

// diff shows what turns a into b: lines with - and +, others around them.
func diff(a, b []string) string {
	// Longest common subsequence; objects have some hundred lines.
	long := make([][]int, len(a)+1)
	for i := range long {
		long[i] = make([]int, len(b)+1)
	}
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if a[i] == b[j] {
				long[i][j] = long[i+1][j+1] + 1
			} else {
				long[i][j] = max(long[i+1][j], long[i][j+1])
			}
		}
	}
	var out strings.Builder
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		switch {
		case i < len(a) && j < len(b) && a[i] == b[j]:
			out.WriteString("  " + a[i] + "\n")
			i, j = i+1, j+1
		case i < len(a) && (j == len(b) || long[i+1][j] >= long[i][j+1]):
			out.WriteString("- " + a[i] + "\n")
			i++
		default:
			out.WriteString("+ " + b[j] + "\n")
			j++
		}
	}
	return out.String()
}
