package firstboot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestReportIsSentAgain checks that the report is sent again if its server does not answer at first
// when the node is ready.
func TestReportIsSentAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ca, err := json.Marshal(string(w.Cluster.CAPEM))
	if err != nil {
		t.Fatal(err)
	}
	w.Stamp(worldtest.SlotDevice, w.Site(worldtest.WithToken, fmt.Sprintf("report: {url: 'https://report.example/', caCert: %s}", ca)))
	e := w.Env()
	post, away := e.Post, 3
	e.Post = func(ctx context.Context, url, ca string, body []byte, proxy []string) error {
		if url != "https://report.example/" || ca != string(w.Cluster.CAPEM) {
			t.Errorf("sent to %s, verified with the CA %q", url, ca)
		}
		if away--; away >= 0 {
			return errors.New("connection refused")
		}
		return post(ctx, url, ca, body, proxy)
	}
	before := w.Now
	if err := w.Run(New(e)); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if len(w.Reports) != 1 || !strings.Contains(string(w.Reports[0]), `"result": "done"`) {
		t.Errorf("sent: %s", w.Reports)
	}
	if took := w.Now.Sub(before); took > time.Minute {
		t.Errorf("first boot took too long: %s", took)
	}
	w.NoSecret()

	// First boot gives up if the server stays unreachable.
	w.PowerOn()
	e = w.Env()
	tries := 0
	e.Post = func(context.Context, string, string, []byte, []string) error {
		tries++
		return errors.New("connection refused")
	}
	if err := w.Run(New(e)); err != nil || tries != run.ReportTries {
		t.Errorf("%d tries, %v", tries, err)
	}
}

// TestReportTellsOfTheBoot checks that the report has the start of each part of the boot, including
// first boot's, and the end of systemd's startup, which is known only later.
func TestReportTellsOfTheBoot(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	s, err := run.LoadState(w.Root)
	if err != nil {
		t.Fatal(err)
	}
	if want := (ondisk.BootClock{Userspace: 6_100_000, Finish: 24_000_000, FirstBoot: 1_000_000}); s.Boot == nil || *s.Boot != want {
		t.Errorf("%+v", s.Boot)
	}
	// Without these times, the machine still becomes a node.
	w.PowerOn()
	e := w.Env()
	e.BootClock = func(context.Context) (ondisk.BootClock, error) { return ondisk.BootClock{}, errors.New("no bus") }
	if err := w.Run(New(e)); err != nil {
		t.Fatal(err)
	}
	if s, err = run.LoadState(w.Root); err != nil || s.Boot != nil {
		t.Errorf("%+v, %v", s.Boot, err)
	}
}

// TestReportGoesThroughTheProxy checks that the report is sent through the Site's proxy.
func TestReportGoesThroughTheProxy(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t, "report: {url: 'https://report.example/'}", "network: {proxy: {https: 'http://proxy.example:3128', noProxy: [.shop.example]}}")
	if err := w.Boot(); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
	}
	if len(w.Reports) == 0 || !slices.Contains(w.ReportProxies, "HTTPS_PROXY=http://proxy.example:3128") ||
		!slices.ContainsFunc(w.ReportProxies, func(v string) bool { return strings.HasPrefix(v, "NO_PROXY=") && strings.Contains(v, ".shop.example") }) {
		t.Errorf("%d reports through %s", len(w.Reports), w.ReportProxies)
	}
}
