package firstboot

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestReportIsSentAgain: the server is away when the node is done.
func TestReportIsSentAgain(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "report: {url: 'https://report.example/'}")
	e := w.env()
	post, away := e.Post, 3
	e.Post = func(ctx context.Context, url string, body []byte, proxy []string) error {
		if url != "https://report.example/" {
			t.Errorf("sent to %s", url)
		}
		if away--; away >= 0 {
			return errors.New("connection refused")
		}
		return post(ctx, url, body, proxy)
	}
	before := w.now
	if err := w.run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if len(w.posted) != 1 || !strings.Contains(string(w.posted[0]), `"result": "done"`) {
		t.Errorf("sent: %s", w.posted)
	}
	if took := w.now.Sub(before); took > time.Minute {
		t.Errorf("it took %s", took)
	}
	noSecret(t, w)

	// One that stays away is given up.
	w.powerOn()
	e = w.env()
	tries := 0
	e.Post = func(context.Context, string, []byte, []string) error {
		tries++
		return errors.New("connection refused")
	}
	if err := w.run(New(e)); err != nil || tries != reportTries {
		t.Errorf("%d tries, %v", tries, err)
	}
}

// TestReportGoesThroughTheProxy: the site has no other way out.
func TestReportGoesThroughTheProxy(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "report: {url: 'https://report.example/'}", "network: {proxy: {https: 'http://proxy.example:3128', noProxy: [.shop.example]}}")
	if err := w.boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.console, "\n"))
	}
	if len(w.posted) == 0 || !slices.Contains(w.proxies, "HTTPS_PROXY=http://proxy.example:3128") ||
		!slices.ContainsFunc(w.proxies, func(v string) bool { return strings.HasPrefix(v, "NO_PROXY=") && strings.Contains(v, ".shop.example") }) {
		t.Errorf("%d reports through %s", len(w.posted), w.proxies)
	}
}
