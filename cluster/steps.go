package cluster

import (
	"fmt"
	"strings"

	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/openyurt"
)

// On a cluster that edgebake did not build, a person has to change certificates and static pods.
// The Step functions below return the commands. The first command edits kubeadm-config, so that
// the next `kubeadm upgrade` keeps the change. The commands for each node keep the former files.

// onEachControlPlaneNode returns commands that run one kubeadm phase with the configuration in
// kubeadm-config. They first move the files in kept to a backup directory, so that the phase
// creates new ones.
func onEachControlPlaneNode(phase string, kept ...string) string {
	return strings.Join([]string{
		"Then, on each control-plane node, one after the other: kubectl --kubeconfig /etc/kubernetes/admin.conf -n kube-system get configmap kubeadm-config -o jsonpath='{.data.ClusterConfiguration}' > /root/kubeadm.yaml",
		// Each node has to insert its own address.
		`printf -- '\n---\napiVersion: %s\nkind: InitConfiguration\nlocalAPIEndpoint: {advertiseAddress: "%s"}\n' "$(sed -n 's/^apiVersion: //p' /root/kubeadm.yaml)" "$(sed -n 's/.*--advertise-address=//p' /etc/kubernetes/manifests/kube-apiserver.yaml)" >> /root/kubeadm.yaml`,
		"mkdir -p /root/before-edgebake",
		"mv " + strings.Join(kept, " ") + " /root/before-edgebake/",
		"kubeadm init phase " + phase + " --config /root/kubeadm.yaml",
	}, " && ") + ". To undo it, move the files from /root/before-edgebake back"
}

const editConfig = "kubectl -n kube-system edit configmap kubeadm-config: "

// certSANsStep returns the step that adds names to the API servers' certificates. API servers
// reload their certificates themselves.
func certSANsStep(names []string) string {
	return editConfig + "add " + strings.Join(names, " and ") + " to the list apiServer.certSANs. " +
		onEachControlPlaneNode("certs apiserver", "/etc/kubernetes/pki/apiserver.crt", "/etc/kubernetes/pki/apiserver.key")
}

// controllersStep returns the step that sets kube-controller-manager's controllers to kubeadm's
// list, with or without nodelifecycle.
func controllersStep(without bool) string {
	list := "*,bootstrapsigner,tokencleaner"
	if without {
		list = "-" + openyurt.NodeLifecycle + "," + list
	}
	return editConfig + `set "controllers" among controllerManager.extraArgs to "` + list + `". ` +
		onEachControlPlaneNode("control-plane controller-manager", "/etc/kubernetes/manifests/kube-controller-manager.yaml")
}

// managerRateStep returns the step that sets kube-controller-manager's request rates to those of a
// control plane built by edgebake.
func managerRateStep() string {
	return editConfig + fmt.Sprintf(`set "kube-api-qps" to "%d" and "kube-api-burst" to "%d" among controllerManager.extraArgs. `, clusterdoc.ManagerQPS, 2*clusterdoc.ManagerQPS) +
		onEachControlPlaneNode("control-plane controller-manager", "/etc/kubernetes/manifests/kube-controller-manager.yaml")
}

// podRoomStep returns the step that enlarges the pod network. The existing nodes keep their ranges.
func podRoomStep() string {
	return editConfig + `set networking.podSubnet to a larger network that contains the present one. ` +
		onEachControlPlaneNode("control-plane controller-manager", "/etc/kubernetes/manifests/kube-controller-manager.yaml") +
		" Then give the same network to the network plugin and to kube-proxy (clusterCIDR)."
}

// lifecycleFix returns the fix if both or neither of kube-controller-manager and yurt-manager
// monitor nodes. version is yurt-manager's; "" if unknown.
func lifecycleFix(version string, both bool) string {
	older := openyurt.RunsLifecycle(version)
	switch {
	case both && older:
		return "OpenYurt " + version + " runs this controller itself. " + controllersStep(true)
	case both:
		return "give " + openyurt.Manager + " --controllers=-" + openyurt.NodeLifecycle + ",* (the default of its chart since " + openyurt.LifecycleSince + "): kubectl -n " + openyurt.ManagerNamespace + " edit deployment " + openyurt.Manager
	case older:
		return "OpenYurt " + version + " runs this controller itself: remove -" + openyurt.NodeLifecycle + " from --controllers of " + openyurt.Manager + ": kubectl -n " + openyurt.ManagerNamespace + " edit deployment " + openyurt.Manager
	}
	return "Since " + openyurt.LifecycleSince + ", OpenYurt leaves this to kube-controller-manager. " + controllersStep(false)
}

// tagOf returns the version in the tag of an image.
func tagOf(image string) string {
	image, _, _ = strings.Cut(image, "@")
	_, tag, _ := strings.Cut(image[strings.LastIndexByte(image, '/')+1:], ":")
	if tag != "" && tag[0] != 'v' {
		tag = "v" + tag
	}
	return tag
}
