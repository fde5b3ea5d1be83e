package ipvs

import (
	"math/rand/v2"
	"time"
)

// tickTimes are the times, keepTick apart, at which this process reads the kernel's table.
// Other work is done at the same times, because each wakeup costs more than the work itself.
type tickTimes struct{ started time.Time }

// within returns a random tick between now+d-maxJitter(d) and now+d. If no tick is in
// that range, it returns now+jitter(d).
func (t tickTimes) within(now time.Time, d time.Duration) time.Time {
	latest := now.Add(d).Sub(t.started)
	last := latest / keepTick
	first := (latest - maxJitter(d) + keepTick - 1) / keepTick
	if t.started.IsZero() || first > last {
		return now.Add(jitter(d))
	}
	return t.started.Add((first + time.Duration(rand.Int64N(int64(last-first)+1))) * keepTick)
}

// after returns the time left until the first tick that is later than now+d. For zero tickTimes it
// returns d+keepTick.
func (t tickTimes) after(d time.Duration) time.Duration {
	if t.started.IsZero() {
		return d + keepTick
	}
	past := time.Since(t.started)
	return ((past+d)/keepTick+1)*keepTick - past
}
