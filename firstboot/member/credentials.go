package member

import (
	"cmp"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"

	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/servercert"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// Redirected reports whether kubelet's arguments redirect it to yurthub.
func Redirected(e *machine.Env) bool {
	return openyurt.IsRedirected(string(e.Contents(KubeadmFlags)))
}

// NodeName returns the node's name in kubelet's certificate, valid or not, or "" on a machine that
// is not a node.
func NodeName(e *machine.Env) string {
	cert, _ := Enrolment(e)
	return CertNodeName(cert)
}

// NodeUser is the part of a kubelet's user name before the node's name.
const NodeUser = servercert.NodeUser

// CertNodeName returns the node's name in kubelet's certificate, or "" if cert is nil or not
// kubelet's.
func CertNodeName(cert *x509.Certificate) string {
	if cert == nil {
		return ""
	}
	name, ok := strings.CutPrefix(cert.Subject.CommonName, NodeUser)
	if !ok {
		return ""
	}
	return name
}

// HasCredentials reports whether the machine has credentials of a cluster. Their certificate may
// have expired, or may not be valid yet.
func HasCredentials(e *machine.Env) bool {
	err := Enrolled(e)
	return err == nil || OutOfTime(err)
}

// KubeletServer returns the server URL and the tls-server-name in kubelet.conf.
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

// LeadsToHub reports whether kubelet.conf has yurthub as its server. Then yurthub has the node's
// own certificate.
func LeadsToHub(kubeletConf *kubeapi.Kubeconfig) bool {
	c, err := kubeletConf.Cluster()
	return err == nil && c.Server == openyurt.Proxy
}

// KubeletConfig reads kubelet.conf.
func KubeletConfig(e *machine.Env) (*kubeapi.Kubeconfig, error) {
	return e.KubeconfigAt(ondisk.KubeletConf, "kubelet's credentials")
}

// Credentials returns the kubeconfig with this node's own certificate.
func Credentials(e *machine.Env) (*kubeapi.Kubeconfig, error) {
	k, err := KubeletConfig(e)
	if err != nil {
		return nil, err
	}
	return ownKubeconfig(e, k)
}

// ownKubeconfig returns the kubeconfig with this node's own certificate: kubelet.conf, or yurthub's
// kubeconfig if yurthub is the server in kubelet.conf.
func ownKubeconfig(e *machine.Env, kubeletConf *kubeapi.Kubeconfig) (*kubeapi.Kubeconfig, error) {
	if !LeadsToHub(kubeletConf) {
		return kubeletConf, nil
	}
	return e.KubeconfigAt(openyurt.Identity, "yurthub's credentials")
}

// OtherForm returns an error if the node enrolled with another form of yurthub than the image's.
// pod means that the image's form is a static pod.
func OtherForm(e *machine.Env, pod bool) error {
	k, err := KubeletConfig(e)
	if err != nil || LeadsToHub(k) == pod {
		return nil
	}
	return run.NeedsPerson(errors.New("this node joined with yurthub in another form (static pod or systemd unit) than its image has"),
		"run `firstboot reset` on the machine, and join it again with a new token")
}

// ResetForName is the fix for a worker that is enrolled under another name.
// A control-plane node cannot be reset.
const ResetForName = "run `firstboot reset` on the machine to join under the new name, or set the old nodeName again"

// SameName returns an error if the node's name in cert differs from name, which the Site gives it.
func SameName(cert *x509.Certificate, name, fix string) error {
	if is := CertNodeName(cert); is != name {
		return run.NeedsPerson(fmt.Errorf("this machine is enrolled as %s, but the Site names it %s", cmp.Or(is, cert.Subject.CommonName), name), fix)
	}
	return nil
}

// NodeClient returns a client with the node's own certificate. It connects to the endpoint, not to
// yurthub.
func NodeClient(e *machine.Env) (*kubeapi.Client, error) {
	k, err := Credentials(e)
	if err != nil {
		return nil, err
	}
	return e.ClientOf(k)
}
