package firstboot

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// TestSpread: a thousand nodes that boot together do not ask together, and none
// of them waits for long.
func TestSpread(t *testing.T) {
	t.Parallel()
	var early, late int
	for i := range 1000 {
		id := fmt.Sprintf("shop-%d", i)
		d := bootDelay(id, ondisk.BootSpread)
		if d < 0 || d >= ondisk.BootSpread || d != bootDelay(id, ondisk.BootSpread) {
			t.Fatalf("%s waits %s", id, d)
		}
		if d < ondisk.BootSpread/10 {
			early++
		}
		if d >= ondisk.BootSpread*9/10 {
			late++
		}
	}
	if early > 150 || late > 150 || early < 50 || late < 50 {
		t.Errorf("%d of 1000 in the first tenth, %d in the last", early, late)
	}
	// Once a boot, before the first connection, also when the run begins again.
	w := nativeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.powerOn()
	w.offline, w.patience = true, 5*time.Minute
	e := w.env()
	var first time.Time
	var once sync.Once // several connections are tried at once
	began, dial := w.now, e.Dial
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		once.Do(func() { first = w.now })
		return dial(ctx, network, addr)
	}
	waits, sleep := 0, e.Sleep
	want := bootDelay("edge-sn0042"+machine.ID(e), ondisk.BootSpread)
	// What the machine does before counts: here, reading its slot takes a while.
	took, read := time.Duration(0), e.ReadSlot
	e.ReadSlot = func(device string) (*slot.Contents, error) {
		if took == 0 {
			took = want / 4
			w.now = w.now.Add(took)
		}
		return read(device)
	}
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		if d == want-took {
			waits++
		}
		return sleep(ctx, d)
	}
	if err := w.run(New(e)); err == nil {
		t.Fatal("it was done, offline")
	}
	if first.Sub(began) != want || waits != 1 || took == 0 {
		t.Errorf("the first connection came after %s, expected %s; it waited %d times", first.Sub(began), want, waits)
	}
}

// TestStopSpread: a fleet that one fault of its cluster has stopped comes back evenly
// over a quarter of the pause, and each of it looks for another Site meanwhile.
func TestStopSpread(t *testing.T) {
	t.Parallel()
	const fleet = 1000
	chance := rand.New(rand.NewPCG(1, 2))
	w := newWorld(t, "testdata/machine.txtar")
	var tenths [10]int
	for range fleet {
		e, now, looks := w.env(), time.Time{}, 0
		e.Now = func() time.Time { return now }
		e.Sleep = func(_ context.Context, d time.Duration) error { now = now.Add(d); return nil }
		e.Rand = chance.Float64
		r := &Runner{Env: e, Sources: func(*machine.Env) string { looks++; return "" }}
		if err := r.stop(t.Context(), e, Phase{Name: "join"}, map[string]int{}, Permanent(errors.New("no such token"), "mint one")); !errors.Is(err, errRestart) {
			t.Fatal(err)
		}
		late := now.Sub(time.Time{}) - repeat
		if late < 0 || late >= repeat/4 {
			t.Fatalf("it looked again after %s", repeat+late)
		}
		if looks < int(repeat/standstill) {
			t.Fatalf("only %d looks for another Site", looks)
		}
		tenths[late*10/(repeat/4)]++
	}
	for i, n := range tenths {
		if n < fleet/20 || n > fleet*3/20 {
			t.Errorf("%d of %d come back in tenth %d of the spread: %v", n, fleet, i+1, tenths)
		}
	}
}

// TestBackoff passes real time, made up by synctest.
func TestBackoff(t *testing.T) {
	t.Parallel()
	e := newWorld(t, "testdata/machine.txtar").env() // its API servers live outside the bubble
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
			t.Error("the watchdog would have bitten")
		}
	})
	for n := 1; n < 40; n++ {
		low, high := Backoff(n, 0), Backoff(n, 0.999)
		if low <= 0 || high > backoffMax || high < low || high > 2*low {
			t.Errorf("attempt %d: %v to %v", n, low, high)
		}
	}
}

