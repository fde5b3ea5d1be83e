package member

import (
	"cmp"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// Redirected reports whether kubelet is told to go through yurthub.
func Redirected(e *machine.Env) bool {
	return openyurt.IsTurned(string(e.Contents(KubeadmFlags)))
}

// Name is the name that kubelet's certificate, valid or not, is for;
// "" on a machine that is not a node.
func Name(e *machine.Env) string {
	cert, _ := Enrolment(e)
	return NodeIn(cert)
}

// NodeUser and the name of a node are the user that its kubelet is to the cluster.
const NodeUser = "system:node:"

// NodeIn is the node that kubelet's certificate is for; of nil and of one for
// somebody else, "".
func NodeIn(cert *x509.Certificate) string {
	if cert == nil {
		return ""
	}
	name, ok := strings.CutPrefix(cert.Subject.CommonName, NodeUser)
	if !ok {
		return ""
	}
	return name
}

// Is reports whether the machine has credentials of a cluster, also such
// that have expired or are not valid yet.
func Is(e *machine.Env) bool {
	err := Enrolled(e)
	return err == nil || OutOfTime(err)
}

// KubeletServer is where kubelet.conf points.
func KubeletServer(e *machine.Env) (server, tlsServerName string, err error) {
	k, err := KubeletConfig(e)
	if err != nil {
		return "", "", err
	}
	c, err := k.Cluster()
	if err != nil {
		return "", "", err
	}
	return c.Server, c.TLSServerName, nil
}

// LeadsToHub reports whether kubelet.conf, or what stands in its place, leads
// to yurthub: then the node's own certificate is yurthub's.
func LeadsToHub(kubeletConf *api.Kubeconfig) bool {
	c, err := kubeletConf.Cluster()
	return err == nil && c.Server == openyurt.Proxy
}

// KubeletConfig is kubelet.conf, or what stands in its place.
func KubeletConfig(e *machine.Env) (*api.Kubeconfig, error) {
	return e.KubeconfigAt(ondisk.KubeletConf, "kubelet's credentials")
}

// Credentials is the kubeconfig with this node's own certificate.
func Credentials(e *machine.Env) (*api.Kubeconfig, error) {
	k, err := KubeletConfig(e)
	if err != nil {
		return nil, err
	}
	return ownKubeconfig(e, k)
}

// ownKubeconfig is the kubeconfig with this node's own certificate, which kubelet.conf
// has or leads to.
func ownKubeconfig(e *machine.Env, kubeletConf *api.Kubeconfig) (*api.Kubeconfig, error) {
	if !LeadsToHub(kubeletConf) {
		return kubeletConf, nil
	}
	return e.KubeconfigAt(openyurt.Identity, "yurthub's credentials")
}

// OtherForm is what an enrolled node meets whose image was replaced by one
// with the other form of yurthub.
func OtherForm(e *machine.Env, pod bool) error {
	k, err := KubeletConfig(e)
	if err != nil || LeadsToHub(k) == pod {
		return nil
	}
	return run.NeedsPerson(errors.New("this node's certificate belongs to another form of yurthub than the image's"),
		"run `firstboot reset` on the machine, and join it again with a new token")
}

// ResetForName is the fix of a worker; a control-plane node cannot be reset.
const ResetForName = "run `firstboot reset` on the machine to join under the new name, or give nodeName back its value"

// SameName makes sure that the site means the node that this machine is.
func SameName(cert *x509.Certificate, name, fix string) error {
	if is := NodeIn(cert); is != name {
		return run.NeedsPerson(fmt.Errorf("this machine is enrolled as %s, the Site calls it %s", cmp.Or(is, cert.Subject.CommonName), name), fix)
	}
	return nil
}

// NodeClient reads with the node's own certificate, through the endpoint and
// past yurthub.
func NodeClient(e *machine.Env) (*api.Client, error) {
	k, err := Credentials(e)
	if err != nil {
		return nil, err
	}
	return e.ClientOf(k)
}
