package firstboot

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// leavingFile says that the machine is leaving its cluster: whoever finds it
// carries that to its end, since half of the credentials serve nothing.
const leavingFile = ondisk.StateDir + "/leaving"

// controlPlaneMark names the documents and the proxy that the control plane's pods
// and kubelet's settings were made from, once they are on the disk.
const controlPlaneMark = ondisk.StateDir + "/control-plane"

const manifests = ondisk.ManifestsDir

const (
	// The token is on /run, gone with the power; as long as it is needed it
	// comes from the slot again.
	hubBootstrapDir = ondisk.RunDir + "/yurthub"
	hubBootstrap    = hubBootstrapDir + "/bootstrap-hub.conf"
)

// Files that hold the token, all on /run: it is gone with the power.
const (
	discoveryFile = ondisk.RunDir + "/discovery.conf"
	joinFile      = ondisk.RunDir + "/join.yaml"
	bootstrapRun  = ondisk.RunDir + "/bootstrap-kubelet.conf"
	// bootstrapConf is where kubeadm writes the token for kubelet. It is made
	// a link to /run beforehand: what is deleted from a disk stays in its
	// free blocks.
	bootstrapConf = ondisk.KubernetesDir + "/bootstrap-kubelet.conf"
	kubeadmFlags  = "/var/lib/kubelet/kubeadm-flags.env"
	kubeletPKI    = "/var/lib/kubelet/pki"
	clientCert    = kubeletPKI + "/kubelet-client-current.pem"
	// pendingKey is the key for which kubelet has requested a certificate. With it the
	// next try continues with the same CSR, behind which others may wait by now.
	pendingKey = kubeletPKI + "/kubelet-client.key.tmp"
)

const pkiDir = ondisk.KubernetesDir + "/pki"

// kubeletKeys are the key pairs that kubelet made while joining.
func kubeletKeys(e *machine.Env) []string {
	entries, err := os.ReadDir(e.Path(kubeletPKI))
	if err != nil {
		return nil
	}
	var out []string
	for _, en := range entries {
		if strings.HasPrefix(en.Name(), "kubelet-client") || strings.HasPrefix(en.Name(), "kubelet.") {
			out = append(out, filepath.Join(kubeletPKI, en.Name()))
		}
	}
	return out
}

// readyMark says that the cluster has seen this enrolment Ready once, which
// cannot be observed offline.
const readyMark = ondisk.StateDir + "/ready"

// tokenFiles may hold the token, or point to where it was.
var tokenFiles = []string{discoveryFile, joinFile, bootstrapRun, bootstrapConf, hubBootstrap}

var kubeadmArgs = regexp.MustCompile(`(?m)^(KUBELET_KUBEADM_ARGS=")(.*)(")[ \t]*$`)

// What kubelet serves with where its cluster has not set serverTLSBootstrap.
const (
	servingCert = kubeletPKI + "/kubelet.crt"
	servingKey  = kubeletPKI + "/kubelet.key"
)

// snapshotDir holds snapshots of etcd, on DATA, which no reset removes.
const snapshotDir = ondisk.StateDir + "/snapshots"
