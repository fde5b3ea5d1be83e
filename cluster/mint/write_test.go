package mint

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestWordsAreLater checks that each --continue-from request has a later time than the previous one,
// even if the clock was ahead at that time.
func TestWordsAreLater(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	if _, err := newOf(dir, threeMasters, Options{Now: now()}); err != nil {
		t.Fatal(err)
	}
	if err := saveRequestTime(dir, time.Date(2099, 1, 2, 3, 4, 5, 0, time.UTC)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`said: "2099-01-02T03:04:06Z"`, `said: "2099-01-02T03:04:07Z"`} {
		w, err := WriteSites(dir, SitesOptions{Now: now(), Force: true, Requests: Requests{ContinueFrom: "m1"}})
		if err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(filepath.Join(w.Dir, "m1.yaml")); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("want %s, %v:\n%s", want, err, text)
		}
	}
}

// TestBootstrapRenewsTokens checks a cluster that was not switched on before its workers' tokens
// expired: with --bootstrap it can still be bootstrapped, and the workers can join it.
func TestBootstrapRenewsTokens(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "shops")
	if _, err := newOf(dir, threeMasters, Options{Now: now()}); err != nil {
		t.Fatal(err)
	}
	late := now().AddDate(1, 0, 0)
	if _, err := WriteSites(dir, SitesOptions{Now: late}); err == nil || !strings.Contains(err.Error(), "--bootstrap TIME") {
		t.Errorf("with tokens that have expired: %v", err)
	}
	for i, want := range []int{1, 0} {
		w, err := WriteSites(dir, SitesOptions{Now: late.Add(time.Duration(i) * time.Hour), Bootstrap: 48 * time.Hour, Force: true})
		if err != nil || len(w.Renewed) != want {
			t.Errorf("run %d: renewed %q, %v", i, w.Renewed, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "sites", "a.yaml")); err != nil {
		t.Error(err)
	}
}
