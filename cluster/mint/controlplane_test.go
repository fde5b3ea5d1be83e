package mint

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"filippo.io/age"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/configs/sealed"
)

const threeMasters = `apiVersion: edgebake.io/v1alpha1
kind: Cluster
name: shops
kubernetesVersion: v1.36.3
kubeProxy: {mode: ipvs, bindAddress: 0.0.0.0}
masters: [{name: m1, address: 192.0.2.11}, {name: m2, address: 192.0.2.12}, {name: m3, address: 192.0.2.13}]
nodes: [{name: a}]
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
apiServer: {certSANs: [api.example.com], extraArgs: [{name: v, value: "2"}]}
dns: {disabled: true}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
nodeRegistration: {taints: [], kubeletExtraArgs: [{name: v, value: "3"}]}
`

// TestPatienceOfProbes checks that timeouts in the Cluster's kubeadm documents take precedence over
// edgebake's timeout for startup probes, 20 minutes.
func TestPatienceOfProbes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	doc := strings.Replace(threeMasters, "nodeRegistration: {", "timeouts: {controlPlaneComponentHealthCheck: 7m0s, tlsBootstrap: 3m0s}\nnodeRegistration: {", 1)
	if _, err := newOf(dir, doc, Options{Now: now()}); err != nil {
		t.Fatal(err)
	}
	sites, err := ControlPlaneSites(dir, sealed.Identity{}, now())
	if err != nil {
		t.Fatal(err)
	}
	docs := sites[0].Site.ControlPlane.Kubeadm
	if !strings.Contains(docs, "controlPlaneComponentHealthCheck: 7m0s") || !strings.Contains(docs, "tlsBootstrap: 3m0s") || strings.Contains(docs, "20m0s") {
		t.Errorf("the documents have other timeouts:\n%s", docs)
	}
}

// TestDualStackMasters checks that a control-plane node registers an IPv6 address, and certificates
// have it, only in a dual-stack cluster and only if the address is on the interface with the node's
// IPv4 address. etcd and the API server always use IPv4.
func TestDualStackMasters(t *testing.T) {
	const networks = "podCIDRs: [10.244.0.0/16, \"fd00:10:244::/56\"]\nserviceCIDRs: [10.96.0.0/16, \"fd00:10:96::/112\"]\n"
	for name, tt := range map[string]struct {
		networks, interfaces, nodeIP string
	}{
		"both":            {networks, "[{name: eth0, addresses: [192.0.2.12/24, \"fe80::12/64\", \"2001:db8::12/64\"]}]", "192.0.2.12,2001:db8::12"},
		"DHCP":            {networks, "", "192.0.2.12"},
		"elsewhere":       {networks, "[{name: eth0, addresses: [192.0.2.12/24]}, {name: eth1, addresses: [\"2001:db8::12/64\"]}]", "192.0.2.12"},
		"a single family": {"", "[{name: eth0, addresses: [192.0.2.12/24, \"2001:db8::12/64\"]}]", "192.0.2.12"},
	} {
		t.Run(name, func(t *testing.T) {
			m2 := "{name: m2, address: 192.0.2.12}"
			if !strings.Contains(threeMasters, m2) {
				t.Fatalf("the Cluster has no %s", m2)
			}
			doc := strings.Replace(threeMasters, "nodes:", tt.networks+"nodes:", 1)
			if tt.interfaces != "" {
				doc = strings.Replace(doc, m2, "{name: m2, address: 192.0.2.12, network: {interfaces: "+tt.interfaces+"}}", 1)
			}
			dir := filepath.Join(t.TempDir(), "shops")
			if _, err := newOf(dir, doc, Options{Now: now()}); err != nil {
				t.Fatal(err)
			}
			sites, err := ControlPlaneSites(dir, sealed.Identity{}, now())
			if err != nil {
				t.Fatal(err)
			}
			dual := strings.Contains(tt.nodeIP, ",")
			for i, s := range sites {
				c := s.Site.ControlPlane
				if got := slices.Contains(c.Documents().CertSANs(), "2001:db8::12"); got != dual || slices.Contains(c.Documents().CertSANs(), "fe80::12") {
					t.Errorf("%s: certificates have %q", s.Name, c.Documents().CertSANs())
				}
				if i != 1 {
					continue
				}
				if !strings.Contains(c.Kubeadm, `{name: "node-ip", value: "`+tt.nodeIP+`"}`) || !strings.Contains(c.Kubeadm, `advertiseAddress: "192.0.2.12"`) || c.Members[1].PeerURL() != "https://192.0.2.12:2380" {
					t.Errorf("%s\n%s", c.Members[1].PeerURL(), c.Kubeadm)
				}
			}
		})
	}
}

