package openyurt

import (
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"unicode"

	"go.yaml.in/yaml/v3"
	"golang.org/x/mod/semver"

	"github.com/edgebake/edgebake/ondisk"
)

func TestPoolSource(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		version, extra, want string
	}{
		{"", "", "NodePool v1beta2"},
		{"v1.6.1", "", "NodePool v1beta1"},
		{"v1.7.0", "", "NodePool v1beta2"},
		{"", "--enable-node-pool=false", " "},
		{"", "--enable-node-pool", "NodePool v1beta2"},
		{"", "--enable-resource-filter=false", " "},
		{"", "--enable-pool-service-topology", "NodeBucket v1alpha1"},
		{"v1.6.1", "--enable-pool-service-topology=true", "NodeBucket v1alpha1"},
		{"", "--enable-pool-service-topology=false", "NodePool v1beta2"},
	} {
		r, _ := Hub{Version: tc.version, Extra: []string{tc.extra}}.PoolSource()
		if got := r.Kind + " " + r.Version; got != tc.want {
			t.Errorf("version %q, %q: %q, want %q", tc.version, tc.extra, got, tc.want)
		}
	}
}

func TestHubArgsOfTheUser(t *testing.T) {
	t.Parallel()
	h := Hub{Extra: []string{"--enable-dummy-if=true", "--enable-resource-filter=0"}}
	if args := h.Args(); args[len(args)-1] != "--enable-dummy-if=false" {
		t.Errorf("for a kernel without dummy interfaces, the arguments are %v", args)
	}
	if r, listed := h.PoolSource(); listed {
		t.Errorf("without the filters, yurthub waits for %s", r.Kind)
	}
}

// TestFlags checks that the versions in flags are valid, and that no flag is both managed and
// fixed, because then only one reason would be reported.
func TestFlags(t *testing.T) {
	for name, f := range flags {
		if f.managed && f.fixed != "" {
			t.Errorf("%s is managed and fixed", name)
		}
		for _, v := range []string{f.since, f.until} {
			if v != "" && !semver.IsValid(v) {
				t.Errorf("%s: %q is not a version", name, v)
			}
		}
	}
}

// TestOpenYurtVersion checks that BuiltFrom accepts only tagged versions of OpenYurt itself.
func TestOpenYurtVersion(t *testing.T) {
	const flag = "-s -w -X github.com/openyurtio/openyurt/pkg/projectinfo.gitVersion="
	for _, tt := range []struct{ path, version, flags, want string }{
		{module, "(devel)", flag + "v1.7.0 -X a.b=c", "v1.7.0"}, // an OpenYurt release built with Go before 1.24
		{module, "v1.7.0", flag + "v1.7.0", "v1.7.0"},           // the same with a later Go
		{module, "v1.7.0+dirty", flag + "v1.7.0", "v1.7.0"},
		{module, "v1.6.1+dirty", "", "v1.6.1"},
		{module, "", "-X '" + strings.TrimPrefix(flag, "-s -w -X ") + "v1.6.1'", "v1.6.1"},
		{module, "(devel)", flag + "v1.6.0 " + flag + "v1.7.0", "v1.7.0"},
		{module, "(devel)", "", ""},
		{module, "(devel)", flag + "v1.6.1-0a1b2c3", ""},
		{module, "(devel)", flag + "v1.7.0-shop", ""},
		{module, "(devel)", flag, ""},
		{module, "(devel)", flag + "v2.3.0", ""}, // a version number of a fork
		{module, "(devel)", "-X example.com/x" + strings.TrimPrefix(flag, "-s -w -X github.com") + "v1.6.1", ""},
		{module, "v1.6.2-0.20260601000000-0a1b2c3d4e5f", flag + "v1.6.1", ""}, // a commit after v1.6.1
		{module, "v1.6.1", flag + "v1.7.0", ""},
		{"example.com/yurthub", "v1.6.1", flag + "v1.6.1", ""},
	} {
		info := &debug.BuildInfo{Main: debug.Module{Path: tt.path, Version: tt.version}}
		if tt.flags != "" {
			info.Settings = []debug.BuildSetting{{Key: "-compiler", Value: "gc"}, {Key: "-ldflags", Value: tt.flags}}
		}
		if got := BuiltFrom(info); got != tt.want {
			t.Errorf("%s %s with %q: %q, want %q", tt.path, tt.version, tt.flags, got, tt.want)
		}
	}
}

