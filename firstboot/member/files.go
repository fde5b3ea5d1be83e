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

// LeavingFile marks that the machine is leaving its cluster. The next run completes that,
// since half of the credentials are useless.
const LeavingFile = ondisk.StateDir + "/leaving"

// ControlPlaneMark records the documents and the proxy that the control plane's pods and
// kubelet's settings were made from, once they are on the disk.
const ControlPlaneMark = ondisk.StateDir + "/control-plane"

const (
	// On /run, since the token must not be on a disk: while it is needed, it is read from the
	// slot again after each start.
	hubBootstrapDir = ondisk.RunDir + "/yurthub"
	// HubBootstrap is the kubeconfig with which yurthub requests its certificates.
	HubBootstrap = hubBootstrapDir + "/bootstrap-hub.conf"
)

// Files that may hold the token are on /run, which loses it with the power.
const (
	DiscoveryFile = ondisk.RunDir + "/discovery.conf"
	JoinFile      = ondisk.RunDir + "/join.yaml"
	BootstrapRun  = ondisk.RunDir + "/bootstrap-kubelet.conf"
	// BootstrapConf is where kubeadm writes the token for kubelet. It is made a link to /run
	// beforehand, since deleted data stays in the free blocks of a disk.
	BootstrapConf = ondisk.KubernetesDir + "/bootstrap-kubelet.conf"
	KubeadmFlags  = "/var/lib/kubelet/kubeadm-flags.env"
	KubeletPKI    = "/var/lib/kubelet/pki"
	ClientCert    = KubeletPKI + "/kubelet-client-current.pem"
	// PendingKey is the key for which kubelet has requested a certificate. With it, the next
	// attempt continues with the same CSR, which may be about to be approved.
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

// ReadyMark marks that the cluster has shown this node Ready once, which cannot be observed
// offline.
const ReadyMark = ondisk.StateDir + "/ready"

// TokenFiles may hold the token, or link to it.
var TokenFiles = []string{DiscoveryFile, JoinFile, BootstrapRun, BootstrapConf, HubBootstrap}

// ClusterFiles returns the files that belong to the cluster of this machine, except its
// credentials, which kubeadm and kubelet keep.
func ClusterFiles(e *machine.Env) []string {
	return slices.Concat(TokenFiles, ServingCerts(e), []string{JoinedFile, JoinedCluster})
}

// ResetFiles are further files that a reset removes.
var ResetFiles = []string{ReadyMark, RecordFile, ProvenFile, ControlPlaneMark}

// KubeadmArgs matches the line of kubeadm-flags.env with kubelet's arguments.
var KubeadmArgs = regexp.MustCompile(`(?m)^(KUBELET_KUBEADM_ARGS=")(.*)(")[ \t]*$`)

// kubelet's serving certificate and key if its cluster has not set serverTLSBootstrap.
const (
	ServingCert = KubeletPKI + "/kubelet.crt"
	ServingKey  = KubeletPKI + "/kubelet.key"
)

// SnapshotDir holds snapshots of etcd, on DATA. No reset removes it.
const SnapshotDir = ondisk.StateDir + "/snapshots"
