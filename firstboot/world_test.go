package firstboot

import (
	"testing"

	"github.com/edgebake/edgebake/firstboot/worldtest"
)

// world is a simulated machine, with the helpers of this package's tests.
type world struct{ *worldtest.World }

// newWorld returns a machine whose slot has no Site.
func newWorld(t *testing.T, names ...string) *world {
	t.Helper()
	return &world{worldtest.New(t, New, names...)}
}

func nativeWorld(t *testing.T, lines ...string) *world {
	return &world{worldtest.Native(t, New, lines...)}
}

func edgeWorld(t *testing.T, lines ...string) *world { return &world{worldtest.Edge(t, New, lines...)} }

func podWorld(t *testing.T) *world { return &world{worldtest.Pod(t, New)} }

func (w *world) Clone(t *testing.T) *world {
	t.Helper()
	return &world{w.World.Clone(t)}
}

func (w *world) CloneWith(t *testing.T, files []worldtest.Entry) *world {
	t.Helper()
	return &world{w.World.CloneWith(t, files)}
}
