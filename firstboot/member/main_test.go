//go:debug tlsmlkem=0

package member_test

import (
	"testing"

	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/worldtest"
)

func TestMain(m *testing.M) { worldtest.Main(m) }

// newWorld returns a machine whose slot has no Site.
func newWorld(t *testing.T, names ...string) *worldtest.World {
	return worldtest.New(t, firstboot.New, names...)
}

func nativeWorld(t *testing.T, lines ...string) *worldtest.World {
	return worldtest.Native(t, firstboot.New, lines...)
}

func edgeWorld(t *testing.T, lines ...string) *worldtest.World {
	return worldtest.Edge(t, firstboot.New, lines...)
}

// readyNode returns a native node, joined and Ready.
func readyNode(t *testing.T) *worldtest.World {
	t.Helper()
	w := nativeWorld(t)
	w.MustBoot()
	return w
}
