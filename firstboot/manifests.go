package firstboot

import (
	"context"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
)

// The Cluster's manifests come with the keys, are kept on the disk when those are
// wiped from the slot, and are applied once in the cluster's life: objects of
// some kinds have to wait for a webhook whose pod a worker runs, and that worker
// may be switched on weeks later.

const (
	// clusterManifests are the manifests that are still to be applied, packed.
	clusterManifests = ondisk.StateDir + "/cluster-manifests"
	// appliedMarker is the ConfigMap that says that all of them are.
	appliedMarker     = "edgebake-manifests"
	appliedMarkerPath = "/api/v1/namespaces/kube-system/configmaps/" + appliedMarker
	// applyInterval is between two tries.
	applyInterval = 5 * time.Second
)

// manifestsPhase applies them.
func manifestsPhase(active *Active) Phase {
	site := active.Site
	return Phase{
		Name: "manifests", Doc: "the Cluster's manifests are applied", Timeout: 10 * time.Minute,
		Check: func(_ context.Context, e *Env) (Verdict, error) {
			if e.exists(clusterManifests) {
				return Todo, nil
			}
			return Done, nil
		},
		Run: func(ctx context.Context, e *Env) error {
			c, err := adminClient(e, site)
			if err != nil {
				return err
			}
			if c, err = c.Kept(); err != nil {
				return err
			}
			err = c.Get(ctx, appliedMarkerPath, nil)
			if api.Code(err) == 404 {
				err = applyManifests(ctx, e, c)
				if err == nil {
					err = markApplied(ctx, c, site)
				}
			}
			if err != nil {
				return err
			}
			// What somebody changed since stays.
			return e.Remove(clusterManifests)
		},
	}
}

// applyManifests applies all objects, again and again those with which it did not
// go well.
func applyManifests(ctx context.Context, e *Env, c *api.Client) error {
	manifests, err := configs.UnpackManifests(configs.NewSecret(string(e.contents(clusterManifests))))
	if err != nil {
		return Permanent(fmt.Errorf("reading the Cluster's manifests (%s): %w", clusterManifests, err),
			"stamp the machine's Site again, with the keys (`edgebake cluster sites`), or bring it on a stick")
	}
	left, err := objectsOf(manifests)
	if err != nil {
		return err
	}
	all := len(left)
	e.Waiting("%d objects of the Cluster's manifests to be applied", all)
	err = e.retry(ctx, applyInterval, func() error {
		again, err := c.ApplyAll(ctx, left)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if left = again; err != nil {
			e.Waiting("%d of %d objects of the Cluster's manifests to be applied: %s", len(left), all, oneLine(err))
		}
		return err
	})
	if err != nil {
		return Advise(fmt.Errorf("%d of %d objects of the Cluster's manifests are not applied: %w", len(left), all, err),
			"what waits for a webhook is applied once a node runs its pod; else apply corrected manifests yourself (`kubectl apply`), and end this with `kubectl -n kube-system create configmap "+appliedMarker+"`")
	}
	return err
}

// objectsOf are the objects of manifests, in their order.
func objectsOf(manifests []configs.Manifest) ([]api.Object, error) {
	var all []api.Object
	for _, m := range manifests {
		objects, err := api.Objects(m.Name, []byte(m.Text))
		if err != nil {
			return nil, err
		}
		all = append(all, objects...)
	}
	return all, nil
}

// markApplied says in the cluster that its manifests are applied: no other
// control-plane node does it again.
func markApplied(ctx context.Context, c *api.Client, site *configs.Site) error {
	marker, err := api.Objects("the marker", fmt.Appendf(nil, `{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": %q, "namespace": "kube-system"}, "data": {"cluster": %q}}`, appliedMarker, site.ControlPlane.ID))
	if err == nil {
		err = c.CreateAll(ctx, marker)
	}
	if err != nil {
		return fmt.Errorf("noting that the Cluster's manifests are applied: %w", err)
	}
	return nil
}