// TestMasterSites checks that a control-plane node's Site is valid and has the cluster's keys, its
// kubeadm documents and the end of the bootstrap period. Its public form has no key.
func TestMasterSites(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	if _, err := newOf(dir, strings.Replace(threeMasters, "nodes:", "manifests: [a.yaml]\nnodes:", 1), Options{Now: now(),
		Manifests: []manifest.File{{Name: "a.yaml", Text: "apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n"}}}); err != nil {
		t.Fatal(err)
	}
	sites, err := ControlPlaneSites(dir, sealed.Identity{}, now())
	if err != nil || len(sites) != 3 {
		t.Fatalf("%d Sites, %v", len(sites), err)
	}
	text, err := configs.EncodeSlot(sites[1].Site)
	if err != nil {
		t.Fatal(err)
	}
	site, err := configs.ParseSite("m2.yaml", text)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	docs, err := site.ControlPlane.Documents().Encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"controlPlaneEndpoint: \"apiserver.cluster.local:6443\"", "api.example.com", "10.103.97.2", "192.0.2.13",
		"advertiseAddress: \"192.0.2.12\"", "name: \"m2\"", "mode: \"ipvs\"", "10.103.97.2/32", "taints: []", "ECDSA-P256",
		"controlPlaneComponentHealthCheck: \"20m0s\""} {
		if !strings.Contains(string(docs), want) {
			t.Errorf("the documents lack %s:\n%s", want, docs)
		}
	}
	if site.ControlPlane.BootstrapEnd() != sites[1].Expires || site.ControlPlane.ID == "" {
		t.Errorf("%+v", site.ControlPlane)
	}
	if tokens, err := manifest.Unpack(site.Credentials.Keys.Objects); err != nil || len(tokens) != 1 || strings.Count(tokens[0].Text, "name: bootstrap-token-") != 1 {
		t.Errorf("tokens: %+v, %v", tokens, err)
	}
	bare := *site
	bare.Credentials = configs.Credentials{}
	public, err := configs.EncodeSlot(&bare)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range site.Credentials.Keys.Secrets() {
		longest := slices.MaxFunc(strings.Split(s.Reveal(), "\n"), func(a, b string) int { return len(a) - len(b) })
		if longest == "" || strings.Contains(string(public), longest) {
			t.Errorf("the public form of the Site contains a secret (longest value: %d bytes)", len(longest))
		}
	}

	// After BootstrapUntil, no Site can bootstrap the cluster until --bootstrap permits it again.
	late := now().Add(200 * time.Hour)
	if sites, err = ControlPlaneSites(dir, sealed.Identity{}, late); err != nil || sites[0].Site.ControlPlane.BootstrapUntil != "" {
		t.Fatalf("%v, %+v", err, sites)
	}
	if sites[0].Site.Credentials.Keys.Objects.Reveal() != "" {
		t.Error("expired tokens are published")
	}
	if _, err := allowBootstrap(dir, late, late.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if sites, err = ControlPlaneSites(dir, sealed.Identity{}, late); err != nil || !sites[0].Site.ControlPlane.BootstrapEnd().Equal(late.Add(time.Hour).Truncate(time.Second)) {
		t.Fatalf("%v, %+v", err, sites)
	}
	if r, err := Load(dir); err != nil || len(r.Bootstraps) != 2 {
		t.Errorf("the record has %+v, %v", r, err)
	}
}

// TestManifests checks that the directory keeps the document's manifests as secrets, and that the
// Sites of control-plane nodes contain them in order.
func TestManifests(t *testing.T) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	for _, encryptTo := range [][]string{nil, {id.Recipient().String()}} {
		dir := filepath.Join(t.TempDir(), "shops")
		doc := func(list string) string {
			return strings.Replace(threeMasters, "nodes:", "manifests: "+list+"\nnodes:", 1)
		}
		cni, app := manifest.File{Name: "net/objects.yaml", Text: "kind: CNI, with a secret"}, manifest.File{Name: "app/objects.yaml", Text: "kind: App"}
		update := func(list string, all ...manifest.File) *Change {
			t.Helper()
			c, err := newOf(dir, doc(list), Options{Now: now(), EncryptTo: encryptTo, Manifests: all})
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
		files := func() string {
			t.Helper()
			entries, err := os.ReadDir(filepath.Join(dir, "manifests"))
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, e := range entries {
				b, err := os.ReadFile(filepath.Join(dir, "manifests", e.Name()))
				if err != nil || strings.Contains(string(b), "secret") != (encryptTo == nil && strings.Contains(string(b), "CNI")) {
					t.Errorf("%s: %q, %v", e.Name(), b, err)
				}
				names = append(names, strings.TrimSuffix(e.Name(), sealed.Extension))
			}
			return strings.Join(names, " ")
		}
		update("[net/objects.yaml, app/objects.yaml]", cni, app)
		if got := files(); got != "01-objects.yaml 02-objects.yaml" {
			t.Errorf("files: %s", got)
		}
		if c := update("[net/objects.yaml, app/objects.yaml]", cni, app); !c.Nothing() {
			t.Errorf("the same manifests again: %+v", c)
		}
		if encryptTo == nil {
			sites, err := ControlPlaneSites(dir, sealed.Identity{}, now())
			if err == nil {
				t.Errorf("invalid objects were accepted: %+v", sites)
			}
			cni.Text, app.Text = "apiVersion: v1\nkind: Namespace\nmetadata: {name: net}\n", "apiVersion: v1\nkind: Namespace\nmetadata: {name: app}\n"
			if c := update("[net/objects.yaml, app/objects.yaml]", cni, app); !c.Updated {
				t.Errorf("other files: %+v", c)
			}
			if sites, err = ControlPlaneSites(dir, sealed.Identity{}, now()); err != nil {
				t.Fatal(err)
			}
			got, err := manifest.Unpack(sites[2].Site.Credentials.Keys.Manifests)
			if err != nil || !slices.Equal(got, []manifest.File{cni, app}) {
				t.Errorf("%+v, %v", got, err)
			}
		}
		if c := update("[app/objects.yaml]", app); !c.Updated || files() != "01-objects.yaml" {
			t.Errorf("%+v, %s", c, files())
		}
		if err := os.RemoveAll(filepath.Join(dir, "manifests")); err != nil {
			t.Fatal(err)
		}
		if _, err := newOf(dir, doc("[app/objects.yaml]"), Options{Now: now(), Manifests: []manifest.File{app}}); err == nil || !strings.Contains(err.Error(), "01-objects.yaml") {
			t.Errorf("no error for the missing manifest: %v", err)
		}
	}
}
