package firstboot

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/ondisk"
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
	if s, err := LoadState(e.Root); err == nil && s.BootID == bootID(e) && !s.Updated.Before(since.Earlier()) {
		result = s.Result
	}
	if result == ondisk.ResultDone {
		return nil
	}
	return Advise(fmt.Errorf("first boot is at work on this machine, and not done (%s)", result),
		"`firstboot status` says what it waits for; wait until it is done, or stop it: systemctl stop firstboot")
}

// changeable is this machine, a worker node that can be converted or reverted in
// place.
type changeable struct {
	node   string
	image  ondisk.ImageInfo
	active *Active // nil: none
}

func changeableNode(ctx context.Context, e *Env) (changeable, error) {
	image, err := imageInfo(e)
	if err != nil {
		return changeable{}, err
	}
	active := siteIfAny(e, image)
	name, err := changeableName(ctx, e)
	return changeable{name, image, active}, err
}

// changeableName is the name of the node. A control plane cannot be changed in
// place, nor can a node that first boot is still making.
func changeableName(ctx context.Context, e *Env) (string, error) {
	if e.exists(manifests + "/kube-apiserver.yaml") {
		return "", errors.New("this machine runs a control plane: yurthub must not stand between an API server and its own kubelet")
	}
	if k, err := kubeletConfig(e); err == nil && leadsToHub(k) {
		return "", Advise(fmt.Errorf("this is an OpenYurt node whose kubelet has no certificate of its own (yurthub before %s, a static pod): it cannot be changed in place", openyurt.Release(openyurt.FirstUnit)),
			"run `firstboot reset`, then join the machine again with the other nodeType")
	}
	cert, err := enrolment(e)
	if err != nil {
		return "", fmt.Errorf("only a node that kubeadm joined can be converted or reverted, and %w", err)
	}
	if err := firstbootIdle(ctx, e); err != nil {
		return "", err
	}
	name := nodeIn(cert)
	if name == "" {
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

// readyNow looks whether the cluster sees the node Ready, by the word of the
// kubelet that runs.
func readyNow(ctx context.Context, e *Env, n *api.Node) error {
	if ready, why := n.Ready(); !ready {
		return fmt.Errorf("node %s is not Ready: %s", n.Metadata.Name, why)
	}
	return reported(ctx, e, n)
}

// isHubNode reports whether this is an OpenYurt node, whole: kubelet goes through
// yurthub, and the Node has all labels. A convert that was killed has left less; run
// again, it continues.
func isHubNode(e *Env, n *api.Node) bool {
	return redirected(e) && openyurt.Labelled(n.Metadata.Labels)
}

// siteIfAny is the active Site; nil on a node that edgebake did not build, or
// whose Site cannot be read.
func siteIfAny(e *Env, image ondisk.ImageInfo) *Active {
	active, err := activeSite(e, image, nil)
	if err != nil {
		e.Log.Info("continuing without a Site", "reason", err)
		return nil
	}
	return active
}
