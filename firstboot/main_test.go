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

// TestMain makes garbage collections rare: the tests boot thousands of machines, which mostly wait
// for API servers, and frequent collections would cost more than the memory that they free.
func TestMain(m *testing.M) {
	flag.Parse()
	if n, own := runtime.GOMAXPROCS(0), flag.Lookup("test.parallel"); own.Value.String() == strconv.Itoa(n) {
		if err := own.Value.Set(strconv.Itoa(3 * n)); err != nil {
			panic(err)
		}
	}
	debug.SetGCPercent(800)
	debug.SetMemoryLimit(1 << 30) // SetGCPercent has no limit of its own
	syscall.Umask(worldtest.Umask)
	os.Exit(m.Run())
}
