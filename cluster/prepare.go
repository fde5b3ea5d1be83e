package cluster

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

const fieldManager = "edgebake"

// PrepareOptions has the VIP and the node pools that Prepare sets up.
type PrepareOptions struct {
	VIP string
	// Pools maps the names of node pools to their type, Edge or Cloud.
	Pools map[string]string
}

// Change is an object before and after a change. Before is nil if the object is new.
type Change struct {
	Resource  schema.GroupVersionResource `json:"resource"`
	Namespace string                      `json:"namespace,omitempty"`
	Name      string                      `json:"name"`
	Why       string                      `json:"why"`
	Before    map[string]any              `json:"before"`
	After     map[string]any              `json:"after"`

	// nextStep is the command to run afterwards, or "".
	nextStep string
}

func (c *Change) String() string { return describe(c.Resource, c.Namespace, c.Name) }

// NextStep returns the command to run after the change, or "".
func (c *Change) NextStep() string { return c.nextStep }

// Diff returns the change as a diff of YAML.
func (c *Change) Diff() string { return diff(lines(c.Before), lines(c.After)) }

// Plan returns the changes that Prepare would make, after a dry run of each.
func (c *Client) Plan(ctx context.Context, w PrepareOptions) ([]Change, error) {
	desired, err := c.desired(ctx, w)
	if err != nil {
		return nil, err
	}
	if err := c.requirePermissions(ctx, "preparing the cluster", rightsFor(desired)...); err != nil {
		return nil, err
	}
	noted, _, err := c.recorded(ctx)
	if err != nil {
		return nil, err
	}
	var plan []Change
	var errs []error
	for _, w := range desired {
		change, err := c.dryRun(ctx, w)
		if err != nil {
			errs = append(errs, err)
		} else if change != nil {
			if i := indexOf(noted, change); i >= 0 && !noted[i].changedOnlyByPrepare(change.Before) {
				change.Why += "; somebody else has changed it since an earlier prepare: revert will restore that changed version, not the original one"
			}
			plan = append(plan, *change)
		}
	}
	return plan, errors.Join(errs...)
}

func rightsFor(desired []desiredObject) []permission {
	all := []permission{{"get", configMaps, systemNamespace, recordName}, {"create", configMaps, systemNamespace, ""}, {"update", configMaps, systemNamespace, recordName}}
	for _, w := range desired {
		all = append(all, permission{"get", w.resource, w.namespace, w.name}, permission{"create", w.resource, w.namespace, ""}, permission{"update", w.resource, w.namespace, w.name})
	}
	slices.SortFunc(all, func(a, b permission) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(all)
}

// dryRun returns the result of a dry run, or nil if nothing would change.
func (c *Client) dryRun(ctx context.Context, w desiredObject) (*Change, error) {
	obj, err := c.get(ctx, w.resource, w.namespace, w.name)
	if err != nil {
		return nil, err
	}
	is := stateOf(obj)
	want, err := w.change(copyOf(is))
	if err != nil || want == nil || reflect.DeepEqual(is, want) {
		return nil, err
	}
	change := &Change{Resource: w.resource, Namespace: w.namespace, Name: w.name, Why: w.why, Before: is, nextStep: w.then}
	after, err := c.write(ctx, change, want, obj, metav1.DryRunAll)
	if err != nil {
		return nil, err
	}
	if change.After = clean(after.Object); reflect.DeepEqual(is, change.After) {
		return nil, nil
	}
	return change, nil
}

// write creates or replaces an object; with dryRun, the API server only checks the request.
func (c *Client) write(ctx context.Context, at *Change, want map[string]any, is *unstructured.Unstructured, dryRun ...string) (*unstructured.Unstructured, error) {
	obj := &unstructured.Unstructured{Object: copyOf(want)}
	r := c.resource(at.Resource, at.Namespace)
	if is == nil {
		done, err := r.Create(ctx, obj, metav1.CreateOptions{DryRun: dryRun, FieldManager: fieldManager})
		return done, c.explain("making "+at.String(), err)
	}
	// The version makes the write fail if somebody else has changed the object since it was read.
	obj.SetResourceVersion(is.GetResourceVersion())
	if status, ok := is.Object["status"]; ok {
		obj.Object["status"] = status
	}
	done, err := r.Update(ctx, obj, metav1.UpdateOptions{DryRun: dryRun, FieldManager: fieldManager})
	return done, c.explain("changing "+at.String(), err)
}

// stateOf returns the cleaned content of an object that was read, or nil if obj is nil.
func stateOf(obj *unstructured.Unstructured) map[string]any {
	if obj == nil {
		return nil
	}
	return clean(obj.Object)
}

// clean returns an object without the fields that the API server sets.
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

// Prepare performs a plan. It first records the former objects in the cluster, so that Revert can
// restore them.
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
			return fmt.Errorf("changing %s: somebody else has changed it in the meantime; run the command again", p)
		}
		if _, err := c.write(ctx, p, p.After, obj); err != nil {
			return err
		}
	}
	return nil
}
