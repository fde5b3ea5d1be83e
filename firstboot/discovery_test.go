package firstboot

import (
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs/ondisk"
)

// TestNoAnonymousAccess: where the API servers answer nobody whom they do not
// know, the cause is named, and a site that carries the CA joins.
func TestNoAnonymousAccess(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "testdata/machine.txtar")
	w.cluster.knownOnly = true
	w.stamp(ownDev, w.site(withToken))
	if err := w.boot(); err == nil {
		t.Fatal("it joined")
	}
	s := w.state()
	said := ""
	for _, p := range s.Phases {
		said += p.Error + p.Fix
	}
	if s.Result != ondisk.ResultWaiting || !strings.Contains(said, "no anonymous request for cluster-info") || !strings.Contains(said, "caFile") {
		t.Errorf("%s: %s", s.Result, said)
	}
	pem := "caCert: |\n  " + strings.ReplaceAll(strings.TrimSpace(string(w.cluster.pem)), "\n", "\n  ")
	w.stamp(ownDev, w.site(withToken, pem))
	w.powerOn()
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if got := w.get(ondisk.KubeCA); strings.TrimSpace(got) != strings.TrimSpace(string(w.cluster.pem)) {
		t.Errorf("the CA is\n%s", got)
	}
}

// TestAnotherClustersCA: masters of another cluster stop the run before they
// see the token.
func TestAnotherClustersCA(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "testdata/machine.txtar")
	other := newFakeCluster(t)
	pem := "caCert: |\n  " + strings.ReplaceAll(strings.TrimSpace(string(other.pem)), "\n", "\n  ")
	w.stamp(ownDev, strings.ReplaceAll(w.site(withToken, pem), w.cluster.pin, other.pin))
	if err := w.boot(); err == nil {
		t.Fatal("it joined")
	}
	if s := w.state(); s.Result != ondisk.ResultFailed || !w.said("not signed by the Site's CA") {
		t.Errorf("%s\n%s", s.Result, strings.Join(w.console, "\n"))
	}
}
