package configs

import (
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs/ignition"
)

// TestWarnings compares the warnings of each document, and their positions.
func TestWarnings(t *testing.T) {
	const head = "apiVersion: edgebake.io/v1alpha1\nkind: Site\nmasters: [192.168.7.11:6443]\ncredentials: {token: abcdef.0123456789abcdee}\n" +
		"caCertHashes: [\"sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\"]\n"
	for name, c := range map[string]struct{ doc, want string }{
		"few":              {"network: {dns: [8.8.8.8, \"fe80::1%eth0\"], search: [a.test]}\n", ""},
		"many DNS servers": {"network: {dns: [8.8.8.8, 8.8.4.4, 1.1.1.1, 9.9.9.9]}\n", "site.yaml:6:16: network.dns: has 4 servers; pods and"},
		"many domains":     {"network: {search: [a.test, b.test, c.test, d.test, e.test, f.test, g.test]}\n", "site.yaml:6:19: network.search: has 7 domains;"},
		"link-local": {"network: {interfaces: [{name: eth0, dhcp: true}], dns: [\"fe80::1\"]}\n",
			"site.yaml:6:57: network.dns[0]: fe80::1 is valid on one interface only: name it, as in fe80::1%eth0"},
		"a pattern first": {"network: {interfaces: [{name: \"en*\", dhcp: true}, {name: enp1s0, addresses: [192.168.7.20/24], gateway: 192.168.7.1}]}\n",
			"site.yaml:6:51: network.interfaces[1]: never applies: enp1s0 is matched by network.interfaces[0] (en*)"},
		"no default route": {"network: {interfaces: [{name: eth0, addresses: [192.168.7.20/24]}, {name: eth1, dhcp: true, noDefaultRoute: true}]}\n",
			"site.yaml:6:23: network.interfaces: no interface has a default route, so"},
		"DHCP without a default route": {"network: {interfaces: [{name: eth0, dhcp: true, noDefaultRoute: true}]}\n",
			"site.yaml:6:23: network.interfaces: no interface has a default route, so"},
		"a default route of the other family": {"network: {interfaces: [{name: eth0, addresses: [192.168.7.20/24, 'fd00:7::20/64'], gateway: 'fd00:7::1'}]}\n",
			"site.yaml:6:23: network.interfaces: no interface has a default route for IPv4, so"},
		"router advertisements": {"network: {interfaces: [{name: eth0, addresses: [192.168.7.20/24], acceptRA: true}]}\n",
			"site.yaml:6:23: network.interfaces: no interface has a default route for IPv4, so"},
		"the family of Services has one": {"network: {interfaces: [{name: eth0, addresses: [192.168.7.20/24, 'fd00:7::20/64'], gateway: 192.168.7.1}]}\n", ""},
		"a route":                        {"network: {interfaces: [{name: eth0, addresses: [192.168.7.20/24], routes: [{to: 10.96.0.0/12, via: 192.168.7.1}]}]}\n", ""},
		"a default route of a VLAN":      {"network: {interfaces: [{name: eth0, addresses: [192.168.7.20/24], vlans: [{id: 7, dhcp: true}]}]}\n", ""},
		"a pattern last":                 {"network: {interfaces: [{name: enp1s0, dhcp: true}, {name: \"en*\", dhcp: true}]}\n", ""},
		"a VIP among the pods":           {"vip: 10.244.7.7\n", "site.yaml:6:6: vip: 10.244.7.7 is in 10.244.0.0/16, the default pod network"},
		"inline Ignition": {`ignition: '{"ignition":{"version":"3.6.0"},"storage":{"files":[{"path":"/etc/foo","mode":644,"contents":{"source":"data:,x"}}]}}'` + "\n",
			"site.yaml:6:11: ignition: line 1 of the config, storage.files.0.mode: 644 is 01204 in octal: if 0644 is meant, write 420"},
	} {
		t.Run(name, func(t *testing.T) {
			site, err := ParseSite("site.yaml", []byte(head+c.doc))
			if err != nil {
				t.Fatal(err)
			}
			got := LocateSite("site.yaml", []byte(head+c.doc), site.Warnings())
			if c.want == "" && len(got) > 0 || c.want != "" && (len(got) != 1 || !strings.HasPrefix(got.Error(), c.want)) {
				t.Errorf("%v\nwant %s", got, c.want)
			}
		})
	}
}

func TestDecimalModes(t *testing.T) {
	for mode, want := range map[string]string{
		"644": "write 420", "755": "write 493", "600": "write 384", "640": "write 416", "400": "write 256", "700": "write 448", "777": "write 511", "1777": "write 1023",
		"420": "", "493": "", "384": "", "416": "", "256": "", "448": "", "511": "", "1023": "", "0": "", "292": "", "438": "",
	} {
		for _, version := range []string{"3.4.0", "3.6.0"} {
			text := `{"ignition":{"version":"` + version + `"},"storage":{"files":[{"path":"/etc/foo","mode":` + mode + `,"contents":{"source":"data:,x"}}]}}`
			_, warnings, probs := ignition.Parse("a.ign", []byte(text))
			if probs != nil {
				t.Errorf("%s: %v", mode, probs)
			}
			if got := warnings.Error(); want == "" && strings.Contains(got, "octal") || !strings.Contains(got, want) {
				t.Errorf("%s, spec %s: %q, want %q", mode, version, got, want)
			}
		}
	}
}

