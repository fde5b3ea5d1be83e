package openyurt

import (
	"fmt"
	"path"
	"strings"

	"github.com/edgebake/edgebake/ondisk"
)

const (
	yurthub         = "yurthub"
	systemNamespace = "kube-system" // where OpenYurt's charts put all
	loopback        = "127.0.0.1"
	pki             = Root + "/pki"
)

// Paths of OpenYurt's own, which are kept, so that its tools find what they
// know.
const (
	Program = "/usr/local/bin/" + yurthub
	Unit    = yurthub + ".service"
	// Dropin is where yurtadm and OpenYurt's own convert write the arguments; it
	// would win over ours.
	Dropin = "/etc/systemd/system/" + Unit + ".d/10-yurthub.conf"
	// Root is yurthub's identity, Cache what it answers from offline.
	Root  = "/var/lib/" + yurthub
	Cache = ondisk.KubernetesDir + "/cache"
	// Identity is where yurthub keeps its way to the API server.
	Identity = Root + "/" + yurthub + ".conf"
	// KubeletConf is kubelet's way to yurthub.
	KubeletConf = "/var/lib/openyurt/kubelet.conf"
	Manifest    = ondisk.ManifestsDir + "/" + yurthub + ".yaml"
)

// Identities are what yurthub keeps between its starts: its certificates, its
// way to the API server and what it answers from offline.
func Identities() []string {
	return []string{Cache, pki, Root + "/autonomy", Identity, Root + "/bootstrap-hub.conf"}
}

// API is where OpenYurt's own resources are, without their version.
const API = "/apis/" + Group + "/"

// Ports of yurthub. It asks nobody who he is and acts with the node's rights.
const (
	ProxyPort  = "10261" // for the node, and for pods at PodAddress
	HealthPort = "10267" // of its health, and of its profile
	SecurePort = "10268" // as ProxyPort, by TLS
	PoolPort   = "10269" // for other nodes of the pool
)

// Addresses on the node itself. PodAddress is on the dummy interface, for pods.
const (
	Health     = loopback + ":" + HealthPort
	Proxy      = "http://" + loopback + ":" + ProxyPort
	PodAddress = "169.254.2.1"
)

// ReadyPath is where Health answers 200 once yurthub has its identity and its
// lists; before that it says only that it runs.
const ReadyPath = "/v1/readyz"

// Certificate is one that yurthub keeps: Name-current.pem in Dir leads to the
// newest of Name-<date>.pem.
type Certificate struct {
	Dir, Name string
	// AskedAnew: where it is not there yurthub asks for another one. Its client
	// certificate it could only get by a token that is long forgotten.
	AskedAnew bool
}

// Certificates are all of them.
func Certificates() []Certificate {
	return []Certificate{{pki, yurthub, false}, {pki, yurthub + "-server", true}}
}

// UnitFile is the unit that images carry, and that convert writes on nodes that
// edgebake did not build.
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

// Sysctl lets yurthub listen on the node's address while the cable is out
// and DHCP has taken the address away.
const Sysctl = "# Written by firstboot for yurthub.\nnet.ipv4.ip_nonlocal_bind = 1\nnet.ipv6.ip_nonlocal_bind = 1\n"

// PodManifest is yurthub as a static pod.
func (h Hub) PodManifest() []byte {
	dir := path.Dir(h.BootstrapFile)
	var args strings.Builder
	for _, a := range h.Args() {
		fmt.Fprintf(&args, "    - %q\n", a)
	}
	return fmt.Appendf(nil, podManifest, h.Image, args.String(), dir, dir)
}

// PodName is yurthub's pod, in PodNamespace.
const (
	PodName      = "yurt-hub"
	PodNamespace = systemNamespace
)

// Logs says how a person sees what yurthub printed.
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
