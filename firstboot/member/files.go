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

// LeavingFile marks that the machine is leaving its cluster. After an interruption the next run
// completes that, since half of the credentials are useless.
const LeavingFile = ondisk.StateDir + "/leaving"

// ControlPlaneMark identifies the documents and the proxy from which the control plane's pods
// and kubelet's settings were made. It is written after them.
const ControlPlaneMark = ondisk.StateDir + "/control-plane"

const (
	// hubBootstrapDir is on /run, since the token must not be on a disk. The token is read from the
	// slot again after each boot, while it is needed.
	hubBootstrapDir = ondisk.RunDir + "/yurthub"
	// HubBootstrap is the kubeconfig with which yurthub requests its certificates.
	HubBootstrap = hubBootstrapDir + "/bootstrap-hub.conf"
)

// Files that may hold the token are on /run, which is lost at a reboot.
const (
	DiscoveryFile = ondisk.RunDir + "/discovery.conf"
	JoinFile      = ondisk.RunDir + "/join.yaml"
	BootstrapRun  = ondisk.RunDir + "/bootstrap-kubelet.conf"
	// BootstrapConf is where kubeadm writes the token for kubelet. It is first made a link to /run,
	// since deleted data stays readable in a disk's free blocks.
	BootstrapConf = ondisk.KubernetesDir + "/bootstrap-kubelet.conf"
	KubeadmFlags  = "/var/lib/kubelet/kubeadm-flags.env"
	KubeletPKI    = "/var/lib/kubelet/pki"
	ClientCert    = KubeletPKI + "/kubelet-client-current.pem"
	// PendingKey is the key for which kubelet has requested a certificate. With it, the next
	// attempt continues the same CSR, which may soon be approved.
	PendingKey = KubeletPKI + "/kubelet-client.key.tmp"
)

// PKIDir holds the cluster's CA and, on a control-plane node, its keys.
const PKIDir = ondisk.KubernetesDir + "/pki"

// KubeletKeys lists the key pairs that kubelet made while joining.
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

// ReadyMark marks that the cluster has reported this node as Ready once. It is
// recorded, since it cannot be observed offline.
const ReadyMark = ondisk.StateDir + "/ready"

// TokenFiles lists files that may hold the token, or link to it.
var TokenFiles = []string{DiscoveryFile, JoinFile, BootstrapRun, BootstrapConf, HubBootstrap}

// ClusterFiles returns this machine's files of its cluster, except the
// credentials, which kubeadm and kubelet keep.
func ClusterFiles(e *machine.Env) []string {
	return slices.Concat(TokenFiles, ServingCerts(e), []string{JoinedFile, JoinedCluster})
}

// ResetFiles lists further files that a reset removes.
var ResetFiles = []string{ReadyMark, RecordFile, ProvenFile, ControlPlaneMark}

// KubeadmArgs matches the line of kubeadm-flags.env with kubelet's arguments.
var KubeadmArgs = regexp.MustCompile(`(?m)^(KUBELET_KUBEADM_ARGS=")(.*)(")[ \t]*$`)

// ServingCert and ServingKey are kubelet's serving certificate and key if its
// cluster has not set serverTLSBootstrap.
const (
	ServingCert = KubeletPKI + "/kubelet.crt"
	ServingKey  = KubeletPKI + "/kubelet.key"
)

// SnapshotDir holds snapshots of etcd, on DATA. No reset removes it.
const SnapshotDir = ondisk.StateDir + "/snapshots"
