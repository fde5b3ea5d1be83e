//go:build linux

package guest

import (
	"os"
	"slices"
	"strconv"
	"testing"
	"time"
)

// during returns the duration of a test: that in the environment variable key, which nightly runs
// set, or else short.
func during(t *testing.T, key string, short time.Duration) time.Duration {
	t.Helper()
	if v := os.Getenv(key); v != "" {
		d, err := time.ParseDuration(v)
		check(err)
		return d
	}
	return short
}

// number returns a number of repetitions: that in the environment variable key, which nightly runs set, or
// else few.
func number(t *testing.T, key string, few int) int {
	t.Helper()
	if v := os.Getenv(key); v != "" {
		n, err := strconv.Atoi(v)
		check(err)
		return n
	}
	return few
}

// TestLoss checks that packet loss alone removes no master. A second node has a good network: a
// removal on both at the same time means that the emulated machine stalled. On a busy computer one
// node may stall alone, so the short run may be repeated twice. The nightly run must pass the first
// time.
func TestLoss(t *testing.T) {
	l := newLab(t, 3, 2)
	bad, good := l.nodes[0], l.nodes[1]
	for _, n := range l.nodes {
		n.configure(l.virtual())
		n.care()
	}
	looks := 1
	if os.Getenv("GUEST_LOSS") == "" {
		looks = 3
	}
	d := during(t, "GUEST_LOSS", 20*time.Second)
	for look := range looks {
		for _, n := range l.nodes {
			n.expect("m1 m2 m3")
		}
		bad.netem(20, 20*time.Millisecond) // in each direction
		removed, heldUp := falseRemovals(t, bad, good, d)
		t.Logf("RESULT loss20 minutes=%.1f removed=%d held_up=%d pings=%d dials=%d", d.Minutes(), removed, heldUp,
			bad.metric("pings_total"), bad.metric("dials_total"))
		if removed == 0 {
			return
		}
		bad.netem(0, 0)
		if look == looks-1 {
			t.Errorf("%d false removals in %s, and some in each look before it", removed, d)
		}
	}
}

// falseRemovals counts the removals of masters, which all work: on the bad node alone (removed),
// and on both nodes at the same time (heldUp).
func falseRemovals(t *testing.T, bad, good *machine, d time.Duration) (removed, heldUp int) {
	t.Helper()
	removals := map[*machine][]time.Time{}
	serving := map[*machine]string{bad: "m1 m2 m3", good: "m1 m2 m3"}
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		for _, n := range []*machine{bad, good} {
			got := n.serving()
			if got == serving[n] {
				continue
			}
			t.Logf("%s serves %q", n.name, got)
			if len(got) < len(serving[n]) {
				removals[n] = append(removals[n], time.Now())
			}
			serving[n] = got
		}
	}
	for _, at := range removals[bad] {
		if slices.ContainsFunc(removals[good], func(o time.Time) bool { return at.Sub(o).Abs() < 5*time.Second }) {
			heldUp++
		} else {
			removed++
		}
	}
	return removed, heldUp
}