// TestPoolProblem checks for which node types a pool's type is a problem.
func TestPoolProblem(t *testing.T) {
	for _, c := range []struct {
		poolType string
		cloud    bool
		want     string
	}{{PoolEdge, false, ""}, {PoolEdge, true, "would turn"}, {PoolCloud, false, "an edge node"}, {PoolCloud, true, ""}, {"", false, ""}, {"", true, ""}} {
		what, fix := PoolProblem(c.poolType, c.cloud)
		if c.want == "" && what+fix != "" || c.want != "" && (!strings.Contains(what, c.want) || fix == "") {
			t.Errorf("%q, cloud %t: %q, to fix: %q", c.poolType, c.cloud, what, fix)
		}
	}
}

// unit and pod return the Hub of a node for each form of yurthub.
func unit() Hub {
	return Hub{Node: "edge-7", Pool: "shanghai", NodeIP: "192.0.2.50", Dummy: true, Servers: []string{"https://apiserver.cluster.local:6443", "https://192.0.2.11:6443"},
		Namespace: DefaultNamespace, LBMode: LBPriority, Pins: []string{"sha256:aa", "sha256:bb"}, BootstrapFile: "/run/hub/bootstrap-hub.conf"}
}

func pod() Hub {
	h := unit()
	h.Version, h.Image, h.Organizations = "v1.6.1", "openyurt/yurthub:v1.6.1", []string{"shop", "till"}
	return h
}

// TestArgs checks the exact command line of each form. yurthub requires a node name, https servers,
// a known mode and exactly one way to get an identity. v1.7 also requires the node pool and the
// node's address; v1.6 has no --node-ip.
func TestArgs(t *testing.T) {
	t.Parallel()
	both := []string{"--v=2", "--bind-address=127.0.0.1", "--working-mode=edge", "--namespace=kube-system", "--node-name=edge-7", "--nodepool-name=shanghai",
		"--server-addr=https://apiserver.cluster.local:6443,https://192.0.2.11:6443", "--lb-mode=priority"}
	pins := []string{"--discovery-token-ca-cert-hash=sha256:aa", "--discovery-token-ca-cert-hash=sha256:bb", "--discovery-token-unsafe-skip-ca-verification=false"}
	cloud := unit()
	cloud.Cloud, cloud.Pins = true, nil
	for name, c := range map[string]struct {
		hub  Hub
		want []string
	}{
		"unit": {unit(), slices.Concat(both, []string{"--bootstrap-mode=kubeletcertificate", "--node-ip=192.0.2.50"}, pins)},
		"pod":  {pod(), slices.Concat(both, []string{"--bootstrap-file=/run/hub/bootstrap-hub.conf", "--hub-cert-organizations=shop,till"}, pins)},
		"cloud, unpinned": {cloud, slices.Concat(both[:2], []string{"--working-mode=cloud"}, both[3:],
			[]string{"--bootstrap-mode=kubeletcertificate", "--node-ip=192.0.2.50"})},
	} {
		if got := c.hub.Args(); !slices.Equal(got, c.want) {
			t.Errorf("%s:\n%q, not\n%q", name, got, c.want)
		}
	}
}

// TestArgsAreFlags checks that Args contains only flags of the release, because yurthub exits on
// unknown ones, and that a Site cannot set flags that first boot sets.
func TestArgsAreFlags(t *testing.T) {
	t.Parallel()
	h := unit()
	h.Dummy = false
	for _, a := range slices.Concat(h.Args(), pod().Args()) {
		name, _, _ := strings.Cut(strings.TrimPrefix(a, "--"), "=")
		if _, known := flags[name]; !known {
			t.Errorf("%s is not a flag of yurthub", a)
		}
		if name != "v" && name != "enable-dummy-if" && BadFlag(name, "") == "" {
			t.Errorf("first boot sets %s, but a Site may set it too", a)
		}
	}
}