// TestIgnitionWarnings checks configs that are accepted: with a warning for a setting that Ignition
// ignores or applies only in part, and without one for hashed and locked passwords.
func TestIgnitionWarnings(t *testing.T) {
	for text, want := range map[string]string{
		`{"ignition":{"version":"3.4.0"},"storage":{"files":[{"path":"/a","mode":2493,"contents":{"source":"data:,x"}}]}}`:                                                 "setuid",
		`{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/a"}],"links":[{"path":"/b","target":"/a","hard":true,"user":{"id":1}}]}}`:                           "ignored for hard link",
		`{"ignition":{"version":"3.5.0"},"passwd":{"users":[{"name":"a","passwordHash":"*"},{"name":"b","passwordHash":"$y$j9T$abcdefgh$0123456789012345678901234567"}]}}`: "",
	} {
		_, warnings, probs := ignition.Parse("a.ign", []byte(text))
		if probs != nil || !strings.Contains(warnings.Error(), want) || want == "" && len(warnings) > 0 {
			t.Errorf("%s\nproblems %v, warnings %v", text, probs, warnings)
		}
	}
}

// TestIgnitionRejections checks that clear-text passwords and unknown versions are rejected.
func TestIgnitionRejections(t *testing.T) {
	for text, want := range map[string]string{
		`{"ignition":{"version":"3.5.0"},"passwd":{"users":[{"name":"a","passwordHash":"secret"}]}}`: "clear-text passwords are rejected",
		`{"ignition":{"version":"3.7.0-experimental"}}`:                                              "ignition.version 3.7.0-experimental is not supported: use 3.0.0 to 3.6.0",
	} {
		if _, _, probs := ignition.Parse("a.ign", []byte(text)); !strings.Contains(probs.Error(), want) {
			t.Errorf("%s: %v", text, probs)
		}
	}
}

func TestImageWarnings(t *testing.T) {
	for name, c := range map[string]struct{ field, want string }{
		"contradicting arguments":        {"kernel: {args: [net.ifnames=0, quiet, net.ifnames=1]}", "kernel.args[2]: net.ifnames=1 contradicts net.ifnames=0 before it"},
		"repeatable arguments":           {"kernel: {args: [video=a, video=b]}", ""},
		"keys without a serial":          {"updates: {keys: [RWRFREdFQkFLRQOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4]}", "updates.serial: machines with this image accept every image that is signed with updates.keys"},
		"keys and a serial":              {"updates: {keys: [RWRFREdFQkFLRQOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4], serial: 1}", ""},
		"the default VIP among the pods": {"cni: {podCIDR: 10.103.0.0/16}", "cni.podCIDR: 10.103.0.0/16 contains 10.103.97.2"},
	} {
		img, err := parseImage("image.yaml", []byte("apiVersion: edgebake.io/v1alpha1\nkind: Image\nname: x\nsourceDate: 2026-01-01T00:00:00Z\nbase: {debian: {suite: trixie}}\n"+
			"kubernetes: {version: v1.37.2, source: {goModule: {}}}\ncontainerd: {version: 2.3.7, source: {goModule: {}}}\n"+c.field+"\n"))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got := img.Warnings().Error()
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestUnreachable(t *testing.T) {
	const head = "apiVersion: edgebake.io/v1alpha1\nkind: Site\nmasters: [10.1.2.3:6443, 192.168.7.9:6443, 10.2.0.1:6443]\ncredentials: {token: abcdef.0123456789abcdee}\n" +
		"caCertHashes: [\"sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\"]\n"
	for name, c := range map[string]struct{ network, want string }{
		"the default": {"", ""},
		"static": {"network: {interfaces: [{name: \"en*\", addresses: [192.168.7.20/24], routes: [{to: 10.2.0.0/16, via: 192.168.7.1}]}]}\n",
			"site.yaml:3:11: masters[0]: no route leads to 10.1.2.3: add network.interfaces[].gateway, or a route to its network"},
		"a VLAN":    {"network: {interfaces: [{name: eth0, vlans: [{id: 7, addresses: [10.1.0.5/16]}, {id: 9, addresses: [10.2.0.5/16]}, {id: 8, addresses: [192.168.7.20/24]}]}]}\n", ""},
		"a gateway": {"network: {interfaces: [{name: eth0, addresses: [192.168.7.20/24], gateway: 192.168.7.1}]}\n", ""},
		"a gateway of the other family": {"network: {interfaces: [{name: eth0, addresses: [10.1.0.5/16, 192.168.7.20/24, 'fd00::5/64'], gateway: 'fd00::1'}]}\n",
			"site.yaml:3:44: masters[2]: no route leads to 10.2.0.1: add network.interfaces[].gateway, or a route to its network"},
		"no address of the family": {"network: {interfaces: [{name: eth0, addresses: ['fd00::5/64'], gateway: 'fd00::1'}]}\n",
			"site.yaml:3:11: masters[0]: no route leads to 10.1.2.3: add network.interfaces[].gateway, or a route to its network\n" +
				"site.yaml:3:26: masters[1]: no route leads to 192.168.7.9: add network.interfaces[].gateway, or a route to its network\n" +
				"site.yaml:3:44: masters[2]: no route leads to 10.2.0.1: add network.interfaces[].gateway, or a route to its network"},
		"DHCP": {"network: {interfaces: [{name: eth0, addresses: [192.168.7.20/24]}, {name: eth1, dhcp: true}]}\n", ""},
	} {
		site, err := ParseSite("site.yaml", []byte(head+c.network))
		if err != nil {
			t.Fatal(err)
		}
		if got := LocateSite("site.yaml", []byte(head+c.network), site.Unreachable()).Error(); got != c.want && !(c.want == "" && got == Problems{}.Error()) {
			t.Errorf("%s: %s\nwant %s", name, got, c.want)
		}
	}
}
