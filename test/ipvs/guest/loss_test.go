//go:build linux

package guest

import (
	"os"
	"slices"
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

// TestLoss: a bad network alone removes nobody. A second node has a good one:
// what both of them remove at once, the emulated machine held up. A short look
// on a busy computer may meet a stall that one node alone had, so it is taken
// up to three times; the long one, at night, has to be clean at once.
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
		bad.netem(20, 20*time.Millisecond) // each way
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

// falseRemovals counts how often masters were taken out on the bad node alone,
// and on both nodes at the same moment, while all of them serve.
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
