//go:debug tlsmlkem=0

package firstboot

import (
	"testing"

	"github.com/edgebake/edgebake/firstboot/worldtest"
)

func TestMain(m *testing.M) { worldtest.Main(m) }
