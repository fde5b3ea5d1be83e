//go:build linux

package guest

import (
	"os"
	"strconv"
	"testing"
	"time"
)

// during is how long a test of patience lasts: short in CI, from the
// environment at night.
func during(t *testing.T, key string, short time.Duration) time.Duration {
	t.Helper()
	if v := os.Getenv(key); v != "" {
		d, err := time.ParseDuration(v)
		check(err)
		return d
	}
	return short
}

// number is how often something is done: few times in CI, from the environment
// at night.
func number(t *testing.T, key string, few int) int {
	t.Helper()
	if v := os.Getenv(key); v != "" {
		n, err := strconv.Atoi(v)
		check(err)
		return n
	}
	return few
}

// TestLoss: a bad network alone removes nobody.
func TestLoss(t *testing.T) {
	l := newLab(t, 3, 1)
	n := l.settle()
	for _, m := range l.masters {
		m.netem(20, 20*time.Millisecond) // each way
	}
	d := during(t, "GUEST_LOSS", 20*time.Second)
	removed := 0
	serving := "m1 m2 m3"
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if got := n.serving(); got != serving {
			t.Logf("serving %q", got)
			if len(got) < len(serving) {
				removed++
			}
			serving = got
		}
	}
	t.Logf("RESULT loss20 minutes=%.1f removed=%d", d.Minutes(), removed)
	if removed > 0 {
		t.Errorf("%d false removals in %s", removed, d)
	}
}