func TestBadFlag(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, version, want string }{
		{"heartbeat-interval-seconds", "v1.6.0", ""},
		{"server-addr", "", "is set by first boot"},
		{"node-ip", "v1.6.1", "is set by first boot"},
		{"proxy-port", "", "kubelet connects to it at 127.0.0.1:10261"},
		{"multiplexer-port", "", "port 10269"},
		{"root-dir", "", Root},
		{"enable-iptable", "", "is unknown to yurthub"},
		{"pool-scope-resources", "v1.6.0", "with yurthub v1.6.1 or later"},
		{"pool-scope-resources", "v1.6.0-0a1b2c3", "with yurthub v1.6.1 or later"},
		{"pool-scope-resources", "v1.6.1", ""},
		{"pool-scope-resources", "v1.7.0", ""},
		{"pool-scope-resources", "", ""},
	} {
		if got := BadFlag(c.name, c.version); (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("--%s of %q: %q, want %q", c.name, c.version, got, c.want)
		}
	}
}

// TestReadBack checks that servers, node address and node name can be read from the files written
// for yurthub.
func TestReadBack(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{"env": string(unit().Env()), "pod": string(pod().PodManifest())} {
		if got := ServersIn(text); !slices.Equal(got, unit().Servers) {
			t.Errorf("%s: servers %q", name, got)
		}
	}
	if got := NodeIPIn(string(unit().Env())); got != "192.0.2.50" {
		t.Errorf("node address %q", got)
	}
	if got := NodeIPIn(string(pod().Env())); got != "" {
		t.Errorf("without --node-ip, the node address is %q", got)
	}
	if got := ServersIn("YURTHUB_ARGS=--v=2 --my-server-addr=https://x:1"); got != nil {
		t.Errorf("servers from another flag: %q", got)
	}
	manifest := string(pod().PodManifest())
	for node, want := range map[string]bool{"edge-7": true, "edge": false, "edge-70": false, "dge-7": false} {
		if PodIsOf(manifest, node) != want {
			t.Errorf("PodIsOf(pod of edge-7, %s) = %v", node, !want)
		}
	}
}

// TestEnv checks that the environment file has a comment and one line, which systemd splits at
// blanks.
func TestEnv(t *testing.T) {
	t.Parallel()
	lines := strings.Split(strings.TrimSuffix(string(unit().Env()), "\n"), "\n")
	if len(lines) != 2 || !strings.HasPrefix(lines[0], "#") || lines[1] != "YURTHUB_ARGS="+strings.Join(unit().Args(), " ") {
		t.Errorf("%q", lines)
	}
}

// TestUnit checks the lines of the unit. Without [Install], yurthub would not start at boot; with
// the usual start limit, systemd would stop restarting it.
func TestUnit(t *testing.T) {
	t.Parallel()
	for _, want := range []string{"\n[Install]\nWantedBy=multi-user.target\n", "\nStartLimitIntervalSec=0\n", "\nRestart=always\n", "Before=kubelet.service\n",
		"\nExecStart=" + Program + " $YURTHUB_ARGS\n", "ConditionPathExists=" + ondisk.YurthubEnv + "\n", "EnvironmentFile=" + ondisk.YurthubEnv + "\n", " " + Root + "\n"} {
		if !strings.Contains(UnitFile, want) {
			t.Errorf("the unit lacks %q", want)
		}
	}
	if strings.Contains(UnitFile, "network-online.target") {
		t.Error("the unit waits for a network, which an edge node may not have")
	}
}

