package controlplane_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/controlplane"
	"github.com/edgebake/edgebake/firstboot/site"
)

// TestPublishedMeanwhile checks that Run overwrites nothing that is published if, after the Check,
// another node publishes the cluster, the API server fails, or a person deletes cluster-info.
func TestPublishedMeanwhile(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	for name, c := range map[string]struct {
		happens func()
		keys    bool
		fails   bool
	}{
		"published":               {happens: func() {}, keys: true},
		"published, without keys": {happens: func() {}},
		"no answer":               {happens: func() { m.Cluster.AllDown(true) }, keys: true, fails: true},
		"deleted, without keys":   {happens: func() { m.Cluster.NoClusterInfo = true }, fails: true},
	} {
		m.inits = nil
		spec := *m.site
		if !c.keys {
			spec.Credentials = configs.Credentials{}
		}
		c.happens()
		err := controlplane.PublishPhase(&site.Active{Site: &spec, Node: spec.NodeName}).Run(t.Context(), m.Env())
		if (err != nil) != c.fails {
			t.Errorf("%s: %v", name, err)
		}
		if len(m.inits) > 0 {
			t.Errorf("%s: kubeadm ran %q", name, m.inits)
		}
		m.Cluster.AllDown(false)
		m.Cluster.NoClusterInfo = false
	}
}

// TestPublishWithoutKeys checks machines whose slot has no keys. If cluster-info was deleted, it is
// not published again. A machine whose first publication was interrupted asks for the keys.
func TestPublishWithoutKeys(t *testing.T) {
	t.Parallel()
	sites := mintedSites(t, 1)
	m := newControlPlane(t, sites)
	m.bootDone()
	m.Cluster.NoClusterInfo, m.inits = true, nil
	m.on()
	m.bootDone()
	if want := []string{"etcd local"}; !slices.Equal(m.inits, want) || !m.ConsoleHas("no longer publishes cluster-info") {
		t.Errorf("kubeadm ran %q\n%s", m.inits, strings.Join(m.Console, "\n"))
	}

	m = newControlPlane(t, sites)
	m.BeforeEffect = func(effect string) {
		if effect == "kubeadm publishes cluster-info" && !m.PoweredOff {
			m.PowerCutAt = 1
		}
	}
	if err := m.Boot(); err == nil {
		t.Fatal("the machine continued after the power cut")
	}
	m.BeforeEffect = nil
	bare := *m.site
	bare.Credentials = configs.Credentials{}
	m.stampSite(&bare)
	m.on()
	m.inits = nil
	if err := m.Boot(); err == nil || !m.ConsoleHas("cluster-info and the join tokens were never published") || slices.Contains(m.inits, "addon kube-proxy") {
		t.Errorf("%v: kubeadm ran %q\n%s", err, m.inits, strings.Join(m.Console, "\n"))
	}
	m.stampSite(m.site)
	m.on()
	m.bootDone()
}

// TestPublishedDNS checks that kubeadm does not change a complete CoreDNS, and completes a partial
// one.
func TestPublishedDNS(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		there []string
		want  bool
		gone  []string
	}{
		{nil, true, nil},
		{[]string{controlplane.DNSDeployment}, true, []string{controlplane.DNSDeployment}},
		{[]string{controlplane.DNSDeployment, controlplane.DNSService}, false, nil},
	} {
		m := newControlPlane(t, mintedSites(t, 1))
		m.Cluster.DNSObjects = tt.there
		m.bootDone()
		if slices.Contains(m.inits, "addon coredns") != tt.want || !slices.Equal(m.Cluster.DeletedPaths, tt.gone) {
			t.Errorf("with %q: kubeadm ran %q; deleted %q", tt.there, m.inits, m.Cluster.DeletedPaths)
		}
	}
}

// TestPublishedOnce checks that nothing is published again if cluster-info was deleted on purpose
// and the keys are stamped again.
func TestPublishedOnce(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.Cluster.NoClusterInfo, m.inits, m.Cluster.CreatedRBAC = true, nil, nil
	m.stampSite(m.site) // with keys
	m.on()
	m.bootDone()
	if slices.Contains(m.inits, "addon kube-proxy") || slices.Contains(m.inits, "bootstrap-token") || !m.Cluster.NoClusterInfo || len(m.Cluster.CreatedRBAC) > 0 {
		t.Errorf("kubeadm ran %q; published again: %v, rules %d", m.inits, !m.Cluster.NoClusterInfo, len(m.Cluster.CreatedRBAC))
	}
	if !m.ConsoleHas("the cluster no longer publishes cluster-info") {
		t.Errorf("the console does not report that cluster-info is missing\n%s", strings.Join(m.Console, "\n"))
	}
}
