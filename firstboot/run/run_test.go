package run

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// TestLogRedacts checks that no log call prints a secret, even one that becomes known only after
// With.
func TestLogRedacts(t *testing.T) {
	t.Parallel()
	r := &Runner{}
	var out bytes.Buffer
	l := slog.New(redacting{Handler: slog.NewJSONHandler(&out, nil), redact: r.redact})
	early := l.With("early", testToken)
	secrets := []string{testToken, testSecret}
	r.secrets.Store(&secrets)
	for name, log := range map[string]func(){
		"message":       func() { l.Info("the token " + testToken) },
		"attribute":     func() { l.Info("joining", "token", testToken) },
		"key":           func() { l.Info("joining", testToken, 1) },
		"struct":        func() { l.Info("joining", "token", struct{ S string }{testToken}) },
		"group":         func() { l.Info("joining", slog.Group("site", "token", testToken)) },
		"with":          func() { l.With("token", testToken).Info("joining") },
		"with, earlier": func() { early.Info("joining") },
		"with a group":  func() { l.With(slog.Group("site", "token", testToken)).Info("joining") },
		"below a group": func() { l.WithGroup("site").With("token", testToken).Info("joining", "secret", testSecret) },
		"group's name":  func() { l.WithGroup(testToken).Info("joining", "attempt", 1) },
	} {
		out.Reset()
		log()
		if got := out.String(); strings.Contains(got, testSecret) || !strings.Contains(got, configs.Mask) {
			t.Errorf("%s: %s", name, got)
		}
	}
	// A logger's attributes do not appear in another logger's output, and a
	// group applies to later attributes.
	out.Reset()
	site := l.With("node", "edge-1").WithGroup("site")
	site.With("zone", "north")
	site.Info("joining", "attempt", 1)
	if got := out.String(); !strings.Contains(got, `"node":"edge-1","site":{"attempt":"1"}}`) {
		t.Error(got)
	}
}

// TestStopSpread checks a fleet in which one fault has stopped all machines. They resume evenly
// over a quarter of the pause, and watch for another Site meanwhile.
func TestStopSpread(t *testing.T) {
	t.Parallel()
	const fleet = 1000
	chance := rand.New(rand.NewPCG(1, 2))
	var tenths [10]int
	for range fleet {
		e, now, looks := quietEnv(t), time.Time{}, 0
		e.Now = func() time.Time { return now }
		e.Sleep = func(_ context.Context, d time.Duration) error { now = now.Add(d); return nil }
		e.Rand = chance.Float64
		r := &Runner{Env: e, Sources: func(*machine.Env) string { looks++; return "" }}
		if err := r.stop(t.Context(), e, Phase{Name: "join"}, map[string]int{}, NeedsPerson(errors.New("no such token"), "mint one")); !errors.Is(err, ErrRestart) {
			t.Fatal(err)
		}
		late := now.Sub(time.Time{}) - repeat
		if late < 0 || late >= repeat/4 {
			t.Fatalf("the phases were repeated after %s", repeat+late)
		}
		if looks < int(repeat/Standstill) {
			t.Fatalf("first boot looked for another Site only %d times", looks)
		}
		tenths[late*10/(repeat/4)]++
	}
	for i, n := range tenths {
		if n < fleet/20 || n > fleet*3/20 {
			t.Errorf("%d of %d machines retry in tenth %d of the spread: %v", n, fleet, i+1, tenths)
		}
	}
}

