package clusterdoc

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/examples"
)

const smallCluster = `apiVersion: edgebake.io/v1alpha1
kind: Cluster
name: c
kubernetesVersion: v1.36.3
masters: [{name: m1, address: 192.168.7.11}]
`

func mustCluster(t *testing.T, doc string) *File {
	t.Helper()
	f, err := Parse("cluster.yaml", []byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestClusterDefaults(t *testing.T) {
	c := mustCluster(t, smallCluster+"nodes: [{name: a}, {name: b, nodePool: p}]\nopenyurt:\n")
	if c.VIP != "10.103.97.2" || c.Port != 6443 || c.PodCIDRs[0] != "10.244.0.0/16" || c.ServiceCIDRs[0] != "10.96.0.0/16" || !c.HasOpenYurt() {
		t.Errorf("%+v", c.Cluster)
	}
	if c.Nodes[0].NodeType != configs.NodeNative || c.Nodes[1].NodeType != configs.NodeEdge {
		t.Errorf("%+v", c.Nodes)
	}
	if len(c.Warnings) != 0 {
		t.Error(c.Warnings)
	}
	six := mustCluster(t, strings.Replace(smallCluster, "192.168.7.11", `"fd00:7::11"`, 1)+"vip: fd00:97::2\n")
	if six.PodCIDRs[0] != "fd00:244::/56" || six.ServiceCIDRs[0] != "fd00:96::/112" || six.APIServers()[0] != "[fd00:7::11]:6443" {
		t.Errorf("%+v", six.Cluster)
	}
	if native := mustCluster(t, smallCluster+"openyurt: false\n"); native.HasOpenYurt() {
		t.Error("openyurt: false has no effect")
	}
}

// TestClusterWarnings checks that an even number of masters and kube-proxy's mode ipvs are
// accepted, each with a warning.
func TestClusterWarnings(t *testing.T) {
	c := mustCluster(t, strings.Replace(smallCluster, "7.11}]", "7.11}, {name: m2, address: 192.168.7.12}]", 1)+"kubeProxy: {mode: ipvs}\n")
	if len(c.Warnings) != 2 || c.Warnings[0].Line != 5 || !strings.Contains(c.Warnings[0].Msg, "2 control-plane nodes survive no more failures than 1") {
		t.Error(c.Warnings)
	}
}

// TestNobodyToAsk checks the warning about machines without a DNS server, on which CoreDNS cannot
// start.
func TestNobodyToAsk(t *testing.T) {
	const still = "{interfaces: [{name: en0, addresses: [192.168.7.9/24]}]%s}"
	none, one := fmt.Sprintf(still, ""), fmt.Sprintf(still, ", dns: [192.168.7.1]")
	cluster := func(master, node string) string {
		return strings.Replace(smallCluster, "7.11}", "7.11, network: "+strings.Replace(master, "7.9/", "7.11/", 1)+"}", 1) + "nodes: [{name: a}, {name: b, network: " + node + "}]\n"
	}
	const without = "---\napiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\ndns: {disabled: true}\n"
	for doc, want := range map[string]string{
		cluster(one, one):             "",
		cluster("{}", one):            "",
		cluster(one, none):            "cluster.yaml:6:39: nodes[1].network: b: no DNS server",
		cluster(none, none):           "cluster.yaml:5:54: masters[0].network: m1 and 1 more: no DNS server",
		cluster(none, none) + without: "",
		cluster(one, "{interfaces: [{name: en0, vlans: [{id: 7, dhcp: true}]}]}"): "",
		cluster(one, "{interfaces: [{name: en0, dhcp: true}]}"):                   "",
	} {
		got := mustCluster(t, doc).Warnings
		if want == "" && len(got) > 0 || want != "" && (len(got) != 1 || !strings.HasPrefix(got[0].Error(), want)) {
			t.Errorf("%s\nwarnings %v, want %q", doc, got, want)
		}
	}
}

// TestNodeSite checks that the Site of a node can be stamped.
func TestNodeSite(t *testing.T) {
	c := mustCluster(t, examples.Cluster)
	if len(c.Kubeadm) != 2 {
		t.Fatalf("%d documents of kubeadm", len(c.Kubeadm))
	}
	for i := range c.Nodes {
		text, err := configs.EncodeSlot(c.NodeSite(&c.Nodes[i], configs.NewSecret("abcdef.0123456789abcdef"), "sha256:"+strings.Repeat("0a", 32)))
		if err != nil {
			t.Fatal(err)
		}
		s, err := configs.ParseSite("site.yaml", text)
		if err != nil {
			t.Fatal(err)
		}
		if s.NodeName != c.Nodes[i].Name || len(s.Masters) != 3 || s.VIP != c.VIP {
			t.Errorf("%+v", s)
		}
	}
}

// TestMachineFields checks that the fields of a machine in a Cluster are also in its Site.
func TestMachineFields(t *testing.T) {
	c := mustCluster(t, smallCluster)
	match := configs.Match{Serial: "PC0Q1234"}
	network := configs.Network{NTP: []string{"192.0.2.1"}}
	node := Node{Name: "a", NodeType: configs.NodeEdge, NodePool: "p", NodeIP: "10.0.0.0/8", Labels: map[string]string{"a": "b"},
		Taints: []configs.Taint{{Key: "k", Effect: "NoSchedule"}}, Match: match, Network: network}
	master := ControlPlaneNode{Name: "m1", Address: "192.168.7.11", Match: match, Network: network}
	seat, err := c.ControlPlaneSite(&master, "id", "sha256:"+strings.Repeat("0a", 32), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	for site, machine := range map[*configs.Site]reflect.Value{c.NodeSite(&node, configs.Secret{}, ""): reflect.ValueOf(node), seat: reflect.ValueOf(master)} {
		for i := range machine.NumField() {
			name := machine.Type().Field(i).Name
			want, got := machine.Field(i), reflect.ValueOf(site).Elem().FieldByName(name)
			if want.IsZero() {
				t.Errorf("%s: the test has no value for %s", machine.Type(), name)
			}
			if got.IsValid() && !reflect.DeepEqual(got.Interface(), want.Interface()) {
				t.Errorf("%s: the Site has %s %v, want %v", machine.Type(), name, got, want)
			}
		}
	}
}

// TestClusterReport checks that each machine has its own URL if the receiver has a key, and that
// values are rejected if they cannot be used in a URL.
func TestClusterReport(t *testing.T) {
	const doc = smallCluster + "nodes: [{name: a}, {name: b}]\nreport: {url: 'https://192.0.2.9:8443/', key: k3k3k3k3k3k3k3k3k3k3k3k3k3}\n"
	c := mustCluster(t, doc)
	seat, err := c.ControlPlaneSite(&c.Masters[0], "id", "sha256:"+strings.Repeat("0a", 32), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for name, s := range map[string]*configs.Site{"m1": seat, "a": c.NodeSite(&c.Nodes[0], configs.Secret{}, ""), "b": c.NodeSite(&c.Nodes[1], configs.Secret{}, "")} {
		if want := "https://192.0.2.9:8443" + ReportPath(c.Report.Key, name); s.Report.URL != want {
			t.Errorf("%s reports to %s: want %s", name, s.Report.URL, want)
		}
		seen[s.Report.URL[len(s.Report.URL)-32:]] = true
	}
	if len(seen) != 3 {
		t.Errorf("two machines have the same report URL: %v", seen)
	}
	if old := mustCluster(t, strings.NewReplacer(", key: k3k3k3k3k3k3k3k3k3k3k3k3k3", "", "8443/", "8443/common").Replace(doc)); old.NodeSite(&old.Nodes[0], configs.Secret{}, "").Report.URL != "https://192.0.2.9:8443/common" {
		t.Errorf("a Cluster without the key: %+v", old.Report)
	}
	for edit, want := range map[[2]string]string{
		{"8443/", "8443/common"}:                  "report.url: has a path",
		{"k3k3k3k3k3k3k3k3k3k3k3k3k3", "k3"}:      "report.key: is shorter",
		{"url: 'https://192.0.2.9:8443/', ", ""}:  "report.key: requires a receiver",
		{"https://192.0.2.9", "http://192.0.2.9"}: "report.url: the URL begins with http",
	} {
		if _, err := Parse("c", []byte(strings.Replace(doc, edit[0], edit[1], 1))); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", edit[1], err)
		}
	}
}

func TestVIPInANodesNetwork(t *testing.T) {
	_, err := Parse("c", []byte(smallCluster+`vip: 192.168.8.9
nodes: [{name: a, network: {interfaces: [{name: eth0, addresses: [192.168.8.1/24]}]}}, {name: b, network: {interfaces: [{name: eth0, addresses: [192.168.8.2/24]}]}}]
`))
	var probs configs.Problems
	if !errors.As(err, &probs) || len(probs) != 1 || probs[0].Path != "vip" || probs[0].Line != 6 || !strings.Contains(probs[0].Msg, "nodes[0].network") {
		t.Error(err)
	}
}

// TestNamesOnAMaster checks that the network of a control-plane node is checked like that of a
// worker: without a DNS server, the name of a time server cannot be resolved.
func TestNamesOnAMaster(t *testing.T) {
	_, err := Parse("c", []byte(strings.Replace(smallCluster, "7.11}", "7.11, network: {interfaces: [{name: eth0, addresses: [192.168.7.11/24]}], ntp: [time.example.com]}}", 1)))
	if err == nil || !strings.Contains(err.Error(), "masters[0].network.ntp[0]: time.example.com is a name") {
		t.Error(err)
	}
}

// TestRoutesToPods checks that a route may lead to the pods of another machine, as a cluster
// without a network plugin needs, but nowhere else in the pod CIDR.
func TestRoutesToPods(t *testing.T) {
	for route, ok := range map[string]bool{
		"{to: 10.244.0.0/24, via: 192.168.7.11}":    true,
		"{to: 10.244.0.0/24, via: 192.168.7.2}":     true,  // through another node
		"{to: 10.244.0.0/24, via: 192.168.7.254}":   false, // through a router to another network
		"{to: 10.244.0.0/16, via: 192.168.7.11}":    false, // would also contain the machine's own pods
		"{to: 10.240.0.0/12, via: 192.168.7.11}":    false,
		"{to: 10.96.128.0/20, via: 192.168.7.11}":   false, // to Services
		"{to: 192.168.99.0/24, via: 192.168.7.254}": true,
	} {
		_, err := Parse("c", []byte(smallCluster+`nodes:
  - {name: a, network: {interfaces: [{name: eth0, addresses: [192.168.7.1/24], routes: [`+route+`]}], dns: [192.168.7.254]}}
  - {name: b, network: {interfaces: [{name: eth0, addresses: [192.168.7.2/24]}], dns: [192.168.7.254]}}
`))
		if ok != (err == nil) || !ok && !strings.Contains(err.Error(), "the destination of nodes[0].network.interfaces[0].routes[0]") {
			t.Errorf("%s: %v", route, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(examples.Cluster)
	f.Fuzz(func(t *testing.T, text string) {
		if _, err := Parse("c", []byte(text)); err != nil && strings.Contains(err.Error(), "BUG") {
			t.Error(err)
		}
	})
}

// TestFieldsOfALaterKubernetes checks that unknown fields are only warnings if Kubernetes is newer
// than the schemas.
func TestFieldsOfALaterKubernetes(t *testing.T) {
	doc := smallCluster + "---\napiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 60\nnewest: 1\n"
	if _, err := Parse("c", []byte(doc)); err == nil || !strings.Contains(err.Error(), "c:10:1: KubeletConfiguration.newest: unknown field in Kubernetes v1.37") {
		t.Error(err)
	}
	c := mustCluster(t, strings.Replace(doc, "v1.36.3", "v1.38.0", 1))
	if len(c.Warnings) != 1 || c.Warnings[0].Line != 10 {
		t.Errorf("warnings: %v", c.Warnings)
	}
}

// TestManagerRates checks that kube-controller-manager approves certificates fast enough for many
// machines, unless the Cluster sets another rate.
func TestManagerRates(t *testing.T) {
	const doc = "---\napiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\ncontrollerManager:\n  extraArgs:\n  - {name: %s, value: '7'}\n"
	for name, tt := range map[string]struct {
		more string
		want []string
		not  string
	}{
		"nothing said":     {"", []string{`"kube-api-qps"`, `value: "150"`, `"kube-api-burst"`, `value: "300"`}, "never"},
		"another argument": {fmt.Sprintf(doc, "v"), []string{"name: v", "kube-api-qps", "kube-api-burst"}, "never"},
		"another rate":     {fmt.Sprintf(doc, "kube-api-qps"), []string{"kube-api-qps"}, "kube-api-burst"},
	} {
		c := mustCluster(t, smallCluster+tt.more)
		s, err := c.ControlPlaneSite(&c.Masters[0], "id", "sha256:"+strings.Repeat("0a", 32), time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		docs, err := s.ControlPlane.Documents().Encode()
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range tt.want {
			if !strings.Contains(string(docs), want) {
				t.Errorf("%s: kubeadm's documents lack %q:\n%s", name, want, docs)
			}
		}
		if strings.Contains(string(docs), tt.not) {
			t.Errorf("%s: kubeadm's documents have %q:\n%s", name, tt.not, docs)
		}
	}
}
