package openyurt

import (
	"regexp"
	"strconv"
	"strings"
)

// Hub is what a node's yurthub is told.
type Hub struct {
	Node, Pool, NodeIP string
	Cloud              bool
	Dummy              bool // the kernel has dummy interfaces
	Servers            []string
	Namespace, LBMode  string
	Pins               []string
	Extra              []string
	Organizations      []string
	// Image is set where yurthub runs as a static pod. It has an identity of
	// its own then, got with the token in BootstrapFile.
	Image, BootstrapFile string
}

// Args is yurthub's command line. The rules behind it are in the contract:
// node-ip and nodepool-name always, https always, the server that never
// changes first.
func (h Hub) Args() []string {
	mode := "edge"
	if h.Cloud {
		mode = "cloud"
	}
	out := []string{
		"--v=2",
		"--bind-address=127.0.0.1",
		"--working-mode=" + mode,
		"--namespace=" + h.Namespace,
		"--node-name=" + h.Node,
		"--nodepool-name=" + h.Pool,
		"--server-addr=" + strings.Join(h.Servers, ","),
		"--lb-mode=" + h.LBMode,
	}
	if h.Image == "" {
		out = append(out, "--bootstrap-mode=kubeletcertificate", "--node-ip="+h.NodeIP)
	} else { // before 1.7, which knows no --node-ip
		out = append(out, "--bootstrap-file="+h.BootstrapFile)
		if len(h.Organizations) > 0 {
			out = append(out, "--hub-cert-organizations="+strings.Join(h.Organizations, ","))
		}
	}
	for _, p := range h.Pins {
		out = append(out, "--discovery-token-ca-cert-hash="+p)
	}
	if len(h.Pins) > 0 {
		out = append(out, "--discovery-token-unsafe-skip-ca-verification=false")
	}
	out = append(out, h.Extra...)
	if !h.Dummy { // last, for the last one holds: with it yurthub would not start here
		out = append(out, "--enable-dummy-if=false")
	}
	return out
}

// Env is the file that Unit has its arguments from.
func (h Hub) Env() []byte {
	return []byte("# Written by firstboot from the site.\nYURTHUB_ARGS=" + strings.Join(h.Args(), " ") + "\n")
}

// PoolVersion is the version of NodePools that yurthub asks for.
func (h Hub) PoolVersion() string {
	if h.Image != "" { // before 1.7
		return "v1beta1"
	}
	return "v1beta2"
}

// PoolKind is what yurthub lists to know its pool before it is ready, in the
// version it asks for; no kind: nothing.
func (h Hub) PoolKind() (kind, version string) {
	on := func(name string, is bool) bool {
		for _, a := range h.Extra {
			if flag, value, given := strings.Cut(a, "="); flag == "--"+name {
				b, err := strconv.ParseBool(value)
				is = !given || err != nil || b
			}
		}
		return is
	}
	switch {
	case !on("enable-resource-filter", true):
		return "", ""
	case on("enable-pool-service-topology", false):
		return "NodeBucket", "v1alpha1"
	case !on("enable-node-pool", true):
		return "", ""
	}
	return "NodePool", h.PoolVersion()
}

var dummyName = regexp.MustCompile(`--dummy-if-name=([\w.-]+)`)

// DummyNames are the interfaces that a yurthub with these arguments may have
// left behind.
func DummyNames(args string) []string {
	names := []string{"hub-dummy0", "yurthub-dummy0"} // from 1.7, and before
	for _, m := range dummyName.FindAllStringSubmatch(args, -1) {
		names = append(names, m[1])
	}
	return names
}
