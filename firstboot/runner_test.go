package firstboot

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// TestSpread checks that a thousand nodes that boot together spread their requests, and no node
// waits for long.
func TestSpread(t *testing.T) {
	t.Parallel()
	var early, late int
	for i := range 1000 {
		id := fmt.Sprintf("shop-%d", i)
		d := run.BootDelay(id, ondisk.BootSpread)
		if d < 0 || d >= ondisk.BootSpread || d != run.BootDelay(id, ondisk.BootSpread) {
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
	// A node waits once per boot, before its first connection, even if the run starts over.
	w := nativeWorld(t)
	if err := w.Boot(); err != nil {
		t.Fatal(err)
	}
	w.PowerOn()
	w.Offline, w.Patience = true, 5*time.Minute
	e := w.Env()
	var first time.Time
	var once sync.Once // several connections are tried at once
	began, dial := w.Now, e.Dial
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		once.Do(func() { first = w.Now })
		return dial(ctx, network, addr)
	}
	waits, sleep := 0, e.Sleep
	want := run.BootDelay("edge-sn0042"+machine.ID(e), ondisk.BootSpread)
	// The time before the first connection counts: here, reading the slot takes a while.
	took, read := time.Duration(0), e.ReadSlot
	e.ReadSlot = func(device string) (*slot.Contents, error) {
		if took == 0 {
			took = want / 4
			w.Now = w.Now.Add(took)
		}
		return read(device)
	}
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		if d == want-took {
			waits++
		}
		return sleep(ctx, d)
	}
	if err := w.Run(New(e)); err == nil {
		t.Fatal("first boot succeeded although no API server answers")
	}
	if first.Sub(began) != want || waits != 1 || took == 0 {
		t.Errorf("the first connection came after %s, expected %s; first boot waited %d times", first.Sub(began), want, waits)
	}
}

// TestChecksOnlyLook checks that no Check changes the machine, at its first boot or later. The
// programs that Checks run only read.
func TestChecksOnlyLook(t *testing.T) {
	t.Parallel()
	for name, world := range map[string]func(*testing.T) *world{
		"native": func(t *testing.T) *world { return nativeWorld(t) }, "edge": func(t *testing.T) *world { return edgeWorld(t) }, "static pod": podWorld,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := world(t)
			w.UseSingleMaster()
			looked := 0
			watch := func(phases []run.Phase) []run.Phase {
				for i, p := range phases {
					phases[i].Check = func(ctx context.Context, e *machine.Env) (run.Verdict, error) {
						before := len(w.EffectNames)
						v, err := p.Check(ctx, e)
						for _, n := range w.EffectNames[before:] {
							if !strings.HasPrefix(n, "run nft list ") {
								t.Errorf("the Check of %s had the effect %q", p.Name, n)
							}
						}
						looked++
						return v, err
					}
				}
				return phases
			}
			for range 2 {
				r := New(w.Env())
				first, rest := r.First, r.Rest
				r.First = func() []run.Phase { return watch(first()) }
				r.Rest = func() (run.Node, []run.Phase) {
					node, phases := rest()
					return node, watch(phases)
				}
				if err := w.Run(r); err != nil {
					t.Fatal(err)
				}
				w.PowerOn()
			}
			if looked < 20 {
				t.Errorf("only %d Checks ran", looked)
			}
		})
	}
}

// TestPhasesAreOfOnePass checks that a phase remembers nothing from an earlier pass.
func TestPhasesAreOfOnePass(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ran := 0
	phase := func() run.Phase {
		remembers := false
		return run.Phase{
			Name: "forgetful", Timeout: time.Minute,
			Check: func(context.Context, *machine.Env) (run.Verdict, error) {
				if remembers {
					return run.Done, nil
				}
				return run.Todo, nil
			},
			Run: func(context.Context, *machine.Env) error { ran++; remembers = true; return nil },
		}
	}
	passes := 0
	r := &run.Runner{Env: w.Env(), Sources: func(*machine.Env) string { return "" }}
	r.First = func() []run.Phase { return []run.Phase{phase()} }
	r.Rest = func() (run.Node, []run.Phase) {
		passes++
		last := run.Phase{Name: "last", Timeout: time.Minute, Run: func(context.Context, *machine.Env) error { return nil }}
		if passes < 3 {
			last.Run = func(context.Context, *machine.Env) error { return run.ErrRestart }
		}
		return run.Node{}, []run.Phase{phase(), last}
	}
	if err := w.Run(r); err != nil {
		t.Fatal(err)
	}
	if ran != 2*3 || passes != 3 {
		t.Errorf("in %d passes the two phases ran %d times", passes, ran)
	}
}
