package update

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
)

// oldestKubelet is the number of minor versions by which kubelet may be older than the API servers.
// It must never be newer than the API servers.
const oldestKubelet = 3

// anotherMinor reports whether the image has another minor version of Kubernetes.
func (s *system) anotherMinor(next ondisk.ImageInfo) bool {
	return kubeadm.Minor(next.Kubernetes) != kubeadm.Minor(s.image.Kubernetes)
}

// checkKubelet returns an error if the cluster does not support the kubelet of the image.
func (s *system) checkKubelet(ctx context.Context, e *machine.Env, next ondisk.ImageInfo) error {
	if !s.anotherMinor(next) {
		return nil
	}
	minor := kubeadm.Minor(next.Kubernetes)
	if minor < kubeadm.Minor(s.image.Kubernetes) {
		return fmt.Errorf("the image has Kubernetes %s and this machine %s: an earlier minor version of kubelet cannot use the files of a later one; flash the machine again to install it", next.Kubernetes, s.image.Kubernetes)
	}
	fail := func(err error) error {
		return run.Advise(fmt.Errorf("the image has Kubernetes %s and this machine %s, and it is unknown whether the cluster supports that kubelet: %w", next.Kubernetes, s.image.Kubernetes, err),
			"try again when an API server answers; an image with the same minor version as this machine needs no API server")
	}
	if !member.HasCredentials(e) || s.active == nil {
		return fail(member.ErrNotEnrolled)
	}
	version, err := oldestServer(ctx, e, member.MastersOf(e, s.active.Site))
	if err != nil {
		return &busy{fail(err)}
	}
	switch server := minorOf(version); {
	case minor > server:
		return fmt.Errorf("the image has Kubernetes %s and an API server has %s: kubelet must not be newer; update the control plane first", next.Kubernetes, version)
	case minor < server-oldestKubelet:
		return fmt.Errorf("the image has Kubernetes %s and an API server has %s: kubelet may be at most %d minor versions older; use a newer image", next.Kubernetes, version, oldestKubelet)
	}
	return nil
}

var versionForm = regexp.MustCompile(`^v1\.([0-9]{1,4})(?:[.+-]|$)`) // distributions append their own text

// minorOf returns 37 for v1.37.2, or 0 if the version cannot be parsed.
func minorOf(version string) int {
	m := versionForm.FindStringSubmatch(version)
	if m == nil {
		return 0
	}
	n, _ := strconv.Atoi(m[1]) // cannot fail: m[1] is 1 to 4 digits
	return n
}

// oldestServer returns the lowest version of the API servers that answer. During an update of the
// control plane versions differ, and kubelet may connect to any of the servers.
func oldestServer(ctx context.Context, e *machine.Env, masters []string) (string, error) {
	own, err := member.NodeClient(e)
	if err != nil {
		return "", err
	}
	u, err := url.Parse(own.Server)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	versions, errs := make([]string, len(masters)), make([]error, len(masters))
	var wg sync.WaitGroup
	for i, m := range masters {
		wg.Go(func() {
			c := *own
			c.Server, c.ServerName = "https://"+m, cmp.Or(own.ServerName, u.Hostname())
			versions[i], errs[i] = c.Version(ctx)
			if errs[i] == nil && minorOf(versions[i]) == 0 {
				errs[i] = fmt.Errorf("API server %s reports the version %q", m, versions[i])
			}
		})
	}
	wg.Wait()
	lowest := ""
	for i, v := range versions {
		if errs[i] == nil && (lowest == "" || minorOf(v) < minorOf(lowest)) {
			lowest = v
		}
	}
	if lowest == "" {
		return "", fmt.Errorf("no API server reports its version: %w", errors.Join(errs...))
	}
	// Do not wait for the others: a server that was removed from the cluster may still be in the Site.
	for i, err := range errs {
		if err != nil {
			e.Log.Warn("an API server does not report its version, so the update ignores it: if its minor version is lower than the new kubelet's, update this API server before it serves again", "server", masters[i], "error", err)
		}
	}
	return lowest, nil
}

const (
	// cordonFile exists while the Node may be unschedulable because of an update.
	cordonFile = Dir + "/cordoned"
	// cordonAnnotation marks a Node that an update has made unschedulable.
	cordonAnnotation = "edgebake.io/cordoned"
)

const (
	// drainPatience limits the time that pods have to end.
	drainPatience = 10 * time.Minute
	drainLook     = 5 * time.Second
)

