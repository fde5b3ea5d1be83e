package overlays

import (
	"slices"
	"strings"
	"testing"
)

func TestCNIPlugins(t *testing.T) {
	const good = `{"cniVersion": "1.0.0", "name": "a-net", "plugins": [{"type": "ptp", "ipam": {"type": "host-local"}}, {"type": "portmap"}]}`
	for _, tt := range []struct{ old, new, want string }{
		{"", "", ""},
		{"1.0.0", "0.3.1", ""},
		{"1.0.0", "1.1.0", ""},
		{"1.0.0", "0.2.0", "cniVersion"},
		{"1.0.0", "one", "cniVersion"},
		{"a-net", "a net", "name \"a net\""},
		{"a-net", "../net", "name"},
		{"a-net", "", "name is required"},
		{`"ptp"`, `"bin/ptp"`, "plugins[0].type"},
		{`"ptp"`, `""`, "plugins[0].type is required"},
		{`"host-local"`, `".."`, "plugins[0].ipam.type"},
		{"}]}", "}]} x", "not a CNI configuration list"},
	} {
		plugins, err := CNIPlugins([]byte(strings.Replace(good, tt.old, tt.new, 1)))
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %s", tt.new, err, tt.want)
		}
		if want := []string{"ptp", "host-local", "portmap"}; err == nil && !slices.Equal(plugins, want) {
			t.Errorf("%s: plugins %q", tt.new, plugins)
		}
	}
}

// FuzzCNIPlugins checks that CNIPlugins returns only valid plugin names.
func FuzzCNIPlugins(f *testing.F) {
	f.Add([]byte(`{"cniVersion": "1.0.0", "name": "a", "plugins": [{"type": "ptp", "ipam": {"type": "host-local"}}]}`))
	f.Add([]byte(`{"cniVersion": "0.4.0", "name": "a", "plugins": [{"type": "../x"}, null]}`))
	f.Add([]byte(`[]`))
	f.Fuzz(func(t *testing.T, b []byte) {
		plugins, err := CNIPlugins(b)
		if err != nil {
			return
		}
		if len(plugins) == 0 {
			t.Error("accepted without a plugin")
		}
		for _, p := range plugins {
			if p == "" || strings.Contains(p, "/") {
				t.Errorf("accepted plugin %q", p)
			}
		}
	})
}