// TestPodManifest checks that kubelet can run the pod without the cluster. The pod's probe must use
// the port on which yurthub listens, and yurthub's identity and cache must be on the host.
func TestPodManifest(t *testing.T) {
	t.Parallel()
	var p struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string
		Metadata   struct{ Name, Namespace string }
		Spec       struct {
			HostNetwork bool `yaml:"hostNetwork"`
			Containers  []struct {
				Image         string
				Command       []string
				LivenessProbe struct {
					HTTPGet struct{ Host, Path, Port string } `yaml:"httpGet"`
				} `yaml:"livenessProbe"`
				VolumeMounts []struct {
					Name, MountPath string
					ReadOnly        bool `yaml:"readOnly"`
				} `yaml:"volumeMounts"`
			}
			Volumes []struct {
				Name     string
				HostPath struct{ Path string } `yaml:"hostPath"`
			}
		}
	}
	if err := yaml.Unmarshal(pod().PodManifest(), &p); err != nil {
		t.Fatal(err)
	}
	if p.APIVersion != "v1" || p.Kind != "Pod" || p.Metadata.Name != PodName || p.Metadata.Namespace != PodNamespace || !p.Spec.HostNetwork || len(p.Spec.Containers) != 1 {
		t.Fatalf("%+v", p)
	}
	c := p.Spec.Containers[0]
	if want := append([]string{"yurthub"}, pod().Args()...); !slices.Equal(c.Command, want) || c.Image != pod().Image {
		t.Errorf("image %s, command %q, want %q", c.Image, c.Command, want)
	}
	if g := c.LivenessProbe.HTTPGet; g.Host+":"+g.Port != Health || g.Path != "/v1/healthz" {
		t.Errorf("the probe is %+v", g)
	}
	var dirs []string
	for _, v := range p.Spec.Volumes {
		dirs = append(dirs, v.HostPath.Path)
	}
	for _, want := range []string{path.Dir(path.Dir(Manifest)), Root, path.Dir(pod().BootstrapFile)} {
		if !slices.Contains(dirs, want) {
			t.Errorf("the pod does not mount the host's %s: %q", want, dirs)
		}
	}
	if !strings.HasPrefix(Cache, path.Dir(path.Dir(Manifest))+"/") {
		t.Errorf("the cache %s is in none of the mounts %q", Cache, dirs)
	}
}

// TestKubelet checks the arguments that redirect kubelet to yurthub. OpenYurt's node-servant writes
// exactly the same ones and searches for them to revert. Unredirect removes nothing else.
func TestKubelet(t *testing.T) {
	t.Parallel()
	if RedirectFlags != " --kubeconfig=/var/lib/openyurt/kubelet.conf --bootstrap-kubeconfig= " || !IsRedirected(RedirectFlags) || IsRedirected("--kubeconfig=/etc/kubernetes/kubelet.conf") {
		t.Errorf("the flags that redirect kubelet are %q", RedirectFlags)
	}
	var conf struct {
		Clusters []struct{ Cluster struct{ Server string } }
		Users    []any
	}
	if err := yaml.Unmarshal([]byte(Kubeconfig), &conf); err != nil || len(conf.Clusters) != 1 || conf.Clusters[0].Cluster.Server != "http://127.0.0.1:10261" || len(conf.Users) > 0 {
		t.Errorf("%+v, %v", conf, err)
	}
	for version, want := range map[string]string{"Kubernetes v1.29.4": "", "Kubernetes v1.34.9\n": "", "Kubernetes v1.35.0\n": ListPlainly, "v1.36.3": ListPlainly} {
		if got, err := PlainLists(version); got != want || err != nil {
			t.Errorf("for %q, the feature gate is %q, %v", version, got, err)
		}
	}
	if _, err := PlainLists("Kubernetes unknown"); err == nil {
		t.Error("an invalid version was accepted")
	}
}

