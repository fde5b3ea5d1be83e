package join_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/join"
	"github.com/edgebake/edgebake/firstboot/kubeapi"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestNoAnonymousAccess checks that if API servers reject anonymous requests, the error names the
// cause, and a Site with the CA joins.
func TestNoAnonymousAccess(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.Cluster.NoAnonymous = true
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken))
	if err := w.Boot(); err == nil {
		t.Fatal("the machine joined the cluster")
	}
	s := w.State()
	said := ""
	for _, p := range s.Phases {
		said += p.Error + p.Fix
	}
	if s.Result != ondisk.ResultWaiting || !strings.Contains(said, "no anonymous request for cluster-info") || !strings.Contains(said, "caFile") {
		t.Errorf("%s: %s", s.Result, said)
	}
	pem := "caCert: |\n  " + strings.ReplaceAll(strings.TrimSpace(string(w.Cluster.CAPEM)), "\n", "\n  ")
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken, pem))
	w.PowerOn()
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if got := w.Get(ondisk.KubeCA); strings.TrimSpace(got) != strings.TrimSpace(string(w.Cluster.CAPEM)) {
		t.Errorf("the CA is\n%s", got)
	}
}

// TestAnotherClustersCA checks that API servers of another cluster stop the run before they receive
// the token.
func TestAnotherClustersCA(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := worldtest.NewCluster(t)
	pem := "caCert: |\n  " + strings.ReplaceAll(strings.TrimSpace(string(other.CAPEM)), "\n", "\n  ")
	w.Stamp(worldtest.SlotDevice, strings.ReplaceAll(w.Site(worldtest.WithToken, pem), w.Cluster.Pin, other.Pin))
	if err := w.Boot(); err == nil {
		t.Fatal("the machine joined the cluster")
	}
	if s := w.State(); s.Result != ondisk.ResultFailed || !w.ConsoleHas("not signed by the Site's CA") {
		t.Errorf("%s\n%s", s.Result, strings.Join(w.Console, "\n"))
	}
}

// TestTokenOfAStartingAPIServer checks an API server that rejects every token for a while after its
// start. The machine joins soon after that. A token that stays rejected is reported.
func TestTokenOfAStartingAPIServer(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		ready  int
		starts time.Duration // time until it accepts the token; 0: never
		joined time.Duration // longest time to the join
	}{
		{"not ready", http.StatusInternalServerError, 5 * time.Second, 30 * time.Second},
		{"readyz not granted yet", http.StatusForbidden, 5 * time.Second, time.Minute},
		{"no anonymous requests", http.StatusUnauthorized, 15 * time.Second, time.Minute},
		{"no anonymous requests, expired", http.StatusUnauthorized, 0, time.Minute},
		{"ready, expired", 0, 0, 10 * time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.Cluster.Down["192.0.2.12:6443"], w.Cluster.Down["192.0.2.13:6443"] = true, true
			w.Cluster.TokenRevoked, w.Cluster.ReadyzStatus = true, tc.ready
			w.Patience = 5 * time.Minute
			e := w.Env()
			start, sleep, failed := w.Now, e.Sleep, time.Duration(0)
			e.Sleep = func(ctx context.Context, d time.Duration) error {
				if failed == 0 && w.ConsoleHas("FAILED discovery") {
					failed = w.Now.Sub(start)
				}
				err := sleep(ctx, d)
				if tc.starts != 0 && w.Now.Sub(start) >= tc.starts {
					w.Cluster.Mu.Lock()
					w.Cluster.TokenRevoked, w.Cluster.ReadyzStatus = false, 0
					w.Cluster.Mu.Unlock()
				}
				return err
			}
			err := w.Run(firstboot.New(e))
			took := w.Now.Sub(start)
			if tc.starts == 0 {
				if err == nil || failed == 0 || failed > tc.joined {
					t.Errorf("%v, reported after %s\n%s", err, failed, strings.Join(w.Console, "\n"))
				}
				return
			}
			if err != nil || took > tc.joined || w.ConsoleHas("FAILED") {
				t.Errorf("%v after %s\n%s", err, took, strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestClusterInfoWithAFormerSignature checks a changed cluster-info that the cluster has not signed
// again yet. Only a signature that stays wrong is reported.
func TestClusterInfoWithAFormerSignature(t *testing.T) {
	t.Parallel()
	for name, signedAfter := range map[string]time.Duration{"signed soon": 5 * time.Second, "another secret": time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.Cluster.SignatureStale = true
			e := w.Env()
			start, sleep := w.Now, e.Sleep
			e.Sleep = func(ctx context.Context, d time.Duration) error {
				err := sleep(ctx, d)
				w.Cluster.Mu.Lock()
				w.Cluster.SignatureStale = w.Now.Sub(start) < signedAfter
				w.Cluster.Mu.Unlock()
				return err
			}
			w.Patience = 5 * time.Minute
			err := w.Run(firstboot.New(e))
			if signed := signedAfter < time.Minute; (err == nil) != signed || w.ConsoleHas("FAILED") == signed {
				t.Errorf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
		})
	}
}

// TestOneAPIServerDoesNotStopDiscovery checks that an error of a single API server is retried while
// the others are out of reach.
func TestOneAPIServerDoesNotStopDiscovery(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	away := errors.New("connection refused")
	for _, tc := range []struct {
		err  error
		stop bool
	}{
		{errors.Join(kubeapi.ErrToken, away), true}, // the API server that answered is ready, and all have the same tokens
		{errors.Join(kubeapi.ErrToken, fmt.Errorf("%w (%w)", kubeapi.ErrToken, kubeapi.ErrStarting)), true},
		{errors.Join(fmt.Errorf("%w (%w)", kubeapi.ErrToken, kubeapi.ErrStarting), away), false},
		{errors.Join(fmt.Errorf("%w (%w)", kubeapi.ErrToken, kubeapi.ErrReadyHidden), away), false},
		{errors.Join(kubeapi.ErrToken, &kubeapi.StatusError{Code: 503}), false},
		{errors.Join(kubeapi.ErrSignature, away), false},
		{errors.Join(kubeapi.ErrSignature, kubeapi.ErrSignature), true},
		{errors.Join(kubeapi.ErrServerName, away), false},
		{errors.Join(kubeapi.ErrServerName), true},
	} {
		err := join.JudgeDiscovery(t.Context(), w.Env(), []string{"192.0.2.11:6443"}, tc.err, false)
		if _, stop := run.Fix(err); stop != tc.stop || run.Advice(err) == "" {
			t.Errorf("%q stops %v, want %v; advice %q", tc.err, stop, tc.stop, run.Advice(err))
		}
	}
}
