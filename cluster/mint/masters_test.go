package mint

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
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

// A master's Site is valid, has the cluster's keys, kubeadm's documents of this
// machine, and a birth that ends; what it leaves behind has no key.
func TestMasterSites(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	if _, err := New(dir, []byte(threeMasters), Options{File: "cluster.yaml", Now: now()}); err != nil {
		t.Fatal(err)
	}
	sites, err := MasterSites(dir, sealed.Identity{}, now())
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
	docs, err := site.KubeadmDocuments(configs.KubeadmLocal{})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"controlPlaneEndpoint: \"apiserver.cluster.local:6443\"", "api.example.com", "10.103.97.2", "192.0.2.13",
		"advertiseAddress: \"192.0.2.12\"", "name: \"m2\"", "mode: \"ipvs\"", "10.103.97.2/32", "taints: []", "ECDSA-P256"} {
		if !strings.Contains(string(docs), want) {
			t.Errorf("the documents lack %s:\n%s", want, docs)
		}
	}
	if site.ControlPlane.Birth() != sites[1].Expires || !strings.Contains(site.Credentials.Keys.Objects.Reveal(), "bootstrap-token-") {
		t.Errorf("%+v", site.ControlPlane)
	}
	public, err := configs.EncodePublic(site)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range site.Credentials.Keys.Secrets() {
		if strings.Contains(string(public), strings.Split(s.Reveal(), "\n")[1]) {
			t.Error("a Site without its secrets has a key")
		}
	}

	// Once the time is over, a Site no longer gives birth, until somebody says so.
	late := now().Add(200 * time.Hour)
	if sites, err = MasterSites(dir, sealed.Identity{}, late); err != nil || sites[0].Site.ControlPlane.BirthUntil != "" {
		t.Fatalf("%v, %+v", err, sites)
	}
	if sites[0].Site.Credentials.Keys.Objects.Reveal() != "" {
		t.Error("expired tokens are published")
	}
	if _, err := AllowBirth(dir, late, late.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if sites, err = MasterSites(dir, sealed.Identity{}, late); err != nil || !sites[0].Site.ControlPlane.Birth().Equal(late.Add(time.Hour).Truncate(time.Second)) {
		t.Fatalf("%v, %+v", err, sites)
	}
	if r, err := Load(dir); err != nil || len(r.Births) != 2 {
		t.Errorf("the record has %+v, %v", r, err)
	}
}
