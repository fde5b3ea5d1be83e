package configs

import (
	"strings"
	"testing"
)

func TestNodeIP(t *testing.T) {
	const (
		static = "\nnetwork: {interfaces: [{name: eth0, addresses: [192.168.7.20/24], gateway: 192.168.7.1}, {name: eth1, vlans: [{id: 7, addresses: ['10.7.0.20/24', 'fd00:7::20/64']}]}]}"
		dhcp   = "\nnetwork: {interfaces: [{name: eth0, dhcp: true}, {name: eth1, addresses: [10.7.0.20/24]}]}"
		ra     = "\nnetwork: {interfaces: [{name: eth0, addresses: [192.168.7.20/24], acceptRA: true}]}"
		extra  = "\nignition: '{\"ignition\":{\"version\":\"3.4.0\"}}'"
	)
	for _, tc := range []struct{ nodeIP, rest, want string }{
		{"10.0.0.0/8", "", ""},
		{"10.7.0.20", static, ""},
		{"10.0.0.0/8,fd00::/8", static, ""},
		{"'fd00::/8, 0.0.0.0/0'", static, ""},
		{"'::/0'", static, ""},
		{"172.16.0.0/12", dhcp, ""},
		{"fd00::/8", ra, ""},
		{"172.16.0.0/12", static + extra, ""},

		{"172.16.0.0/12", static, "no interface has an address in 172.16.0.0/12 (the interfaces have 192.168.7.20, 10.7.0.20, fd00:7::20)"},
		{"10.0.0.0/8,fd01::/16", static, "no interface has an address in fd01::/16"},
		{"172.16.0.0/12", ra, "no interface has an address in 172.16.0.0/12 (the interfaces have 192.168.7.20)"},
		{"10.7.0.21", static, "no interface has an address in 10.7.0.21/32"},
		{"10.1.2.3/8", "", "10.1.2.3/8 has bits set after its prefix; write 10.0.0.0/8"},
		{"10.0.0.0/8,192.168.0.0/16", "", "two networks of the same family"},
		{"10.0.0.0/8,fd00::/8,fd01::/16", "", "two networks of the same family"},
		{"10.0.0.0/8,", "", `"" is neither a CIDR nor an address`},
		{"eth1", "", `"eth1" is neither a CIDR nor an address, e.g. 10.0.0.0/8`},
		{"10.0.0.0/33", "", "is neither a CIDR nor an address"},
		{"127.0.0.0/8", "", "cannot be the node's address"},
		{"169.254.0.0/16", "", "valid on one link only"},
		{"'fe80::/10'", "", "valid on one link only"},
		{"224.0.0.0/4", "", "is a multicast address"},
		{"0.0.0.0", "", "is not the address of a machine"},
		{"'::ffff:10.0.0.1'", "", "write 10.0.0.1"},
		{"'fe80::1%eth0'", "", "is neither a CIDR nor an address"},
		{"10.0.0.0/8", "\nkubeletExtraArgs: {node-ip: 10.7.0.20}", `kubeletExtraArgs["node-ip"]: sets the same value as nodeIP`},
	} {
		doc := "apiVersion: edgebake.io/v1alpha1\nkind: Site\nmasters: [192.168.9.11:6443]\ncredentials: {token: abcdef.0123456789abcdef}\n" +
			"caCertHashes: ['sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef']\nnodeIP: " + tc.nodeIP + tc.rest + "\n"
		_, err := ParseSite("site.yaml", []byte(doc))
		switch {
		case tc.want == "" && err != nil:
			t.Errorf("%s%s: %v", tc.nodeIP, tc.rest, err)
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%s%s: %v, want %q", tc.nodeIP, tc.rest, err, tc.want)
		case tc.want != "" && !strings.Contains(err.Error(), "site.yaml:"):
			t.Errorf("%s: the problem has no position: %v", tc.nodeIP, err)
		}
	}
}
