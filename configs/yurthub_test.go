package configs

import (
	"strings"
	"testing"
)

// TestYurthubArgsThatOthersCountOn checks that arguments of yurthub on which kubelet, first boot or
// the firewall rely are rejected wherever arguments can be given.
func TestYurthubArgsThatOthersCountOn(t *testing.T) {
	for _, name := range []string{"proxy-port", "bind-proxy-address", "serve-port", "bind-address", "multiplexer-port", "disk-cache-path",
		"root-dir", "bootstrap-file", "bootstrap-mode", "join-token"} {
		arg := "--" + name + "=1"
		for _, version := range []string{"", "v1.6.1", "v1.7.0"} {
			if probs := CheckSiteYurthubArgs([]string{"--v=4", arg}, version); len(probs) != 1 || probs[0].Path != "yurthub.extraArgs[1]" || !strings.HasPrefix(probs[0].Msg, "--"+name+" ") {
				t.Errorf("%s in a Site for yurthub %q: %v", arg, version, probs)
			}
		}
		if err := CheckHub("", "", "", nil, []string{arg}); err == nil || !strings.HasPrefix(err.Error(), "--yurthub-arg[0]: --"+name+" ") {
			t.Errorf("%s of firstboot convert: %v", arg, err)
		}
	}
}

// TestYurthubArgsOfAVersion checks which arguments each version of yurthub accepts. A Site does not
// contain the version, so stamping makes this check.
func TestYurthubArgsOfAVersion(t *testing.T) {
	for version, fits := range map[string]bool{
		"": true, "v1.6.0": false, "v1.6.0-rc.1": false, "v1.6.1": true, "v1.6.2": true, "v1.7.0": true, "v1.7.0-shop.3": true, "v1.8.0": true, "shop": true,
	} {
		probs := CheckSiteYurthubArgs([]string{"--pool-scope-resources=a", "--proxy-secure-port=10300", "--gc-frequency=3"}, version)
		want := "yurthub.extraArgs[0]: --pool-scope-resources is not a flag of yurthub " + version + " and would keep it from starting: remove it, or build the Image with yurthub v1.6.1 or later"
		switch {
		case fits && len(probs) > 0:
			t.Errorf("yurthub %q: %v", version, probs)
		case !fits && (len(probs) != 1 || probs[0].Error() != want):
			t.Errorf("yurthub %q: %v, want %q", version, probs, want)
		}
	}
}
