package firstboot

import (
	"os"
	"runtime/debug"
	"testing"
)

// TestMain lets garbage be: thousands of machines are booted, each for a
// moment, and looking for what they left costs more than its memory.
func TestMain(m *testing.M) {
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}
