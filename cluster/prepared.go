package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/validation"
)

// recordName is the ConfigMap in kube-system that holds what objects were
// before Prepare.
const recordName = "edgebake-prepared"

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
