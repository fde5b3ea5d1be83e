package openyurt

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Modes in which yurthub chooses an API server: the first healthy one, or all in turn.
const (
	LBPriority   = "priority"
	LBRoundRobin = "rr"
)

// LBModes returns all modes.
func LBModes() []string { return []string{LBPriority, LBRoundRobin} }

// DefaultNamespace is the namespace in which a cluster keeps yurthub's settings.
const DefaultNamespace = systemNamespace

// Hub is the configuration of a node's yurthub.
type Hub struct {
	// Version is yurthub's version, for example v1.7.0; "": unknown, treated as the newest.
	Version            string
	Node, Pool, NodeIP string
	Cloud              bool
	Dummy              bool // the node's kernel has dummy interfaces
	Servers            []string
	Namespace, LBMode  string
	Pins               []string
	Extra              []string
	Organizations      []string
	// Image is the container image, if the form is staticPod. Such a yurthub has its own identity,
	// and requests it with the token in BootstrapFile.
	Image, BootstrapFile string
}

func (h Hub) properties() release {
	minor, known := Minor(h.Version)
	if !known {
		minor = Newest
	}
	return releaseOf(minor)
}

// IsPod reports whether yurthub runs as a static pod.
func (h Hub) IsPod() bool { return h.properties().form == FormStaticPod }

// Args returns yurthub's command line, without flags that the release does not have.
func (h Hub) Args() []string {
	var out []string
	give := func(name, value string) {
		if flags[name].in(h.Version) {
			out = append(out, "--"+name+"="+value)
		}
	}
	give("v", "2")
	give("bind-address", loopback)
	give("working-mode", map[bool]string{false: "edge", true: "cloud"}[h.Cloud])
	give("namespace", h.Namespace)
	give("node-name", h.Node)
	give("nodepool-name", h.Pool)
	give("server-addr", strings.Join(h.Servers, ","))
	give("lb-mode", h.LBMode)
	if h.IsPod() {
		give("bootstrap-file", h.BootstrapFile)
		if len(h.Organizations) > 0 {
			give("hub-cert-organizations", strings.Join(h.Organizations, ","))
		}
	} else {
		give("bootstrap-mode", "kubeletcertificate")
	}
	give("node-ip", h.NodeIP)
	for _, p := range h.Pins {
		give("discovery-token-ca-cert-hash", p)
	}
	if len(h.Pins) > 0 {
		give("discovery-token-unsafe-skip-ca-verification", "false")
	}
	out = append(out, h.Extra...)
	if !h.Dummy { // last, to take precedence: yurthub does not start if the kernel has no dummy interfaces
		give("enable-dummy-if", "false")
	}
	return out
}

// Env returns the environment file with the arguments for Unit.
func (h Hub) Env() []byte {
	return []byte("# Written by firstboot from the site.\nYURTHUB_ARGS=" + strings.Join(h.Args(), " ") + "\n")
}

// Resource is a kind of object in one API version.
type Resource struct{ Kind, Version string }

// Path returns the API path that lists these objects.
func (r Resource) Path() string { return API + r.Version + "/" + r.plural() }

// CRD returns the resource and its version as the API server's errors write them.
func (r Resource) CRD() string { return r.plural() + "." + Group + "/" + r.Version }

func (r Resource) plural() string { return strings.ToLower(r.Kind) + "s" }

// bucketsFlag makes yurthub list NodeBuckets instead of NodePools.
const bucketsFlag = "--enable-pool-service-topology"

// pools returns the resource of the NodePools that yurthub lists.
func (h Hub) pools() Resource { return Resource{KindPool, h.properties().pools} }

// PoolSource returns the resource from which yurthub learns about its pool before it is ready. ok
// is false if there is none.
func (h Hub) PoolSource() (r Resource, ok bool) {
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
		return Resource{}, false
	case on(strings.TrimPrefix(bucketsFlag, "--"), false):
		return Resource{"NodeBucket", "v1alpha1"}, true
	case !on("enable-node-pool", true):
		return Resource{}, false
	}
	return h.pools(), true
}

var (
	nodeIPArg = regexp.MustCompile(`(?:^|[\s"])--node-ip=([^\s"]+)`)
	serverArg = regexp.MustCompile(`(?:^|[\s"])--server-addr=([^\s"]+)`)
)

// NodeIPIn returns the node's address from the arguments in the result of Env; "" if there is none.
func NodeIPIn(env string) string { return first(nodeIPArg, env) }

// ServersIn returns the servers from the arguments in the result of Env or PodManifest; nil if
// there are none.
func ServersIn(text string) []string {
	if list := first(serverArg, text); list != "" {
		return strings.Split(list, ",")
	}
	return nil
}

func first(arg *regexp.Regexp, text string) string {
	if m := arg.FindStringSubmatch(text); m != nil {
		return m[1]
	}
	return ""
}

// PodIsOf reports whether manifest, a result of PodManifest, is for the node with this name.
func PodIsOf(manifest, node string) bool {
	return strings.Contains(manifest, strconv.Quote("--node-name="+node)+"\n")
}

// SettingsPath is the path of the ConfigMaps that yurthub lists before it is ready.
func (h Hub) SettingsPath() string { return "/api/v1/namespaces/" + h.Namespace + "/configmaps" }

var dummyName = regexp.MustCompile(`--dummy-if-name=([\w.-]+)`)

// DummyNames returns the names of the interfaces that yurthub with these arguments may have left
// behind.
func DummyNames(args string) []string {
	var names []string
	for _, r := range slices.Backward(releases) {
		if !slices.Contains(names, r.dummy) {
			names = append(names, r.dummy)
		}
	}
	for _, m := range dummyName.FindAllStringSubmatch(args, -1) {
		names = append(names, m[1])
	}
	return names
}
