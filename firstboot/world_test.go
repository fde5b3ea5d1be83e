package firstboot

import (
	"testing"

	"github.com/edgebake/edgebake/firstboot/worldtest"
)

// world is a simulated machine that runs first boot.
type world struct{ *worldtest.World }

func newWorld(t *testing.T, files string, names ...string) *world {
	t.Helper()
	return &world{worldtest.New(t, files, names...)}
}

func (w *world) clone(t *testing.T) *world {
	t.Helper()
	return &world{w.World.Clone(t)}
}

func (w *world) cloneWith(t *testing.T, files []worldtest.Entry) *world {
	t.Helper()
	return &world{w.World.CloneWith(t, files)}
}

// boot runs first boot until it is done, needs a person, or waits too long.
func (w *world) boot() error {
	return w.Run(New(w.Env()))
}

func (w *world) snapshot(t *testing.T, files []worldtest.Entry) [32]byte {
	t.Helper()
	return w.World.Fingerprint(t, files)
}
