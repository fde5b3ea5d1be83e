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

// LeavingFile exists while the machine is leaving its cluster. After an interruption, the next run
// continues to leave, because incomplete credentials are useless.
const LeavingFile = ondisk.StateDir + "/leaving"

// ControlPlaneMark contains a hash of the image's plan, kubeadm's documents and the proxy, from
// which the control plane's pods and kubelet's settings were made. It is written after these.
const ControlPlaneMark = ondisk.StateDir + "/control-plane"

const (
	// hubBootstrapDir is in /run, because the token must not be stored on a disk. While the token
	// is needed, each boot reads it from the slot.
	hubBootstrapDir = ondisk.RunDir + "/yurthub"
	// HubBootstrap is the kubeconfig with which yurthub requests its certificates.
	HubBootstrap = hubBootstrapDir + "/bootstrap-hub.conf"
)

// Files that may contain the token are in /run, which a reboot clears.
const (
	DiscoveryFile = ondisk.RunDir + "/discovery.conf"
	JoinFile      = ondisk.RunDir + "/join.yaml"
	BootstrapRun  = ondisk.RunDir + "/bootstrap-kubelet.conf"
	// BootstrapConf is the path to which kubeadm writes kubelet's token. First boot makes it a link
	// into /run, because deleted data stays readable in free blocks of a disk.
	BootstrapConf = ondisk.KubernetesDir + "/bootstrap-kubelet.conf"
	KubeadmFlags  = "/var/lib/kubelet/kubeadm-flags.env"
	KubeletPKI    = "/var/lib/kubelet/pki"
	ClientCert    = KubeletPKI + "/kubelet-client-current.pem"
	// PendingKey is the key for which kubelet has requested a certificate. With this key, the next
	// attempt continues the same CSR, which may be approved soon.
	PendingKey = KubeletPKI + "/kubelet-client.key.tmp"
)

// PKIDir contains the cluster's CA and, on a control-plane node, its keys.
const PKIDir = ondisk.KubernetesDir + "/pki"

// KubeletKeys lists the files of kubelet's client certificates and of its self-signed serving
// certificate.
func KubeletKeys(e *machine.Env) []string { return inKubeletPKI(e, "kubelet-client", "kubelet.") }

// ServingCerts lists kubelet's serving certificates that its cluster has signed.
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

// ReadyMark exists if the cluster has ever reported this node as Ready. It is for boots without a
// connection to the cluster.
const ReadyMark = ondisk.StateDir + "/ready"

// TokenFiles lists the files that may contain the token, or link to it.
var TokenFiles = []string{DiscoveryFile, JoinFile, BootstrapRun, BootstrapConf, HubBootstrap}

// ClusterFiles returns the files that depend on this machine's cluster, except the credentials of
// kubeadm and kubelet.
func ClusterFiles(e *machine.Env) []string {
	return slices.Concat(TokenFiles, ServingCerts(e), []string{JoinedFile, JoinedCluster})
}

// ResetFiles lists further files that a reset removes.
var ResetFiles = []string{ReadyMark, RecordFile, ProvenFile, ControlPlaneMark}

// KubeadmArgs matches the line of kubeadm-flags.env with kubelet's arguments.
var KubeadmArgs = regexp.MustCompile(`(?m)^(KUBELET_KUBEADM_ARGS=")(.*)(")[ \t]*$`)

// ServingCert and ServingKey are kubelet's serving certificate and key if the cluster does not set
// serverTLSBootstrap.
const (
	ServingCert = KubeletPKI + "/kubelet.crt"
	ServingKey  = KubeletPKI + "/kubelet.key"
)

// SnapshotDir contains snapshots of etcd, on DATA. No reset removes it.
const SnapshotDir = ondisk.StateDir + "/snapshots"