func TestJoinedArgs(t *testing.T) {
	t.Parallel()
	given := map[string]string{"v": "4", "feature-gates": "A=true", "rotate-certificates": "true"}
	want := map[string]string{"v": "4", "kubeconfig": KubeletConf, "bootstrap-kubeconfig": "", "rotate-certificates": "false", "feature-gates": "A=true,WatchListClient=false"}
	if got := JoinedArgs(given, ListPlainly); !maps.Equal(got, want) {
		t.Errorf("%v", got)
	}
	if given["rotate-certificates"] != "true" {
		t.Error("JoinedArgs changed the given arguments")
	}
	if got := JoinedArgs(nil, ListPlainly)["feature-gates"]; got != "WatchListClient=false" {
		t.Errorf("feature gates %q", got)
	}
	for _, args := range []string{
		"--a=b", "", "--a=b --node-labels=c=d",
		// Feature gates that a person set, some with edgebake's gate.
		"--a=b --feature-gates=WatchListClient=false", "--feature-gates=WatchListClient=false", "--feature-gates=WatchListClient=false --a=b",
		"--a=b --feature-gates=WatchListClient=false,Foo=true", "--a=b --feature-gates=Foo=true,WatchListClient=false",
		"--a=b --feature-gates=WatchListClient=true --c=d",
	} {
		if rest, turned := Unredirect(args); rest != args || turned != "" {
			t.Errorf("%q without redirect flags: %q, by %q", args, rest, turned)
		}
		for _, plain := range []string{"", ListPlainly} {
			rest, turned := Unredirect(Redirect(args, plain))
			added := plain
			if strings.HasSuffix(args, ListPlainly) {
				added = ListPlainly
			}
			if rest != args || turned != added+RedirectFlags || !IsRedirected(Redirect(args, plain)) {
				t.Errorf("%q redirected and back: %q, by %q", args, rest, turned)
			}
		}
	}
	if rest, turned := Unredirect("--a=b" + RedirectFlags + "--c=d"); rest != "--a=b --c=d" || turned != RedirectFlags {
		t.Errorf("in the middle: %q, by %q", rest, turned)
	}
	if rest, turned := Unredirect("--a=b"); rest != "--a=b" || turned != "" {
		t.Errorf("of a native node: %q, by %q", rest, turned)
	}
	if got, some := JoinedArgs(nil, "")["feature-gates"]; some {
		t.Errorf("a kubelet that lists plainly gets %q", got)
	}
}

// TestLabels checks that an OpenYurt node gets both labels, with OpenYurt's values. If a Node had
// only the pool's label, OpenYurt would run a Job to convert it.
func TestLabels(t *testing.T) {
	t.Parallel()
	for cloud, want := range map[bool]string{false: "true", true: "false"} {
		l := Labels("shanghai", cloud)
		if len(l) != 2 || l["openyurt.io/is-edge-worker"] != want || l["apps.openyurt.io/nodepool"] != "shanghai" {
			t.Errorf("cloud %t: %v", cloud, l)
		}
		for name := range l {
			if !IsLabel(name) {
				t.Errorf("%s is not OpenYurt's", name)
			}
		}
	}
	edge, cloud := Labels("shanghai", false), Labels("core", true)
	if !Labelled(edge) || !Labelled(cloud) || PoolOf(edge) != "shanghai" || IsCloud(edge) || !IsCloud(cloud) {
		t.Errorf("Labelled, PoolOf or IsCloud is wrong for %v or %v", edge, cloud)
	}
	for _, k := range LabelKeys() {
		delete(edge, k)
		if Labelled(edge) {
			t.Errorf("a Node without %s counts as OpenYurt's", k)
		}
		edge = Labels("shanghai", false)
	}
	if IsLabel("zone") {
		t.Error("the zone label counts as OpenYurt's")
	}
}

// needOf returns the Need of this kind for this kind of object; the zero Need if there is none.
func needOf(h Hub, kind NeedKind, resource string) Need {
	for _, n := range h.Needs() {
		if n.Kind == kind && (resource == "" || n.Resource.Kind == resource) {
			return n
		}
	}
	return Need{}
}

