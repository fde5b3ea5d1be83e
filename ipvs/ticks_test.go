package ipvs

import (
	"testing"
	"time"
)

// TestTicks checks that work that can wait is done at ticks, after at least four fifths
// of its interval and at most the whole interval.
func TestTicks(t *testing.T) {
	start := time.Now()
	b := tickTimes{start}
	for i := range 2000 {
		now := start.Add(time.Duration(i) * 7 * time.Millisecond)
		for _, d := range []time.Duration{300 * time.Millisecond, time.Second, 15 * time.Second, 80 * time.Second} {
			at := b.within(now, d)
			if wait := at.Sub(now); wait < d-maxJitter(d) || wait > d {
				t.Fatalf("%s after the start, %s ahead: in %s", now.Sub(start), d, wait)
			}
			if on := at.Sub(start)%keepTick == 0; !on && maxJitter(d) >= keepTick {
				t.Fatalf("%s after the start, %s ahead: off the ticks", now.Sub(start), d)
			}
		}
	}
	// Right after the last answer, the next tick is due.
	if at := b.within(start.Add(5*time.Millisecond), time.Second); at != start.Add(keepTick) {
		t.Errorf("a PING is due %s after the last", at.Sub(start))
	}
	if at := (tickTimes{}).within(start, time.Second).Sub(start); at < 800*time.Millisecond || at > time.Second {
		t.Errorf("without ticks: in %s", at)
	}
	if d := b.after(0); d <= 0 || d > keepTick {
		t.Errorf("the next moment is %s ahead", d)
	}
	if d := b.after(keepTick); d <= keepTick || d > 2*keepTick {
		t.Errorf("the one after it is %s ahead", d)
	}
	if d := (tickTimes{}).after(0); d != keepTick {
		t.Errorf("without ticks: %s ahead", d)
	}
}