// TestChecksOnlyLook: a Check changes nothing on the machine, at its first boot
// as at a later one. What it runs only reads.
func TestChecksOnlyLook(t *testing.T) {
	t.Parallel()
	for name, world := range map[string]func(*testing.T) *world{
		"native": func(t *testing.T) *world { return nativeWorld(t) }, "edge": func(t *testing.T) *world { return edgeWorld(t) }, "static pod": podWorld,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := world(t)
			w.oneMaster()
			looked := 0
			watch := func(phases []Phase) []Phase {
				for i, p := range phases {
					phases[i].Check = func(ctx context.Context, e *machine.Env) (Verdict, error) {
						before := len(w.names)
						v, err := p.Check(ctx, e)
						for _, n := range w.names[before:] {
							if !strings.HasPrefix(n, "run nft list ") {
								t.Errorf("looking whether %s is done: %s", p.Name, n)
							}
						}
						looked++
						return v, err
					}
				}
				return phases
			}
			for range 2 {
				r := New(w.env())
				first, rest := r.First, r.Rest
				r.First = func() []Phase { return watch(first()) }
				r.Rest = func() (Node, []Phase) {
					node, phases := rest()
					return node, watch(phases)
				}
				if err := w.run(r); err != nil {
					t.Fatal(err)
				}
				w.powerOn()
			}
			if looked < 20 {
				t.Errorf("only %d looks", looked)
			}
		})
	}
}

// TestPhasesAreOfOnePass: what a phase remembers of a pass is not there in the next.
func TestPhasesAreOfOnePass(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "testdata/machine.txtar")
	ran := 0
	phase := func() Phase {
		remembers := false
		return Phase{
			Name: "forgetful", Timeout: time.Minute,
			Check: func(context.Context, *machine.Env) (Verdict, error) {
				if remembers {
					return Done, nil
				}
				return Todo, nil
			},
			Run: func(context.Context, *machine.Env) error { ran++; remembers = true; return nil },
		}
	}
	passes := 0
	r := &Runner{Env: w.env(), Sources: func(*machine.Env) string { return "" }}
	r.First = func() []Phase { return []Phase{phase()} }
	r.Rest = func() (Node, []Phase) {
		passes++
		last := Phase{Name: "last", Timeout: time.Minute, Run: func(context.Context, *machine.Env) error { return nil }}
		if passes < 3 {
			last.Run = func(context.Context, *machine.Env) error { return errRestart }
		}
		return Node{}, []Phase{phase(), last}
	}
	if err := w.run(r); err != nil {
		t.Fatal(err)
	}
	if ran != 2*3 || passes != 3 {
		t.Errorf("in %d passes its two phases ran %d times", passes, ran)
	}
}

// TestPhasesOfAnotherSite: what a former Site's phases failed with is not said of
// the one that has taken its place, however many it has.
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

// TestRetrySaysWhatWasWrong: neither the deadline nor a try that it cut off hides
// the reason.
func TestRetrySaysWhatWasWrong(t *testing.T) {
	t.Parallel()
	reason := errors.New("not registered")
	for _, tt := range []struct {
		name         string
		cutOff       bool // the deadline comes during a try
		patience     time.Duration
		fails, tries int
		want         error
	}{
		{"well in the end", false, math.MaxInt64, 2, 3, nil},
		{"deadline between two tries", false, math.MaxInt64, 9, 4, reason},
		{"deadline during a try", true, math.MaxInt64, 9, 4, reason},
		{"patience is over", false, 2 * time.Minute, 9, 4, reason},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		now, tries := time.Unix(0, 0), 0
		e := &machine.Env{Clock: machine.Clock{Now: func() time.Time { return now }, Sleep: func(ctx context.Context, d time.Duration) error {
			if now = now.Add(d); tries == 4 {
				cancel()
			}
			return ctx.Err()
		}}}
		err := e.RetryFor(ctx, tt.patience, time.Minute, func() error {
			switch tries++; {
			case tries > tt.fails:
				return nil
			case tries == 4 && tt.cutOff:
				cancel()
				return ctx.Err()
			}
			return reason
		})
		cancel()
		if err != tt.want || tries != tt.tries {
			t.Errorf("%s: %v after %d tries, expected %v after %d", tt.name, err, tries, tt.want, tt.tries)
		}
	}
}