// TestNeeds checks the requirements in a cluster, in the form in which the API server reports them.
// Awaited is as tested with each release: for example, yurthub is ready without the right to list
// EndpointSlices.
func TestNeeds(t *testing.T) {
	t.Parallel()
	buckets, alone := unit(), unit()
	buckets.Extra, alone.Extra = []string{bucketsFlag}, []string{"--enable-node-pool=false"}
	for name, c := range map[string]struct {
		hub     Hub
		rights  []string // API paths of the required rights
		awaited []string // kinds of the objects that yurthub lists before it is ready
		crd     string
	}{
		"unit": {unit(), []string{"/api/v1/namespaces/kube-system/configmaps", "/apis/apps.openyurt.io/v1beta2/nodepools", "/apis/discovery.k8s.io/v1/endpointslices"},
			[]string{"ConfigMap", "NodePool"}, "nodepools.apps.openyurt.io/v1beta2"},
		"pod": {pod(), []string{"/api/v1/namespaces/kube-system/configmaps", "/apis/apps.openyurt.io/v1beta1/nodepools", "/apis/discovery.k8s.io/v1/endpointslices"},
			[]string{"ConfigMap", "NodePool"}, "nodepools.apps.openyurt.io/v1beta1"},
		"buckets": {buckets, []string{"/api/v1/namespaces/kube-system/configmaps", "/apis/apps.openyurt.io/v1beta2/nodepools", "/apis/discovery.k8s.io/v1/endpointslices", "/apis/apps.openyurt.io/v1alpha1/nodebuckets"},
			[]string{"ConfigMap", "NodeBucket"}, "nodepools.apps.openyurt.io/v1beta2"},
		"without pools": {alone, []string{"/api/v1/namespaces/kube-system/configmaps", "/apis/apps.openyurt.io/v1beta2/nodepools", "/apis/discovery.k8s.io/v1/endpointslices"},
			[]string{"ConfigMap"}, "nodepools.apps.openyurt.io/v1beta2"},
	} {
		var rights, awaited []string
		for _, n := range c.hub.Needs() {
			if n.Fix == "" {
				t.Errorf("%s: %+v has no fix", name, n)
			}
			if n.Kind == NeedRight {
				rights = append(rights, n.Path)
				if n.Awaited {
					awaited = append(awaited, n.Resource.Kind)
				}
				if !slices.Contains(n.Rule.Verbs, "list") || !slices.Contains(n.Rule.Verbs, "watch") {
					t.Errorf("%s: %+v", name, n.Rule)
				}
			}
		}
		if !slices.Equal(rights, c.rights) || !slices.Equal(awaited, c.awaited) {
			t.Errorf("%s: rights %q, it waits for %q", name, rights, awaited)
		}
		if crd := needOf(c.hub, NeedCRD, "").Resource.CRD(); crd != c.crd {
			t.Errorf("%s: CRD %s", name, crd)
		}
	}
	for kind, awaited := range map[NeedKind]bool{NeedApprover: true, NeedPool: true} {
		if needOf(unit(), kind, "").Awaited != awaited {
			t.Errorf("first boot does not wait for the need of kind %d", kind)
		}
	}
	if fix := needOf(unit(), NeedRight, "NodePool").Fix; fix != GrantHubRole {
		t.Errorf("the right to list NodePools: %s", fix)
	}
	if fix := needOf(buckets, NeedRight, "NodeBucket").Fix; !strings.Contains(fix, "nodebuckets.apps.openyurt.io") {
		t.Errorf("the right to list NodeBuckets: %s", fix)
	}
	if rules := HubRules(); len(rules) != 3 || rules[0].Resources[0] != "configmaps" || rules[1].Resources[0] != Pools || rules[2].Resources[0] != "endpointslices" {
		t.Errorf("%v", rules)
	}
}

// TestNextRelease checks that a release without some flags can be supported by changing only two
// tables, releases and flags.
func TestNextRelease(t *testing.T) {
	oldReleases, oldFlags := releases, maps.Clone(flags)
	t.Cleanup(func() { releases, flags = oldReleases, oldFlags })
	releases = append(slices.Clone(releases), release{8, FormUnit, "v1", "hub-dummy0"})
	flags["nodepool-name"] = flag{managed: true, until: "v1.8.0"}
	flags["profiling"] = flag{until: "v1.8.0"}
	h := unit()
	for version, want := range map[string]bool{"v1.7.1": true, "v1.8.0": false, "v1.8.1-0a1b2c3": false} {
		h.Version = version
		if got := slices.Contains(h.Args(), "--nodepool-name=shanghai"); got != want {
			t.Errorf("%s is given --nodepool-name: %t", version, got)
		}
		if bad := BadFlag("profiling", version); (bad == "") != want {
			t.Errorf("--profiling of %s: %q", version, bad)
		}
	}
	if h.Version = "v1.8.0"; h.IsPod() || needOf(h, NeedCRD, "").Resource.Version != "v1" {
		t.Errorf("v1.8.0 needs %+v", needOf(h, NeedCRD, ""))
	}
}

