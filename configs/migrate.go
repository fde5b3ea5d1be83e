package configs

// Flag says what a flag of another tool is here.
type Flag struct {
	Tool string // "yurtadm join"
	Flag string // "--token", or "ADDRESS" for the argument
	// Fields of the documents that take its place: "Site.nodeName",
	// "Image.containerd.sandbox". Empty: Note says why there is none.
	Fields []string
	Note   string
}

// Flags is the exact equivalence with the tools edgebake takes the place of:
// yurtadm v1.7.0, yurtctl v0.6.1 (the last that converts), edgeadm v0.7.0.
func Flags() []Flag {
	const (
		onNode    = "`firstboot convert` and `revert` work on the node they run on; what belongs to the cluster is installed there, once, with OpenYurt's charts"
		oneNode   = "run on each node that is meant"
		notMaster = "control-plane nodes come from a Cluster: `edgebake cluster new` and `sites`"
		noWait    = "first boot retries forever, and says what it waits for"
	)
	return []Flag{
		{"yurtadm join", "ADDRESS[,ADDRESS...]", []string{"Site.masters"}, "all are tried at once, not only the first"},
		{"yurtadm join", "--token", []string{"Site.credentials.token"}, ""},
		{"yurtadm join", "--node-type", []string{"Site.nodeType"}, "the default is native, not edge; `local` is not built: it is no cache but iptables rules to the API servers of a tenant cluster, and a native node's masters and ipvs keep the same way open"},
		{"yurtadm join", "--node-name", []string{"Site.nodeName"}, "also a template; the default is not the host name, which is the same on every copy of an image"},
		{"yurtadm join", "--nodepool-name", []string{"Site.nodePool"}, "required for edge and cloud, as yurthub 1.7 requires it"},
		{"yurtadm join", "--namespace", []string{"Site.yurthub.namespace"}, ""},
		{"yurtadm join", "--cri-socket", []string{"Site.criSocket"}, "containerd's, not dockershim's, is the default"},
		{"yurtadm join", "--organizations", []string{"Site.organizations"}, "a list; for yurthub before 1.7, which has a certificate of its own (yurtadm 1.7 takes the flag and does nothing with it), refused when stamping another image"},
		{"yurtadm join", "--pause-image", []string{"Image.containerd.sandbox", "Image.images"}, "on board"},
		{"yurtadm join", "--yurthub-image", []string{"Image.yurthub.image"}, "for form staticPod"},
		{"yurtadm join", "--yurthub-binary-url", []string{"Image.yurthub.binary.url"}, "fetched and verified while baking, never at the join"},
		{"yurtadm join", "--yurthub-server-addr", nil, "yurthub always listens on 127.0.0.1"},
		{"yurtadm join", "--host-control-plane-addr", nil, "only for `local`, which is not built"},
		{"yurtadm join", "--kubernetes-resource-server", []string{"Image.kubernetes.source.url.base"}, "nothing is downloaded at the join"},
		{"yurtadm join", "--reuse-cni-bin", nil, "CNI plugins are always on board"},
		{"yurtadm join", "--node-labels", []string{"Site.labels"}, "those a kubelet may not set are refused before anything is written"},
		{"yurtadm join", "--ignore-preflight-errors", []string{"Site.ignorePreflightErrors"}, ""},
		{"yurtadm join", "--discovery-token-ca-cert-hash", []string{"Site.caCertHashes"}, ""},
		{"yurtadm join", "--discovery-token-unsafe-skip-ca-verification", []string{"Site.unsafeSkipCAVerification"}, ""},
		{"yurtadm join", "--static-pods", []string{"Image.files"}, "yurtadm 1.7 reads them and deploys none; put manifests into /var/lib/edgebake/persist/kubernetes/manifests, which the node has at /etc/kubernetes/manifests, and DirAvailable--etc-kubernetes-manifests into Site.ignorePreflightErrors"},
		{"yurtadm join", "--config", []string{"Site.kubeletExtraArgs", "Site.taints", "Site.skipPhases"}, "the JoinConfiguration is made from the Site; these are the parts that yurtadm has no flags for"},

		{"yurtadm reset", "--cert-dir", nil, "`firstboot reset`: the folder is always /etc/kubernetes/pki"},
		{"yurtadm reset", "--force", nil, "`firstboot reset`"},
		{"yurtadm reset", "--cri-socket", []string{"Site.criSocket"}, "`firstboot reset` takes the Site's"},
		{"yurtadm reset", "--ignore-preflight-errors", []string{"Site.ignorePreflightErrors"}, "`firstboot reset` takes the Site's"},

		{"yurtctl convert", "--cloud-nodes", []string{"Site.nodeType"}, "cloud; " + oneNode},
		{"yurtctl convert", "--autonomous-nodes", []string{"Site.nodeType"}, "edge nodes are autonomous; " + oneNode},
		{"yurtctl convert", "--yurthub-image", []string{"Image.yurthub.image"}, "on board"},
		{"yurtctl convert", "--yurthub-healthcheck-timeout", nil, noWait},
		{"yurtctl convert", "--wait-servant-job-timeout", nil, "no job runs: firstboot is on the node"},
		{"yurtctl convert", "--ignore-preflight-errors", []string{"Site.ignorePreflightErrors"}, ""},
		{"yurtctl convert", "--system-architecture", []string{"Image.arch"}, ""},
		{"yurtctl convert", "--kubeadm-conf-path", nil, "found on the node"},
		{"yurtctl convert", "--kubeconfig", nil, "the node's own credentials are used"},
		{"yurtctl convert", "--provider", nil, "any cluster that kubeadm nodes can join"},
		{"yurtctl convert", "--node-servant-image", nil, "no job runs: firstboot is on the node"},
		{"yurtctl convert", "--yurt-controller-manager-image", nil, onNode},
		{"yurtctl convert", "--deploy-yurttunnel", nil, onNode},
		{"yurtctl convert", "--yurt-tunnel-server-address", nil, onNode},
		{"yurtctl convert", "--yurt-tunnel-server-image", nil, onNode},
		{"yurtctl convert", "--yurt-tunnel-agent-image", nil, onNode},
		{"yurtctl convert", "--enable-app-manager", nil, onNode},
		{"yurtctl convert", "--yurt-app-manager-image", nil, onNode},

		{"yurtctl revert", "--node-servant-image", nil, "no job runs: firstboot is on the node"},
		{"yurtctl revert", "--kubeadm-conf-path", nil, "found on the node"},
		{"yurtctl revert", "--wait-servant-job-timeout", nil, "no job runs: firstboot is on the node"},
		{"yurtctl revert", "--kubeconfig", nil, "the node's own credentials are used"},

		{"edgeadm join", "ADDRESS", []string{"Site.masters"}, "several, in a list"},
		{"edgeadm join", "--token", []string{"Site.credentials.token"}, ""},
		{"edgeadm join", "--discovery-token", []string{"Site.credentials.token"}, "one token serves both ends"},
		{"edgeadm join", "--tls-bootstrap-token", []string{"Site.credentials.token"}, "one token serves both ends"},
		{"edgeadm join", "--discovery-token-ca-cert-hash", []string{"Site.caCertHashes"}, ""},
		{"edgeadm join", "--discovery-token-unsafe-skip-ca-verification", []string{"Site.unsafeSkipCAVerification"}, ""},
		{"edgeadm join", "--discovery-file", []string{"Site.masters", "Site.caCertHashes"}, "first boot makes it, with a master that answers"},
		{"edgeadm join", "--node-name", []string{"Site.nodeName"}, ""},
		{"edgeadm join", "--cri-socket", []string{"Site.criSocket"}, ""},
		{"edgeadm join", "--runtime", []string{"Image.containerd"}, "containerd; docker is not served"},
		{"edgeadm join", "--ignore-preflight-errors", []string{"Site.ignorePreflightErrors"}, ""},
		{"edgeadm join", "--skip-phases", []string{"Site.skipPhases"}, ""},
		{"edgeadm join", "--config", []string{"Site.kubeletExtraArgs", "Site.taints", "Site.labels"}, "the JoinConfiguration is made from the Site"},
		{"edgeadm join", "--install-pkg-path", []string{"Image.kubernetes", "Image.containerd"}, "what the package holds is on board"},
		{"edgeadm join", "--enable-edge", []string{"Site.nodeType"}, "true: edge; false: native. SuperEdge's own lite-apiserver is not baked, OpenYurt's yurthub is"},
		{"edgeadm join", "--worker-path", nil, "nothing is unpacked on the node"},
		{"edgeadm join", "--kubeconfig", nil, "none is needed"},
		{"edgeadm join", "--default-ha", []string{"Site.ipvs", "Site.vip"}, "kube-vip is for masters; on nodes ipvscare keeps the way to them open"},
		{"edgeadm join", "--interface", nil, "only for kube-vip"},
		{"edgeadm join", "--control-plane", nil, notMaster},
		{"edgeadm join", "--certificate-key", nil, notMaster},
		{"edgeadm join", "--apiserver-advertise-address", nil, notMaster},
		{"edgeadm join", "--apiserver-bind-port", nil, notMaster},
		{"edgeadm join", "--experimental-patches", nil, notMaster},

		{"edgeadm reset", "--cert-dir", nil, "`firstboot reset`: the folder is always /etc/kubernetes/pki"},
		{"edgeadm reset", "--force", nil, "`firstboot reset`"},
		{"edgeadm reset", "--kubeconfig", nil, "`firstboot reset` prints the kubectl command that removes the Node"},
		{"edgeadm reset", "--cri-socket", []string{"Site.criSocket"}, "`firstboot reset` takes the Site's"},
		{"edgeadm reset", "--ignore-preflight-errors", []string{"Site.ignorePreflightErrors"}, "`firstboot reset` takes the Site's"},
		{"edgeadm reset", "--skip-phases", nil, "`firstboot reset` leaves nothing out, and never touches what was baked"},
		{"edgeadm reset", "--enable-edge", []string{"Site.nodeType"}, "`firstboot reset` takes the Site's"},
		{"edgeadm reset", "--worker-path", nil, "nothing is unpacked on the node"},
	}
}
