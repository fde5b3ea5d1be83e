package openyurt

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/mod/semver"
)

// flags are those that yurthub v1.6.0, v1.6.1 and v1.7.0 have in common, as its
// source has them; with one that it does not know it never starts.
var flags = strings.Fields(`
	bind-address bind-proxy-address bootstrap-file bootstrap-mode disabled-resource-filters
	discovery-token-ca-cert-hash discovery-token-unsafe-skip-ca-verification disk-cache-path dummy-if-ip
	dummy-if-name enable-dummy-if enable-iptables enable-node-pool enable-pool-service-topology
	enable-resource-filter gc-frequency heartbeat-failed-retry heartbeat-healthy-threshold
	heartbeat-interval-seconds heartbeat-timeout-seconds host-control-plane-address hub-cert-organizations
	join-token kubelet-health-grace-period lb-mode max-requests-in-flight min-request-timeout namespace
	node-name nodepool-name profiling proxy-port proxy-secure-port root-dir serve-port server-addr
	working-mode v vmodule`)

// flagsSince are those that came later and may be given, and with which version
// they came.
var flagsSince = map[string]string{"pool-scope-resources": "v1.6.1"}

// managed are what first boot sets, by the rules of a node that survives (one
// URL where yurthub takes one, the endpoint first, the CA pinned, an identity
// that is not asked for twice).
var managed = []string{"server-addr", "node-name", "node-ip", "nodepool-name", "working-mode", "bootstrap-mode", "bootstrap-file",
	"join-token", "lb-mode", "namespace", "bind-address", "hub-cert-organizations", "discovery-token-ca-cert-hash", "discovery-token-unsafe-skip-ca-verification"}

// fixed have values of yurthub's own that others count on, and who.
var fixed = map[string]string{
	"proxy-port":         "kubelet asks it at 127.0.0.1:10261",
	"bind-proxy-address": "kubelet asks it at 127.0.0.1:10261",
	"serve-port":         "first boot asks it at 127.0.0.1:10267 whether it is ready",
	"multiplexer-port":   "it lends the node's rights there, and the firewall closes port 10269 alone",
	"disk-cache-path":    "its cache is in " + Cache + ", which lasts, and which reset and revert clear",
	"root-dir":           "its identity is in " + Root + ", where first boot looks for it",
}

// BadFlag says why a person may not give yurthub of that version, "" for any,
// a flag; "": he may.
func BadFlag(name, version string) string {
	switch {
	case slices.Contains(managed, name):
		return "is set by first boot"
	case fixed[name] != "":
		return "must keep yurthub's own value: " + fixed[name] + "; remove it"
	case slices.Contains(flags, name):
		return ""
	}
	since, some := flagsSince[name]
	if !some {
		return "is unknown to yurthub and would keep it from starting"
	}
	// What goes before a release, or somebody built of it, has its flags.
	tag, _, _ := strings.Cut(version, "-")
	if !semver.IsValid(tag) || semver.Compare(tag, since) >= 0 {
		return ""
	}
	return fmt.Sprintf("is not a flag of yurthub %s and would keep it from starting: remove it, or build the Image with yurthub %s or later", version, since)
}
