//go:debug tlsmlkem=0

package firstboot

import (
	"flag"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"syscall"
	"testing"

	"github.com/edgebake/edgebake/firstboot/worldtest"
)

// TestMain is for thousands of machines, each of which is booted for a moment
// and waits for its masters most of that. Looking for what they left in memory
// costs more than the memory.
func TestMain(m *testing.M) {
	flag.Parse()
	if n, own := runtime.GOMAXPROCS(0), flag.Lookup("test.parallel"); own.Value.String() == strconv.Itoa(n) {
		if err := own.Value.Set(strconv.Itoa(3 * n)); err != nil {
			panic(err)
		}
	}
	debug.SetGCPercent(800)
	debug.SetMemoryLimit(1 << 30) // but not at any price
	syscall.Umask(worldtest.Umask)
	os.Exit(m.Run())
}
