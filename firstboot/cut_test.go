package firstboot

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/edgebake/edgebake/firstboot/worldtest"
)

// cuttable is a machine whose power can be cut: a world, or a type that embeds one.
type cuttable[M any] interface {
	cloneWith(t *testing.T, files []worldtest.Entry) M
	snapshot(t *testing.T, files []worldtest.Entry) [32]byte
	machine() *world
}

func (w *world) machine() *world { return w }

// afterCut configures what a test does with a machine whose power was cut.
type afterCut[M any] struct {
	// next turns the power on again. left are the files after
	// the cut; goesOn boots a machine with the present files.
	next func(t *testing.T, cut M, left []worldtest.Entry, goesOn func(kind string, m M, now []worldtest.Entry))
	// check checks a machine that has booted again.
	check func(t *testing.T, m M, when string)
	said  func(t *testing.T, m M)
}

// everyCut returns the number of effects from one power cut to the next. With -short it is 17,
// which does not divide any test's number of rows.
func everyCut() int {
	if testing.Short() {
		return 17
	}
	return 1
}

// cutBefore cuts the power of copies of m before each of count effects of their first boot, or
// only kills first boot there. Cuts that leave equal machines are followed only once.
func cutBefore[M cuttable[M]](t *testing.T, m M, files []worldtest.Entry, count int, after afterCut[M]) {
	var followed sync.Map
	for n := 1; n <= count; n += everyCut() {
		t.Run(fmt.Sprintf("at %d", n), func(t *testing.T) {
			t.Parallel()
			cut := m.cloneWith(t, files)
			cut.machine().PowerCutAt = n
			// An error of the last effects (state, report) does not stop first boot.
			if err := cut.machine().boot(); err == nil && n < count-3 {
				t.Fatalf("cut at %d of %d: the machine continued after the power cut", n, count)
			}
			at := cut.machine().EffectNames[len(cut.machine().EffectNames)-1]
			left := cut.machine().Files()
			goesOn := func(kind string, m M, now []worldtest.Entry) {
				when := fmt.Sprintf("%s at %d (%s)", kind, n, at)
				if other, same := followed.LoadOrStore(m.snapshot(t, now), when); same {
					t.Logf("%s is as %s", when, other)
					after.said(t, m)
					return
				}
				if kind == "kill" { // its power is cut next
					m = cut.cloneWith(t, left)
					m.machine().Effects, m.machine().EffectNames = 0, nil
				}
				if err := m.machine().boot(); err != nil {
					t.Errorf("%s: %v\n%s", when, err, strings.Join(m.machine().Console, "\n"))
					return
				}
				after.check(t, m, when)
			}
			goesOn("kill", cut, left)
			after.next(t, cut, left, goesOn)
		})
	}
}
