package hub

import (
	"context"
	"errors"
	"fmt"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/site"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// workerNode describes this machine: a worker node that can be converted or reverted in place.
type workerNode struct {
	node   string
	image  ondisk.ImageInfo
	active *site.Active // nil if the machine has no Site
}

func changeableNode(ctx context.Context, e *machine.Env) (workerNode, error) {
	image, err := site.ImageInfo(e)
	if err != nil {
		return workerNode{}, err
	}
	active := site.IfAny(e, image)
	name, err := changeableName(ctx, e)
	return workerNode{name, image, active}, err
}

// changeableName returns the node's name, or an error if the node cannot be converted or reverted
// now, for example because it is a control-plane node or first boot is running.
func changeableName(ctx context.Context, e *machine.Env) (string, error) {
	if e.Exists(ondisk.ManifestsDir + "/kube-apiserver.yaml") {
		return "", errors.New("this machine runs a control plane, whose kubelet must not connect through yurthub")
	}
	if k, err := member.KubeletConfig(e); err == nil && member.LeadsToHub(k) {
		return "", run.Advise(fmt.Errorf("this is an OpenYurt node whose kubelet has no certificate of its own (yurthub before %s, a static pod): it cannot be changed in place", openyurt.Release(openyurt.FirstUnit)),
			"run `firstboot reset`, then join the machine again with the other nodeType")
	}
	cert, err := member.Enrolment(e)
	if err != nil {
		return "", fmt.Errorf("only a node that kubeadm joined can be converted or reverted: %w", err)
	}
	if err := run.Idle(ctx, e); err != nil {
		return "", err
	}
	name := member.CertNodeName(cert)
	if name == "" {
		return "", fmt.Errorf("kubelet's certificate is for %q, which is not a node", cert.Subject.CommonName)
	}
	return name, nil
}

// isHubNode reports whether this is a complete OpenYurt node: kubelet is redirected to yurthub, and
// the Node has all labels. After an interrupted convert it returns false.
func isHubNode(e *machine.Env, n *kubeapi.Node) bool {
	return member.Redirected(e) && openyurt.Labelled(n.Metadata.Labels)
}
