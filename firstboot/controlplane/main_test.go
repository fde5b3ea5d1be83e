//go:debug tlsmlkem=0

package controlplane_test

import (
	"flag"
	"testing"

	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/worldtest"
)

func TestMain(m *testing.M) { worldtest.Main(m) }

var rewrite = flag.Bool("update", false, "rewrite the golden files")

// newWorld returns a machine whose slot has no Site.
func newWorld(t *testing.T, names ...string) *worldtest.World {
	return worldtest.New(t, firstboot.New, names...)
}

func nativeWorld(t *testing.T, lines ...string) *worldtest.World {
	return worldtest.Native(t, firstboot.New, lines...)
}
