package member

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// LeavingFile says that the machine is leaving its cluster: whoever finds it
// carries that to its end, since half of the credentials serve nothing.
const LeavingFile = ondisk.StateDir + "/leaving"

// ControlPlaneMark names the documents and the proxy that the control plane's pods
// and kubelet's settings were made from, once they are on the disk.
const ControlPlaneMark = ondisk.StateDir + "/control-plane"

const (
	// The token is on /run, gone with the power; as long as it is needed it
	// comes from the slot again.
	hubBootstrapDir = ondisk.RunDir + "/yurthub"
	// HubBootstrap is the kubeconfig by which yurthub asks for its certificates.
	HubBootstrap = hubBootstrapDir + "/bootstrap-hub.conf"
)

// Files that hold the token, all on /run: it is gone with the power.
const (
	DiscoveryFile = ondisk.RunDir + "/discovery.conf"
	JoinFile      = ondisk.RunDir + "/join.yaml"
	BootstrapRun  = ondisk.RunDir + "/bootstrap-kubelet.conf"
	// BootstrapConf is where kubeadm writes the token for kubelet. It is made
	// a link to /run beforehand: what is deleted from a disk stays in its
	// free blocks.
	BootstrapConf = ondisk.KubernetesDir + "/bootstrap-kubelet.conf"
	KubeadmFlags  = "/var/lib/kubelet/kubeadm-flags.env"
	KubeletPKI    = "/var/lib/kubelet/pki"
	ClientCert    = KubeletPKI + "/kubelet-client-current.pem"
	// PendingKey is the key for which kubelet has requested a certificate. With it the
	// next try continues with the same CSR, behind which others may wait by now.
	PendingKey = KubeletPKI + "/kubelet-client.key.tmp"
)

// PKIDir has the cluster's CA, and a control plane's keys.
const PKIDir = ondisk.KubernetesDir + "/pki"

// KubeletKeys are the key pairs that kubelet made while joining.
func KubeletKeys(e *machine.Env) []string { return inKubeletPKI(e, "kubelet-client", "kubelet.") }

// ServingCerts are kubelet's serving certificates that its cluster has signed.
func ServingCerts(e *machine.Env) []string { return inKubeletPKI(e, "kubelet-server") }

func inKubeletPKI(e *machine.Env, prefixes ...string) []string {
	entries, err := os.ReadDir(e.Path(KubeletPKI))
	if err != nil {
		return nil
	}
	var out []string
	for _, en := range entries {
		if slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(en.Name(), p) }) {
			out = append(out, filepath.Join(KubeletPKI, en.Name()))
		}
	}
	return out
}

// ReadyMark says that the cluster has seen this enrolment Ready once, which
// cannot be observed offline.
const ReadyMark = ondisk.StateDir + "/ready"

// TokenFiles may hold the token, or point to where it was.
var TokenFiles = []string{DiscoveryFile, JoinFile, BootstrapRun, BootstrapConf, HubBootstrap}

// KubeadmArgs matches the line of kubeadm-flags.env with kubelet's arguments.
var KubeadmArgs = regexp.MustCompile(`(?m)^(KUBELET_KUBEADM_ARGS=")(.*)(")[ \t]*$`)

// What kubelet serves with where its cluster has not set serverTLSBootstrap.
const (
	ServingCert = KubeletPKI + "/kubelet.crt"
	ServingKey  = KubeletPKI + "/kubelet.key"
)

// SnapshotDir holds snapshots of etcd, on DATA, which no reset removes.
const SnapshotDir = ondisk.StateDir + "/snapshots"
