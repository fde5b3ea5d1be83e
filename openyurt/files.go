package openyurt

import (
	"fmt"
	"path"
	"strings"

	"github.com/edgebake/edgebake/ondisk"
)

const (
	yurthub         = "yurthub"
	systemNamespace = "kube-system" // the namespace of OpenYurt's charts
	loopback        = "127.0.0.1"
	pki             = Root + "/pki"
)

// OpenYurt's own paths, so that its tools find the files.
const (
	Program = "/usr/local/bin/" + yurthub
	Unit    = yurthub + ".service"
	// Dropin is the file in which yurtadm and OpenYurt's own convert write yurthub's arguments. It
	// would override edgebake's.
	Dropin = "/etc/systemd/system/" + Unit + ".d/10-yurthub.conf"
	// Root is the directory of yurthub's identity. Cache contains the API server's answers, which
	// yurthub serves while the node is offline.
	Root  = "/var/lib/" + yurthub
	Cache = ondisk.KubernetesDir + "/cache"
	// Identity is the kubeconfig with which yurthub accesses the API server.
	Identity = Root + "/" + yurthub + ".conf"
	// KubeletConf is the kubeconfig with which kubelet accesses yurthub.
	KubeletConf = "/var/lib/openyurt/kubelet.conf"
	Manifest    = ondisk.ManifestsDir + "/" + yurthub + ".yaml"
)

// Identities returns the paths that yurthub keeps across restarts: its certificates, its
// kubeconfigs and its cache.
func Identities() []string {
	return []string{Cache, pki, Root + "/autonomy", Identity, Root + "/bootstrap-hub.conf"}
}

// API is the API path of OpenYurt's own resources, without a version.
const API = "/apis/" + Group + "/"

// Ports of yurthub. It does not authenticate clients, and acts with the node's rights.
const (
	ProxyPort  = "10261" // for the node, and for pods at PodAddress
	HealthPort = "10267" // health and profiles
	SecurePort = "10268" // like ProxyPort, with TLS
	PoolPort   = "10269" // for other nodes of the pool
)

// Addresses on the node itself. PodAddress is the address of the dummy interface, for pods.
const (
	Health     = loopback + ":" + HealthPort
	Proxy      = "http://" + loopback + ":" + ProxyPort
	PodAddress = "169.254.2.1"
)

// ReadyPath is the path at Health that returns 200 once yurthub has its identity and has listed the
// objects it needs.
const ReadyPath = "/v1/readyz"

// Certificate is a certificate that yurthub rotates. Name-current.pem in Dir is a symlink to the
// newest Name-<date>.pem.
type Certificate struct {
	Dir, Name string
	// Replaceable is set if yurthub requests a missing certificate again. It cannot
	// replace its client certificate, because the token for that has been removed by then.
	Replaceable bool
}

// Certificates returns all certificates of yurthub.
func Certificates() []Certificate {
	return []Certificate{{pki, yurthub, false}, {pki, yurthub + "-server", true}}
}

// UnitFile is yurthub's unit. Images contain it; convert installs it on nodes without it.
const UnitFile = `# OpenYurt's node proxy. Held until first boot wrote its arguments; from then
# on up before kubelet at every boot, with or without a network, and restarted
# forever: yurthub itself gives up after four minutes without its identity.
[Unit]
Description=OpenYurt yurthub
After=network.target ` + ondisk.UnitIPVSCare + ` systemd-modules-load.service
Before=` + ondisk.UnitKubelet + `
RequiresMountsFor=` + ondisk.KubernetesDir + ` ` + Root + `
ConditionPathExists=` + ondisk.YurthubEnv + `
StartLimitIntervalSec=0

[Service]
Type=simple
EnvironmentFile=` + ondisk.YurthubEnv + `
ExecStart=` + Program + ` $YURTHUB_ARGS
Restart=always
RestartSec=3
OOMScoreAdjust=-900
# yurthub ignores SIGTERM while it waits for its identity.
TimeoutStopSec=10

[Install]
WantedBy=multi-user.target
`

// Sysctl lets yurthub listen on the node's address while the node does not have it, for example
// because the cable is unplugged and DHCP removed the address.
const Sysctl = "# Written by firstboot for yurthub.\nnet.ipv4.ip_nonlocal_bind = 1\nnet.ipv6.ip_nonlocal_bind = 1\n"

// PodManifest returns the manifest of yurthub as a static pod.
func (h Hub) PodManifest() []byte {
	dir := path.Dir(h.BootstrapFile)
	var args strings.Builder
	for _, a := range h.Args() {
		fmt.Fprintf(&args, "    - %q\n", a)
	}
	return fmt.Appendf(nil, podManifest, h.Image, args.String(), dir, dir)
}

// PodName is the name of yurthub's pod in PodNamespace.
const (
	PodName      = "yurt-hub"
	PodNamespace = systemNamespace
)

// Logs returns a hint that names the place of yurthub's logs.
func (h Hub) Logs() string {
	if h.IsPod() {
		return "see `journalctl -u kubelet` and /var/log/pods/" + PodNamespace + "_" + PodName + "* on the machine"
	}
	return "see `journalctl -u " + yurthub + "` on the machine"
}

const podManifest = `# Written by firstboot from the site.
apiVersion: v1
kind: Pod
metadata:
  name: ` + PodName + `
  namespace: ` + PodNamespace + `
  labels:
    k8s-app: ` + PodName + `
spec:
  hostNetwork: true
  priorityClassName: system-node-critical
  priority: 2000001000
  containers:
  - name: ` + PodName + `
    image: %q
    imagePullPolicy: IfNotPresent
    command:
    - ` + yurthub + `
%s    livenessProbe:
      httpGet:
        host: ` + loopback + `
        path: /v1/healthz
        port: ` + HealthPort + `
      initialDelaySeconds: 300
      periodSeconds: 5
      failureThreshold: 3
    resources:
      requests:
        cpu: 150m
        memory: 150Mi
      limits:
        memory: 300Mi
    securityContext:
      capabilities:
        add: ["NET_ADMIN", "NET_RAW"]
    volumeMounts:
    - {name: kubernetes, mountPath: ` + ondisk.KubernetesDir + `}
    - {name: hub, mountPath: ` + Root + `}
    - {name: bootstrap, mountPath: %s, readOnly: true}
  volumes:
  - {name: kubernetes, hostPath: {path: ` + ondisk.KubernetesDir + `, type: Directory}}
  - {name: hub, hostPath: {path: ` + Root + `, type: DirectoryOrCreate}}
  - {name: bootstrap, hostPath: {path: %s, type: DirectoryOrCreate}}
`
