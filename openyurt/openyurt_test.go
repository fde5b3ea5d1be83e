package openyurt

import (
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
)

func TestPoolKind(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		image, extra, want string
	}{
		{"", "", "NodePool v1beta2"},
		{"openyurt/yurthub:v1.6.1", "", "NodePool v1beta1"},
		{"", "--enable-node-pool=false", " "},
		{"", "--enable-node-pool", "NodePool v1beta2"},
		{"", "--enable-resource-filter=false", " "},
		{"", "--enable-pool-service-topology", "NodeBucket v1alpha1"},
		{"openyurt/yurthub:v1.6.1", "--enable-pool-service-topology=true", "NodeBucket v1alpha1"},
		{"", "--enable-pool-service-topology=false", "NodePool v1beta2"},
	} {
		kind, version := Hub{Image: tc.image, Extra: []string{tc.extra}}.PoolKind()
		if got := kind + " " + version; got != tc.want {
			t.Errorf("image %q, %q: %q, want %q", tc.image, tc.extra, got, tc.want)
		}
	}
}

func TestHubUnitIsTheBakedOne(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../overlays/files/yurthub/usr/lib/systemd/system/yurthub.service")
	if err != nil {
		t.Fatal(err)
	}
	if string(b) != UnitFile {
		t.Error("the unit that convert writes is not the one that images carry")
	}
}

func TestHubArgsOfTheUser(t *testing.T) {
	t.Parallel()
	h := Hub{Extra: []string{"--enable-dummy-if=true", "--enable-resource-filter=0"}}
	if args := h.Args(); args[len(args)-1] != "--enable-dummy-if=false" {
		t.Errorf("a kernel without dummy gets %v", args)
	}
	if kind, _ := h.PoolKind(); kind != "" {
		t.Errorf("without the filters it waits for %s", kind)
	}
}

// TestFlagsTwice: of a flag that is managed and fixed only the first is ever
// said.
func TestFlagsTwice(t *testing.T) {
	for name := range fixed {
		if slices.Contains(managed, name) {
			t.Errorf("%s is managed and fixed: only the first is ever said", name)
		}
	}
}

// Only a tagged version of OpenYurt itself is taken for one.
func TestOpenYurtVersion(t *testing.T) {
	const flag = "-s -w -X github.com/openyurtio/openyurt/pkg/projectinfo.gitVersion="
	for _, tt := range []struct{ path, version, flags, want string }{
		{module, "(devel)", flag + "v1.7.0 -X a.b=c", "v1.7.0"}, // its releases, by Go before 1.24
		{module, "v1.7.0", flag + "v1.7.0", "v1.7.0"},           // and since
		{module, "v1.7.0+dirty", flag + "v1.7.0", "v1.7.0"},
		{module, "v1.6.1+dirty", "", "v1.6.1"},
		{module, "", "-X '" + strings.TrimPrefix(flag, "-s -w -X ") + "v1.6.1'", "v1.6.1"},
		{module, "(devel)", flag + "v1.6.0 " + flag + "v1.7.0", "v1.7.0"},
		{module, "(devel)", "", ""},
		{module, "(devel)", flag + "v1.6.1-0a1b2c3", ""},
		{module, "(devel)", flag + "v1.7.0-shop", ""},
		{module, "(devel)", flag, ""},
		{module, "(devel)", flag + "v2.3.0", ""}, // somebody's own count
		{module, "(devel)", "-X example.com/x" + strings.TrimPrefix(flag, "-s -w -X github.com") + "v1.6.1", ""},
		{module, "v1.6.2-0.20260601000000-0a1b2c3d4e5f", flag + "v1.6.1", ""}, // on the way to 1.7
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

// TestPoolProblem: first boot and preflight say the same of a pool.
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