func TestReleases(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		version string
		minor   int
		ok, pod bool
	}{{"v1.7.0", 7, true, false}, {"v1.6.1", 6, true, true}, {"v1.6.1-0a1b2c3", 6, true, true}, {"v1.5.1", 5, true, false}, {"v1.7", 0, false, false}, {"1.7.0", 0, false, false}, {"v2.7.0", 0, false, false}} {
		if minor, ok := Minor(c.version); minor != c.minor || ok != c.ok || RunsAsPod(c.version) != c.pod {
			t.Errorf("%s: minor %d, %t, pod %t", c.version, minor, ok, RunsAsPod(c.version))
		}
	}
	for said, want := range map[string]string{"yurthub version: v1.7.0-abc\n": "v1.7", "projectinfo.Info{GitVersion:\"v1.6.1\"}": "v1.6", "(devel)": ""} {
		if got := Reported(said); got != want {
			t.Errorf("%q gives the version %q, want %q", said, got, want)
		}
	}
	if UsesKubeletCertificate("v1.6") || !UsesKubeletCertificate("v1.7") {
		t.Error("kubelet's certificate is used since v1.7")
	}
	if FormOf(Oldest) != FormStaticPod || FormOf(Newest) != FormUnit || Supported() != "v1.6 to v1.7" || Example() != "v1.7.0" {
		t.Errorf("%s, %s", Supported(), Example())
	}
}

// TestLeavings checks which interfaces and files a yurthub that was killed can leave behind.
func TestLeavings(t *testing.T) {
	t.Parallel()
	if got := DummyNames("--v=2 --dummy-if-name=hub1 --x=y"); !slices.Equal(got, []string{"hub-dummy0", "yurthub-dummy0", "hub1"}) {
		t.Errorf("%q", got)
	}
	for _, c := range Certificates() {
		if !slices.ContainsFunc(Identities(), func(dir string) bool { return strings.HasPrefix(c.Dir+"/", dir+"/") }) {
			t.Errorf("%s in %s is not removed with yurthub's identity", c.Name, c.Dir)
		}
	}
	if !slices.Contains(Identities(), Cache) || !slices.Contains(Identities(), Identity) {
		t.Errorf("%q", Identities())
	}
}

// TestUnitsOfTheImage checks that the units of images, which do not use this package, have the
// right names of yurthub's unit and directory.
func TestUnitsOfTheImage(t *testing.T) {
	t.Parallel()
	named := 0
	err := filepath.WalkDir("../overlays/files", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(p)
		for line := range strings.Lines(string(b)) {
			if !strings.Contains(line, "yurthub") || strings.HasPrefix(line, "#") || strings.HasPrefix(line, "Description=") {
				continue
			}
			for _, word := range strings.FieldsFunc(line, func(r rune) bool { return unicode.IsSpace(r) || r == '=' || r == '|' }) {
				if !strings.Contains(word, "yurthub") {
					continue
				}
				if named++; word != Unit && !strings.HasPrefix(word+"/", Root+"/") {
					t.Errorf("%s: %s is neither %s nor below %s", p, word, Unit, Root)
				}
			}
		}
		return err
	})
	if err != nil || named < 5 {
		t.Errorf("%d names were found, %v", named, err)
	}
}

// TestRoleOfTheDocs checks that the ClusterRole in docs/openyurt.md grants the rights that yurthub
// needs.
func TestRoleOfTheDocs(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/openyurt.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "kind: ClusterRole\n")
	text, _, _ = strings.Cut(text, "\n---\n")
	var role struct {
		Metadata struct{ Name string }
		Rules    []struct {
			APIGroups        []string `yaml:"apiGroups"`
			Resources, Verbs []string
		}
	}
	if err := yaml.Unmarshal([]byte(text), &role); err != nil || role.Metadata.Name != HubRole {
		t.Fatalf("%q is not the ClusterRole, %v", text, err)
	}
	var got []Rule
	for _, r := range role.Rules {
		got = append(got, Rule{strings.Join(r.APIGroups, " "), r.Resources, r.Verbs})
	}
	if !reflect.DeepEqual(got, HubRules()) {
		t.Errorf("the page gives %v, yurthub needs %v", got, HubRules())
	}
}
