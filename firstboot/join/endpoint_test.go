package join_test

import (
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/join"
	"github.com/edgebake/edgebake/firstboot/site"
)

// TestUnclearWhetherRecreated checks that both errors are reported if the endpoint does not answer, and
// the API servers do not say which cluster they belong to (401).
func TestUnclearWhetherRecreated(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	w.Cluster.NoAnonymous, w.Cluster.ServiceReadDenied = true, true
	w.RecreateCluster()
	site, err := site.Parse([]byte(w.Site()))
	if err != nil {
		t.Fatal(err)
	}
	_, err = join.WaitForEndpoint(t.Context(), w.Env(), site)
	for _, want := range []string{"does not answer on this machine", "their cluster could not be verified: ", ": /api/v1/namespaces/kube-public/configmaps/cluster-info answered 401"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
}
