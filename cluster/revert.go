package cluster

import (
	"context"
	"fmt"
	"reflect"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Reverted is the result of Revert for one object.
type Reverted struct {
	Change
	// Kept is the reason why the object was not reverted, or "".
	Kept string
}

const keptChanged = "somebody else has changed it since; remove edgebake's part by hand (--dry-run shows the difference)"

// RevertPlan returns the result that Revert would have, without changing anything.
func (c *Client) RevertPlan(ctx context.Context) ([]Reverted, error) {
	all, _, err := c.recorded(ctx)
	if err != nil {
		return nil, err
	}
	return c.inverse(ctx, all)
}

func (c *Client) inverse(ctx context.Context, all []recordedChange) ([]Reverted, error) {
	var out []Reverted
	for _, n := range slices.Backward(all) {
		obj, err := c.get(ctx, n.Resource, n.Namespace, n.Name)
		if err != nil {
			return nil, err
		}
		back := Reverted{Change: Change{Resource: n.Resource, Namespace: n.Namespace, Name: n.Name, Why: n.Why, Before: stateOf(obj), After: n.Before}}
		switch {
		case reflect.DeepEqual(back.Before, back.After):
			continue // the change was never made, or a person has reverted it
		case !n.madeByPrepare(back.Before):
			back.Kept = keptChanged
		}
		out = append(out, back)
	}
	return out, nil
}

// Revert restores every recorded object, unless somebody else has changed it since. Such an object
// stays unchanged and in the record.
func (c *Client) Revert(ctx context.Context) ([]Reverted, error) {
	all, record, err := c.recorded(ctx)
	if err != nil || record == nil {
		return nil, err
	}
	plan, err := c.inverse(ctx, all)
	if err != nil {
		return nil, err
	}
	rights := []permission{{"delete", configMaps, systemNamespace, recordName}, {"update", configMaps, systemNamespace, recordName}}
	for _, p := range plan {
		verb := "update"
		if p.After == nil {
			verb = "delete"
		}
		rights = append(rights, permission{verb, p.Resource, p.Namespace, p.Name})
	}
	if err := c.requirePermissions(ctx, "reverting the cluster", rights...); err != nil {
		return nil, err
	}
	var kept []recordedChange
	for i := range plan {
		p := &plan[i]
		if p.Kept == "" {
			if p.Kept, err = c.restore(ctx, &p.Change); err != nil {
				return nil, err
			}
		}
		if p.Kept != "" {
			kept = append(kept, all[indexOf(all, &p.Change)])
		}
	}
	slices.Reverse(kept) // in the order of Prepare
	if len(kept) > 0 {
		err = c.writeRecord(ctx, kept, record)
	} else {
		err = c.remove(ctx, &Change{Resource: configMaps, Namespace: systemNamespace, Name: recordName}, record)
	}
	if apierrors.IsConflict(err) {
		return nil, fmt.Errorf("reverting the cluster: another edgebake cluster prepare or revert ran at the same time: %w; run the command again", err)
	}
	return plan, err
}

// restore restores one object. If somebody else has changed it, restore leaves it unchanged and
// returns the reason in kept.
func (c *Client) restore(ctx context.Context, p *Change) (kept string, err error) {
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

// remove removes an object if nobody has changed it since it was read. A missing object is not an
// error.
func (c *Client) remove(ctx context.Context, at *Change, is *unstructured.Unstructured) error {
	uid, version := is.GetUID(), is.GetResourceVersion()
	err := c.resource(at.Resource, at.Namespace).Delete(ctx, at.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &version}})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return c.explain("removing "+at.String(), err)
}
