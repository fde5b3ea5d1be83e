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

// Plan finds out what Prepare would change, by the API server's own word: each
// change is tried there without being carried out.
func (c *Client) Plan(ctx context.Context, w Wanted) ([]Change, error) {
	desired, err := c.desired(ctx, w)
	if err != nil {
		return nil, err
	}
	if err := c.need(ctx, "preparing the cluster", rightsFor(desired)...); err != nil {
		return nil, err
	}
	noted, _, err := c.recorded(ctx)
	if err != nil {
		return nil, err
	}
	var plan []Change
	var errs []error
	for _, w := range desired {
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

func rightsFor(desired []desiredObject) []right {
	all := []right{{"get", configMaps, systemNamespace, recordName}, {"create", configMaps, systemNamespace, ""}, {"update", configMaps, systemNamespace, recordName}}
	for _, w := range desired {
		all = append(all, right{"get", w.resource, w.namespace, w.name}, right{"create", w.resource, w.namespace, ""}, right{"update", w.resource, w.namespace, w.name})
	}
	slices.SortFunc(all, func(a, b right) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(all)
}

// try has the API server say what would come of a change; nil: nothing.
func (c *Client) try(ctx context.Context, w desiredObject) (*Change, error) {
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
