package controlplane

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
)

// The Cluster's manifests come with the keys, and stay on the disk until all are applied. They are
// applied once in a cluster's life. This may take weeks: some need a webhook that runs on a worker.

const (
	// ClusterManifests is the packed file of the manifests until they are applied.
	ClusterManifests = ondisk.StateDir + "/cluster-manifests"
	// appliedMarker is a ConfigMap with a key for each applied object. When all objects are
	// applied, applyingLabel is removed. Its value is applyMissing if the cluster was published
	// without the manifests: then existing objects are not changed.
	appliedMarker     = "edgebake-manifests"
	appliedMarkerPath = "/api/v1/namespaces/kube-system/configmaps/" + appliedMarker
	applyingLabel     = "edgebake.io/applying"
	applyAll          = "true"
	applyMissing      = "missing"
	// applyInterval is the pause between two attempts.
	applyInterval = 5 * time.Second
)

// ManifestsPhase applies the Cluster's manifests.
func ManifestsPhase(active *site.Active) run.Phase {
	return run.Phase{
		Name: "manifests", Doc: "the Cluster's manifests are applied", Timeout: 10 * time.Minute,
		Check: func(_ context.Context, e *machine.Env) (run.Verdict, error) {
			if e.Exists(ClusterManifests) {
				return run.Todo, nil
			}
			return run.Done, nil
		},
		Run: func(ctx context.Context, e *machine.Env) error {
			c, err := adminClient(e, active.Site)
			if err != nil {
				return err
			}
			if c, err = c.Kept(); err != nil {
				return err
			}
			m, err := readMarker(ctx, c)
			if err == nil && !m.complete() {
				err = applyManifests(ctx, e, c, active.Site)
			}
			if err != nil {
				return err
			}
			// Do not apply the manifests again: changes that others make later must stay.
			return e.Remove(ClusterManifests)
		},
	}
}

// applyManifests applies all objects, each once, and retries those that fail.
func applyManifests(ctx context.Context, e *machine.Env, c *kubeapi.Client, site *configs.Site) error {
	manifests, err := manifest.Unpack(configs.NewSecret(string(e.Contents(ClusterManifests))))
	if err != nil {
		return run.NeedsPerson(fmt.Errorf("reading the Cluster's manifests (%s): %w", ClusterManifests, err),
			"stamp the machine's Site again, with the keys (`edgebake cluster sites`), or bring it on a stick")
	}
	all, err := objectsOf(manifests)
	if err != nil {
		return err
	}
	keys, left, own := markerKeys(all), len(all), map[string]bool{}
	e.Waiting("%d objects of the Cluster's manifests to be applied", left)
	err = e.Retry(ctx, machine.Wait{Every: applyInterval}, func() error {
		var err error
		left, err = applyRound(ctx, c, site, all, keys, own)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			e.Waiting("%d of %d objects of the Cluster's manifests to be applied: %s", left, len(all), machine.OneLine(err))
		}
		return err
	})
	if err != nil {
		return run.Advise(fmt.Errorf("%d of %d objects of the Cluster's manifests are not applied: %w", left, len(all), err),
			"objects that wait for a webhook are applied once a node runs its pod; otherwise apply corrected manifests yourself (`kubectl apply`), and end the retries with `kubectl -n kube-system label configmap "+appliedMarker+" "+applyingLabel+"-`")
	}
	return nil
}

// applyRound tries once to apply each object that is not applied yet. It returns the number of
// objects left, with their errors. own records the objects that this machine has applied, the
// marker those of all nodes.
func applyRound(ctx context.Context, c *kubeapi.Client, site *configs.Site, all []kubeapi.Object, keys []string, own map[string]bool) (left int, _ error) {
	var errs []error
	applier := c.Applier()
	for i, o := range all {
		m, err := madeMarker(ctx, c, site, applyMissing)
		if err != nil {
			return len(all) - i + left, err
		}
		apply := applier.Apply
		if m.missing {
			apply = applier.Create
		}
		if m.complete() {
			return 0, nil // a person has ended the retries, or another node has applied the rest
		}
		if _, applied := m.data[keys[i]]; applied {
			continue
		}
		if !own[keys[i]] {
			if err := apply(ctx, o); err != nil {
				left++
				errs = append(errs, err)
				continue
			}
			own[keys[i]] = true
		}
		if err := c.MergePatch(ctx, appliedMarkerPath, map[string]any{"data": map[string]string{keys[i]: o.ID()}}); err != nil {
			return len(all) - i + left, fmt.Errorf("recording that %s is applied: %w", o.Where, err)
		}
	}
	if len(errs) > 0 {
		return left, errors.Join(errs...)
	}
	err := c.MergePatch(ctx, appliedMarkerPath, map[string]any{"metadata": map[string]any{"labels": map[string]any{applyingLabel: nil}}})
	if err != nil {
		return 0, fmt.Errorf("recording that the Cluster's manifests are applied: %w", err)
	}
	return 0, nil
}

// markerKeys returns the objects' keys in the marker. A key identifies an object, not its contents,
// which may have changed since. An object that occurs twice has two keys.
func markerKeys(all []kubeapi.Object) []string {
	keys, seen := make([]string, len(all)), map[string]int{}
	for i, o := range all {
		id := o.ID()
		sum := sha256.Sum256(fmt.Appendf(nil, "%s %d", id, seen[id]))
		keys[i] = hex.EncodeToString(sum[:16])
		seen[id]++
	}
	return keys
}

// objectsOf returns the objects of manifests, in order.
func objectsOf(manifests []manifest.File) ([]kubeapi.Object, error) {
	var all []kubeapi.Object
	for _, m := range manifests {
		objects, err := kubeapi.Objects(m.Name, []byte(m.Text))
		if err != nil {
			return nil, err
		}
		all = append(all, objects...)
	}
	return all, nil
}

// marker is the state of appliedMarker.
type marker struct {
	exists, applying bool
	missing          bool // create only missing objects
	data             map[string]string
}

// complete reports whether all objects are applied, or a person has ended the attempt.
func (m marker) complete() bool { return m.exists && !m.applying }

func readMarker(ctx context.Context, c *kubeapi.Client) (marker, error) {
	var o struct {
		Metadata struct {
			Labels map[string]string `json:"labels"`
		} `json:"metadata"`
		Data map[string]string `json:"data"`
	}
	err := c.Get(ctx, appliedMarkerPath, &o)
	if kubeapi.Code(err) == 404 {
		return marker{}, nil
	}
	if err != nil {
		return marker{}, fmt.Errorf("reading which of the Cluster's manifests are applied: %w", err)
	}
	mode, applying := o.Metadata.Labels[applyingLabel]
	return marker{true, applying, mode == applyMissing, o.Data}, nil
}

// madeMarker reads the marker. If it is missing, madeMarker creates it with this mode.
func madeMarker(ctx context.Context, c *kubeapi.Client, site *configs.Site, mode string) (marker, error) {
	m, err := readMarker(ctx, c)
	if err != nil || m.exists {
		return m, err
	}
	objects, err := kubeapi.Objects("the marker", fmt.Appendf(nil, `{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": %q, "namespace": "kube-system", "labels": {%q: %q}}, "data": {"cluster": %q}}`, appliedMarker, applyingLabel, mode, site.ControlPlane.ID))
	if err == nil {
		err = c.CreateAll(ctx, objects)
	}
	if err != nil {
		return marker{}, fmt.Errorf("recording which of the Cluster's manifests are applied: %w", err)
	}
	return readMarker(ctx, c) // another control-plane node may have made it
}
