package firstboot

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// firstbootIdle is an error while first boot is on its way to what the site
// says: the two would undo each other's work. One that has said that it is done
// only sends its report.
func firstbootIdle(ctx context.Context, e *Env) error {
	switch state, err := e.UnitState(ctx, ondisk.UnitFirstboot); {
	case err != nil:
		return err
	case state != "active" && state != "activating" && state != "reloading":
		return nil
	}
	since, err := e.UnitSince(ctx, ondisk.UnitFirstboot)
	if err != nil {
		return err
	}
	result := ondisk.ResultRunning // also where an earlier run wrote the state, or nobody can read it
	if s, err := LoadState(e.Root); err == nil && !s.Updated.Before(since) {
		result = s.Result
	}
	if result == ondisk.ResultDone {
		return nil
	}
	return Advise(fmt.Errorf("first boot is at work on this machine, and not done (%s)", result),
		"`firstboot status` says what it waits for; wait until it is done, or stop it: systemctl stop firstboot")
}

// changeableNode is the name of this worker node; a control plane is rejected, and
// so is one that first boot is still making.
func changeableNode(ctx context.Context, e *Env) (string, error) {
	if e.exists(manifests + "/kube-apiserver.yaml") {
		return "", errors.New("this machine runs a control plane: yurthub must not stand between an API server and its own kubelet")
	}
	if k, err := kubeletConfig(e); err == nil && leadsToHub(k) {
		return "", fmt.Errorf("this is an OpenYurt node whose kubelet has no certificate of its own (yurthub before %s, a static pod) and cannot be changed in place: run `firstboot reset`, then join it again with the other nodeType", openyurt.Release(openyurt.FirstUnit))
	}
	cert, err := enrolment(e)
	if err != nil {
		return "", fmt.Errorf("only a node that kubeadm joined can be converted or reverted, and %w", err)
	}
	if err := firstbootIdle(ctx, e); err != nil {
		return "", err
	}
	name, ok := strings.CutPrefix(cert.Subject.CommonName, "system:node:")
	if !ok {
		return "", fmt.Errorf("kubelet's certificate is for %q, which is not a node", cert.Subject.CommonName)
	}
	return name, nil
}

// redirected reports whether kubelet is told to go through yurthub.
func redirected(e *Env) bool {
	return openyurt.IsTurned(string(e.contents(kubeadmFlags)))
}

// errUnread says that nothing is known about the Node.
var errUnread = errors.New("its Node cannot be read")

// readNode asks the API server as kubelet.conf says, past yurthub.
func readNode(ctx context.Context, e *Env, name string) (*api.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	c, err := nodeClient(e)
	if err != nil {
		return nil, err
	}
	n, err := c.GetNode(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnread, err)
	}
	return n, nil
}

func readyNow(ctx context.Context, e *Env, name string) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	n, err := readNode(ctx, e, name)
	if err != nil {
		return err
	}
	if ready, why := n.Ready(); !ready {
		return fmt.Errorf("node %s is not Ready: %s", name, why)
	}
	return reported(ctx, e, n)
}

// hubNode returns the Node's labels where this is an OpenYurt node, whole:
// kubelet goes through yurthub and both labels are there. A convert that was
// killed, and goes on when it is run again, has left less; then it is nil.
func hubNode(ctx context.Context, e *Env, name string) (map[string]string, error) {
	if !redirected(e) {
		return nil, nil
	}
	n, err := readNode(ctx, e, name)
	if err != nil {
		return nil, err
	}
	if l := n.Metadata.Labels; openyurt.Labelled(l) {
		return l, nil
	}
	return nil, nil
}

// siteIfAny is the active Site; nil on a node that edgebake did not build, or
// whose Site cannot be read.
func siteIfAny(e *Env, image ondisk.ImageInfo) *Active {
	active, err := activeSite(e, image, nil)
	if err != nil {
		e.Log.Info("going on without a site", "reason", err)
		return nil
	}
	return active
}