// drain makes the Node unschedulable and evicts the pods that have a controller to recreate them.
// kubelet's credentials are sufficient, because a node may evict its own pods. If somebody else
// made the Node unschedulable, it stays so.
func (u *job) drain(ctx context.Context, e *machine.Env) error {
	fail := func(err error) error {
		return run.Advise(err, "the new system is installed, and runs after the next restart: run the same command again, or add --no-drain to restart without evicting the pods")
	}
	name, cordoned := member.NodeName(e), false
	var left []string
	for end := e.Now().Add(drainPatience); ; {
		var err error
		if !cordoned {
			err = cordon(ctx, e, name)
			cordoned = err == nil
		}
		if cordoned {
			if left, err = evictAll(ctx, e, name); err == nil && len(left) == 0 {
				return nil
			}
		}
		switch {
		case kubeapi.Code(err) == 401 || kubeapi.Code(err) == 403 || errors.Is(err, member.ErrNoNode) || ctx.Err() != nil:
			return fail(err)
		case !cordoned && !e.Now().Before(end):
			return fail(fmt.Errorf("making the Node %s unschedulable: %w", name, err))
		case !e.Now().Before(end):
			return fail(errors.Join(fmt.Errorf("after %s these pods are still on the Node %s: %s", drainPatience, name, strings.Join(left, ", ")), err))
		case err != nil:
			e.Waiting("an API server, to drain this Node: %s", machine.OneLine(err))
		default:
			e.Waiting("pods to leave: %s", strings.Join(left, ", "))
		}
		if err := e.Sleep(ctx, drainLook); err != nil {
			return fail(err)
		}
	}
}

// cordon makes the Node unschedulable, and records that an update did so.
func cordon(ctx context.Context, e *machine.Env, name string) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	c, n, err := member.OwnNode(ctx, e, name)
	if err != nil || n.Spec.Unschedulable {
		return err
	}
	if err := e.WriteFile(cordonFile, nil, machine.Mode(0o600)); err != nil {
		return err
	}
	return patchCordon(ctx, c, name, "update", true)
}

// patchCordon sets the annotation and the field in one request. nil removes them.
func patchCordon(ctx context.Context, c *kubeapi.Client, name string, annotation, unschedulable any) error {
	return c.MergePatch(ctx, "/api/v1/nodes/"+name, map[string]any{
		"metadata": map[string]any{"annotations": map[string]any{cordonAnnotation: annotation}},
		"spec":     map[string]any{"unschedulable": unschedulable},
	})
}

// uncordon undoes cordon. If somebody else has made the Node unschedulable, it stays so.
func uncordon(ctx context.Context, e *machine.Env) error {
	if !e.Exists(cordonFile) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	name := member.NodeName(e)
	c, n, err := member.OwnNode(ctx, e, name)
	if err == nil && n.Metadata.Annotations[cordonAnnotation] != "" {
		err = patchCordon(ctx, c, name, nil, nil)
	}
	if err != nil && !errors.Is(err, member.ErrNoNode) {
		return fmt.Errorf("making the Node schedulable again: %w", err)
	}
	return e.Remove(cordonFile)
}

// uncordonAfterKill undoes the cordon of an update that was killed while it drained the Node.
func uncordonAfterKill(ctx context.Context, e *machine.Env) error {
	if !e.Exists(cordonFile) {
		return nil
	}
	unlock, err := run.Exclusive(ctx, e)
	if err != nil {
		return nil // the update still runs, or Finish does this once the new system is kept
	}
	defer unlock()
	return uncordon(ctx, e)
}

// evictAll requests the eviction of the Node's pods. It returns the pods that are left, with the
// reasons.
func evictAll(ctx context.Context, e *machine.Env, node string) (left []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	c, err := member.NodeClient(e)
	if err != nil {
		return nil, err
	}
	pods, err := c.PodsOn(ctx, node)
	if err != nil {
		return nil, err
	}
	for _, p := range pods {
		if p.Stays() {
			continue
		}
		name := p.Metadata.Namespace + "/" + p.Metadata.Name
		if p.Metadata.DeletionTimestamp == "" {
			switch err := c.Evict(ctx, p); {
			case kubeapi.Code(err) == 404:
				continue
			case kubeapi.Code(err) == 429: // a PodDisruptionBudget forbids it
				name += " (a PodDisruptionBudget prevents its eviction now)"
			case err != nil: // for example 403, while the namespace is being deleted
				name += " (" + machine.OneLine(err) + ")"
			}
		}
		left = append(left, name)
	}
	slices.Sort(left)
	return left, nil
}