// TestBackoff measures the time between attempts, simulated by synctest.
func TestBackoff(t *testing.T) {
	t.Parallel()
	e := quietEnv(t)
	synctest.Test(t, func(t *testing.T) {
		var tried []time.Duration
		start := time.Now()
		e.Now = time.Now
		e.Sleep = func(ctx context.Context, d time.Duration) error {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(d):
				return nil
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
		defer cancel()
		r := &Runner{Env: e, Sources: func(*machine.Env) string { return "" }}
		r.First = func() []Phase {
			return []Phase{{
				Name: "never", Doc: "never done", Timeout: 10 * time.Second,
				Check: func(context.Context, *machine.Env) (Verdict, error) { return Todo, nil },
				Run: func(ctx context.Context, e *machine.Env) error {
					tried = append(tried, time.Since(start))
					<-ctx.Done() // hangs until its deadline
					return ctx.Err()
				},
			}}
		}
		if err := r.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		if n := len(tried); n < 20 || n > 60 {
			t.Errorf("%d attempts in 20 minutes", n)
		}
		for i := 1; i < len(tried); i++ {
			pause := tried[i] - tried[i-1] - 10*time.Second
			want := Backoff(i, 0)
			if pause != want {
				t.Errorf("pause %d is %v, not %v", i, pause, want)
			}
		}
		if !r.Alive(time.Now().Add(-time.Minute)) {
			t.Error("the watchdog would have restarted the machine")
		}
	})
	for n := 1; n < 40; n++ {
		low, high := Backoff(n, 0), Backoff(n, 0.999)
		if low <= 0 || high > backoffMax || high < low || high > 2*low {
			t.Errorf("attempt %d: %v to %v", n, low, high)
		}
	}
}

// TestPhasesOfAnotherSite checks that errors of a former Site's phases are not shown in the phases
// of the next Site.
func TestPhasesOfAnotherSite(t *testing.T) {
	phase := func(names ...string) (list []Phase) {
		for _, name := range names {
			list = append(list, Phase{Name: name})
		}
		return list
	}
	r := &Runner{}
	r.show(phase("identity"), false)
	r.state.NodeType = configs.NodeEdge
	r.show(phase("identity", "network", "yurthub", "join"), true)
	r.state.Phases[2].Status = ondisk.PhaseFailed
	r.show(phase("identity"), false)
	if n := len(r.state.Phases); n != 4 {
		t.Errorf("%d phases in the next pass of the same Site", n)
	}
	r.show(phase("identity", "network", "join"), true)
	var names []string
	for _, p := range r.state.Phases {
		names = append(names, p.Name)
	}
	if got := strings.Join(names, " "); got != "identity network join" {
		t.Error(got)
	}
}

// TestUntrustedText checks that text from other sources that first boot prints cannot control
// the console's terminal or systemd.
func TestUntrustedText(t *testing.T) {
	t.Parallel()
	var out []string
	e := &machine.Env{
		Log:   slog.New(slog.DiscardHandler),
		Clock: machine.Clock{Now: time.Now},
		Files: machine.Files{WriteFile: func(string, []byte, machine.Owner) error { return nil }},
		Output: machine.Output{
			Console: func(line string) { out = append(out, line) },
			Notify:  func(state string) { out = append(out, state) },
		},
	}
	r := &Runner{Env: e}
	r.state.Phases = []ondisk.PhaseState{{Name: "yurthub", Status: ondisk.PhaseRunning}}
	r.say(e, "it says: \x1b[2J\nMAINPID=1")
	r.waiting("it says: \x1b[2J\nMAINPID=1")
	for _, line := range out {
		if strings.ContainsAny(line, "\x1b\n") || !strings.Contains(line, "MAINPID=1") {
			t.Errorf("%q", line)
		}
	}
	if len(out) != 4 {
		t.Errorf("said: %q", out)
	}
}

func TestWordsAndGist(t *testing.T) {
	t.Parallel()
	r := &Runner{}
	for in, want := range map[string][2]string{
		"read tcp 192.0.2.50:40112->10.103.97.2:6443: read: connection reset by peer":                    {"read tcp 10.103.97.2:6443: read: connection reset by peer", "read tcp 10.103.97.2:6443: read: connection reset by peer"},
		"read tcp [fd00::50]:40112->[fd00:ed6e::2]:6443: read: connection reset by peer":                 {"read tcp [fd00:ed6e::2]:6443: read: connection reset by peer", "read tcp [fd00:ed6e::2]:6443: read: connection reset by peer"},
		"write udp [fe80::1%eth0]:5->[fe80::2%eth0]:53: i/o timeout":                                     {"write udp [fe80::2%eth0]:53: i/o timeout", "write udp [fe80::2%eth0]:53: i/o timeout"},
		"lookup m1: read udp 127.0.0.1:51234->127.0.0.53:53: i/o timeout":                                {"lookup m1: read udp 127.0.0.53:53: i/o timeout", "lookup m1: read udp 127.0.0.53:53: i/o timeout"},
		"dial tcp 192.0.2.11:6443: connect: connection refused":                                          {"dial tcp 192.0.2.11:6443: connect: connection refused", "dial tcp 192.0.2.11:6443: connect: connection refused"},
		"current time 2026-11-20T10:00:01Z is after 2026-11-01T00:00:00Z":                                {"current time 2026-11-20T10:00:01Z is after 2026-11-01T00:00:00Z", "current time … is after …"},
		"PLEG is not healthy: pleg was last seen active 3m5.123456s ago; threshold is 3m0s":              {"PLEG is not healthy: pleg was last seen active 3m5.123456s ago; threshold is 3m0s", "PLEG is not healthy: pleg was last seen active … ago; threshold is …"},
		"E1120 10:00:01.123456    4711 checks.go:1] not healthy after 4m0.000617123s":                    {"E1120 10:00:01.123456    4711 checks.go:1] not healthy after 4m0.000617123s", "…checks.go:1] not healthy after …"},
		"image 3 of 7, registry.k8s.io/pause:3.10, 2 objects of fd00::10, sn0042s, v1.36.3, 10.0.0.1/24": {"", ""},
	} {
		if want[0] == "" {
			want = [2]string{in, in}
		}
		if got := r.cleaned(in); got != want[0] {
			t.Errorf("the message is %q, want %q", got, want[0])
		}
		if got := withoutVarying(r.cleaned(in)); got != want[1] {
			t.Errorf("without its varying parts it is %q, want %q", got, want[1])
		}
	}
}

const (
	testToken  = "abcdef.0123456789abcdef"
	testSecret = "0123456789abcdef"
)

// quietEnv returns an Env with an empty root, and without effects on the machine.
func quietEnv(t *testing.T) *machine.Env {
	return &machine.Env{
		Root:       t.TempDir(),
		Log:        slog.New(slog.DiscardHandler),
		Clock:      machine.Clock{Now: time.Now},
		Randomness: machine.Randomness{Rand: func() float64 { return 0 }},
		Files:      machine.Files{WriteFile: func(string, []byte, machine.Owner) error { return nil }},
		Programs:   machine.Programs{BootClock: func(context.Context) (ondisk.BootClock, error) { return ondisk.BootClock{}, errors.ErrUnsupported }},
		Output:     machine.Output{Console: func(string) {}, Notify: func(string) {}},
	}
}
