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

// recordName is the ConfigMap in kube-system that records the objects as they were before Prepare.
const recordName = "edgebake-prepared"

// recordedChange is a Change in the record.
type recordedChange struct {
	Change
	// Earlier is the object after an earlier Prepare, or nil. The object is still in this state if
	// the present change was interrupted.
	Earlier map[string]any `json:"earlier,omitempty"`
}

// changedOnlyByPrepare reports whether the object is in the state before Prepare, or in one that
// Prepare wrote.
func (n *recordedChange) changedOnlyByPrepare(is map[string]any) bool {
	return reflect.DeepEqual(is, n.Before) || n.madeByPrepare(is)
}

// madeByPrepare reports whether Prepare wrote this state of the object.
func (n *recordedChange) madeByPrepare(is map[string]any) bool {
	return is != nil && (reflect.DeepEqual(is, n.After) || reflect.DeepEqual(is, n.Earlier))
}

// indexOf returns the index of a change's object in the record, or -1.
func indexOf(all []recordedChange, of *Change) int {
	return slices.IndexFunc(all, func(n recordedChange) bool { return n.String() == of.String() })
}

// preparable reports whether Prepare makes changes of this kind. Others may be able to write the
// record, and Revert carries it out with an administrator's rights.
func preparable(c *Change) bool {
	pool := nodePools(c.Resource.Version)
	switch {
	case c.After == nil || !isObjectOf(c.After, c) || c.Before != nil && !isObjectOf(c.Before, c):
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

// isObjectOf reports whether obj is the object that the change is about.
func isObjectOf(obj map[string]any, c *Change) bool {
	u := unstructured.Unstructured{Object: obj}
	return u.GetName() == c.Name && u.GetNamespace() == c.Namespace
}

// recorded reads the record, or returns nil if it does not exist.
func (c *Client) recorded(ctx context.Context) ([]recordedChange, *unstructured.Unstructured, error) {
	obj, err := c.get(ctx, configMaps, systemNamespace, recordName)
	if err != nil || obj == nil {
		return nil, nil, err
	}
	text, _, _ := unstructured.NestedString(obj.Object, "data", "changes.json")
	var all []recordedChange
	reading := "reading " + describe(configMaps, systemNamespace, recordName)
	// This decoder makes the same types of numbers as the API machinery, so that objects compare
	// equal.
	if err := utiljson.Unmarshal([]byte(text), &all); err != nil {
		return nil, nil, fmt.Errorf("%s: the record is damaged: %w\n  undo the changes of prepare by hand, then: kubectl -n kube-system delete configmap %s", reading, err, recordName)
	}
	for i := range all {
		if !preparable(&all[i].Change) || indexOf(all[:i], &all[i].Change) >= 0 {
			return nil, nil, fmt.Errorf("%s: the record is damaged: prepare writes no such entry for %s\n  undo the changes of prepare by hand, then: kubectl -n kube-system delete configmap %s", reading, &all[i].Change, recordName)
		}
	}
	return all, obj, nil
}

// record records the objects of a plan before they are changed. If an object is already recorded,
// its first state is kept, unless somebody else has changed the object since: Revert must not lose
// that change.
func (c *Client) record(ctx context.Context, plan []Change) error {
	all, obj, err := c.recorded(ctx)
	if err != nil {
		return err
	}
	for _, p := range plan {
		i := indexOf(all, &p)
		if i < 0 {
			all = append(all, recordedChange{Change: p})
			continue
		}
		was := all[i]
		all[i] = recordedChange{Change: p}
		if was.changedOnlyByPrepare(p.Before) {
			all[i].Before = was.Before
		}
		if was.madeByPrepare(p.Before) {
			all[i].Earlier = p.Before
		}
	}
	return c.writeRecord(ctx, all, obj)
}

func (c *Client) writeRecord(ctx context.Context, all []recordedChange, is *unstructured.Unstructured) error {
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
