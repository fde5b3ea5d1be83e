package worldtest

import (
	"fmt"
	"strings"
	"sync"
	"testing"
)

// Cuttable is a machine whose power can be cut: a World, or a type that embeds one.
type Cuttable[M any] interface {
	CloneWith(t *testing.T, files []Entry) M
	Fingerprint(t *testing.T, files []Entry) [32]byte
	Machine() *World
}

// AfterCut configures what a test does with a machine whose power was cut.
type AfterCut[M any] struct {
	// Next turns the power on again. left are the files after the cut. goesOn boots m and checks
	// it; now contains the files of m.
	Next func(t *testing.T, cut M, left []Entry, goesOn func(kind string, m M, now []Entry))
	// Check checks a machine that has booted again.
	Check func(t *testing.T, m M, when string)
	// Said checks the output of a machine whose state equals one that was already followed.
	Said func(t *testing.T, m M)
}

// EveryCut returns the number of effects from one power cut to the next. With -short it is 17, a
// prime, so that tests which use their rows in turn still use every row.
func EveryCut() int {
	if testing.Short() {
		return 17
	}
	return 1
}

// CutBefore cuts the power of copies of m before each of count effects of their first boot, or
// only kills first boot there. Cuts that leave equal machines are followed only once.
func CutBefore[M Cuttable[M]](t *testing.T, m M, files []Entry, count int, after AfterCut[M]) {
	var followed sync.Map
	for n := 1; n <= count; n += EveryCut() {
		t.Run(fmt.Sprintf("at %d", n), func(t *testing.T) {
			t.Parallel()
			cut := m.CloneWith(t, files)
			cut.Machine().PowerCutAt = n
			// An error of the last effects (state, report) does not stop first boot.
			if err := cut.Machine().Boot(); err == nil && n < count-3 {
				t.Fatalf("cut at %d of %d: the machine continued after the power cut", n, count)
			}
			at := cut.Machine().EffectNames[len(cut.Machine().EffectNames)-1]
			left := cut.Machine().Files()
			goesOn := func(kind string, m M, now []Entry) {
				when := fmt.Sprintf("%s at %d (%s)", kind, n, at)
				if other, same := followed.LoadOrStore(m.Fingerprint(t, now), when); same {
					t.Logf("%s leaves the same state as %s", when, other)
					after.Said(t, m)
					return
				}
				if kind == "kill" { // continue with a copy: cut itself loses its power next
					m = cut.CloneWith(t, left)
					m.Machine().Effects, m.Machine().EffectNames = 0, nil
				}
				if err := m.Machine().Boot(); err != nil {
					t.Errorf("%s: %v\n%s", when, err, strings.Join(m.Machine().Console, "\n"))
					return
				}
				after.Check(t, m, when)
			}
			goesOn("kill", cut, left)
			after.Next(t, cut, left, goesOn)
		})
	}
}

// CutPowerBefore cuts the power before an effect.
func (w *World) CutPowerBefore(effect string) {
	w.BeforeEffect = func(name string) {
		if name == effect {
			w.Mu.Lock()
			w.PowerCutAt = w.Effects + 1
			w.Mu.Unlock()
		}
	}
}

// Machine returns w, for types that embed it.
func (w *World) Machine() *World { return w }
