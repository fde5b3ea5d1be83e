package openyurt

import (
	"fmt"
	"strings"

	"golang.org/x/mod/semver"
)

// flag is a flag of yurthub's command line.
type flag struct {
	// since is the first version with the flag, and until the first version without it. If both are
	// empty, all supported versions have the flag.
	since, until string
	// managed is set if first boot sets the flag.
	managed bool
	// fixed is the reason why the flag must keep its default. It is "" if the flag may be set.
	fixed string
}

// flags lists the flags of supported yurthubs, from their source. yurthub does not start with an
// unknown flag.
var flags = func() map[string]flag {
	all := map[string]flag{
		"proxy-port":           {fixed: "kubelet connects to it at 127.0.0.1:" + ProxyPort},
		"bind-proxy-address":   {fixed: "kubelet connects to it at 127.0.0.1:" + ProxyPort},
		"serve-port":           {fixed: "first boot checks at " + Health + " whether it is ready"},
		"multiplexer-port":     {fixed: "its clients there get the node's rights, and the firewall closes only port " + PoolPort, since: "v1.7.0"},
		"disk-cache-path":      {fixed: "its cache must be in " + Cache + ", which survives restarts and is cleared by reset and revert"},
		"root-dir":             {fixed: "first boot looks for its certificate in " + Root},
		"node-ip":              {managed: true, since: "v1.7.0"},
		"pool-scope-resources": {since: "v1.6.1"},
	}
	for _, name := range strings.Fields(`bind-address bootstrap-file bootstrap-mode discovery-token-ca-cert-hash
		discovery-token-unsafe-skip-ca-verification hub-cert-organizations join-token lb-mode namespace node-name
		nodepool-name server-addr working-mode`) {
		all[name] = flag{managed: true}
	}
	for _, name := range strings.Fields(`disabled-resource-filters dummy-if-ip dummy-if-name enable-dummy-if enable-iptables
		enable-node-pool enable-pool-service-topology enable-resource-filter gc-frequency heartbeat-failed-retry
		heartbeat-healthy-threshold heartbeat-interval-seconds heartbeat-timeout-seconds host-control-plane-address
		kubelet-health-grace-period max-requests-in-flight min-request-timeout profiling proxy-secure-port v vmodule`) {
		all[name] = flag{}
	}
	return all
}()

// in reports whether yurthub of this version has the flag; "" means any version. Prereleases and
// builds after a release have the flags of that release.
func (f flag) in(version string) bool {
	tag, _, _ := strings.Cut(version, "-")
	if !semver.IsValid(tag) {
		return true
	}
	return (f.since == "" || semver.Compare(tag, f.since) >= 0) && (f.until == "" || semver.Compare(tag, f.until) < 0)
}

// BadFlag returns why a person may not set a flag for yurthub of this version, or "" if it is
// allowed. An empty version means any version.
func BadFlag(name, version string) string {
	f, known := flags[name]
	switch {
	case f.managed:
		return "is set by first boot"
	case f.fixed != "":
		return "must keep yurthub's own value: " + f.fixed + "; remove it"
	case !known:
		return "is unknown to yurthub and would keep it from starting"
	case f.in(version):
		return ""
	case f.until != "" && semver.Compare(version, f.until) >= 0:
		return fmt.Sprintf("is not a flag of yurthub %s and would keep it from starting: remove it, since yurthub %s removed the flag", version, f.until)
	}
	return fmt.Sprintf("is not a flag of yurthub %s and would keep it from starting: remove it, or build the Image with yurthub %s or later", version, f.since)
}
