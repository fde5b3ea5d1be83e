// Package desk has what tests need of the computer that they run on. It ends tests whose
// requirements are missing: on a developer's computer, such a test is skipped with a message in
// capitals; in CI, which must have everything, it fails.
package desk

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// Lacks ends a test because something is missing, which format describes.
func Lacks(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") != "" {
		t.Fatalf("NOT TESTED, and CI must: "+format, args...)
	}
	t.Skipf("SKIPPED, NOT TESTED: "+format, args...)
}

// NeedRoot ends a test unless it runs as root. why is the reason for the message.
func NeedRoot(t testing.TB, why string) {
	t.Helper()
	if os.Geteuid() != 0 {
		Lacks(t, "only root can run this: %s", why)
	}
}

// Processor returns the processor time that this program uses while f runs. Unlike elapsed time, it
// does not depend on other programs.
func Processor(t testing.TB, f func()) time.Duration {
	t.Helper()
	spent := func() time.Duration {
		var r syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
			t.Fatal(err)
		}
		return time.Duration(r.Utime.Nano() + r.Stime.Nano())
	}
	before := spent()
	f()
	return spent() - before
}

// NeedProgram returns the path of a program, or ends the test if it is missing. pkg is the
// program's Debian package.
func NeedProgram(t testing.TB, name, pkg string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Lacks(t, "there is no %s (package %s)", name, pkg)
	}
	return path
}

// WriteProgram writes a program or script that the test then runs.
//
// A process that another goroutine starts holds the open file until its own exec, and running a
// file that is open for writing fails with ETXTBSY. ForkLock keeps other goroutines from starting
// one.
func WriteProgram(t testing.TB, path, text string) {
	t.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}
