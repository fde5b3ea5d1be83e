package firstboot

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster/api"
	"github.com/edgebake/edgebake/firstboot/join"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
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

// TestTokenOfAStartingAPIServer: one API server is up again after a power cut, and
// rejects every token for a while. Whatever it shows of its state, the machine joins
// soon after; a token that stays rejected is reported once that is certain.
func TestTokenOfAStartingAPIServer(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		ready  int
		starts time.Duration // after which it accepts the token; 0: never
		joined time.Duration // at most
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
			w.cluster.down["192.0.2.12:6443"], w.cluster.down["192.0.2.13:6443"] = true, true
			w.cluster.revoked, w.cluster.ready = true, tc.ready
			w.patience = 5 * time.Minute
			e := w.env()
			start, sleep, failed := w.now, e.Sleep, time.Duration(0)
			e.Sleep = func(ctx context.Context, d time.Duration) error {
				if failed == 0 && w.said("FAILED discovery") {
					failed = w.now.Sub(start)
				}
				err := sleep(ctx, d)
				if tc.starts != 0 && w.now.Sub(start) >= tc.starts {
					w.cluster.mu.Lock()
					w.cluster.revoked, w.cluster.ready = false, 0
					w.cluster.mu.Unlock()
				}
				return err
			}
			err := w.run(New(e))
			took := w.now.Sub(start)
			if tc.starts == 0 {
				if err == nil || failed == 0 || failed > tc.joined {
					t.Errorf("%v, reported after %s\n%s", err, failed, strings.Join(w.console, "\n"))
				}
				return
			}
			if err != nil || took > tc.joined || w.said("FAILED") {
				t.Errorf("%v after %s\n%s", err, took, strings.Join(w.console, "\n"))
			}
		})
	}
}

// TestClusterInfoWithAFormerSignature: somebody has changed cluster-info, and the cluster
// has yet to sign it. A signature that stays wrong is reported.
func TestClusterInfoWithAFormerSignature(t *testing.T) {
	t.Parallel()
	for name, signedAfter := range map[string]time.Duration{"signed soon": 5 * time.Second, "another secret": time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := nativeWorld(t)
			w.cluster.changed = true
			e := w.env()
			start, sleep := w.now, e.Sleep
			e.Sleep = func(ctx context.Context, d time.Duration) error {
				err := sleep(ctx, d)
				w.cluster.mu.Lock()
				w.cluster.changed = w.now.Sub(start) < signedAfter
				w.cluster.mu.Unlock()
				return err
			}
			w.patience = 5 * time.Minute
			err := w.run(New(e))
			if signed := signedAfter < time.Minute; (err == nil) != signed || w.said("FAILED") == signed {
				t.Errorf("%v\n%s", err, strings.Join(w.console, "\n"))
			}
		})
	}
}

// TestOneAPIServerDoesNotStopDiscovery: what one API server says alone, while the
// others are out of reach, is retried.
func TestOneAPIServerDoesNotStopDiscovery(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	away := errors.New("connection refused")
	for _, tc := range []struct {
		err  error
		stop bool
	}{
		{errors.Join(api.ErrToken, away), true}, // it is ready: the others have the same tokens
		{errors.Join(api.ErrToken, fmt.Errorf("%w (%w)", api.ErrToken, api.ErrStarting)), true},
		{errors.Join(fmt.Errorf("%w (%w)", api.ErrToken, api.ErrStarting), away), false},
		{errors.Join(fmt.Errorf("%w (%w)", api.ErrToken, api.ErrReadyHidden), away), false},
		{errors.Join(api.ErrToken, &api.StatusError{Code: 503}), false},
		{errors.Join(api.ErrSignature, away), false},
		{errors.Join(api.ErrSignature, api.ErrSignature), true},
		{errors.Join(api.ErrServerName, away), false},
		{errors.Join(api.ErrServerName), true},
	} {
		err := join.JudgeDiscovery(t.Context(), w.env(), []string{"192.0.2.11:6443"}, tc.err, false)
		if _, stop := run.Fix(err); stop != tc.stop || run.Advice(err) == "" {
			t.Errorf("%q stops %v, want %v; advice %q", tc.err, stop, tc.stop, run.Advice(err))
		}
	}
}
