package ipvs

import (
	"math/rand/v2"
	"time"
)

// beat is the sequence of times, keepTick apart, at which this process reads the kernel's table.
// Other work is done at the same times, because each wakeup costs more than the work itself.
type beat struct{ started time.Time }

// within returns a random time of the beat between now+d-room(d) and now+d. If no time of the beat
// is in that range, it returns now+jitter(d).
func (b beat) within(now time.Time, d time.Duration) time.Time {
	latest := now.Add(d).Sub(b.started)
	last := latest / keepTick
	first := (latest - room(d) + keepTick - 1) / keepTick
	if b.started.IsZero() || first > last {
		return now.Add(jitter(d))
	}
	return b.started.Add((first + time.Duration(rand.Int64N(int64(last-first)+1))) * keepTick)
}

// after returns the time left until the first time of the beat that is later than now+d. For a zero
// beat it returns d+keepTick.
func (b beat) after(d time.Duration) time.Duration {
	if b.started.IsZero() {
		return d + keepTick
	}
	past := time.Since(b.started)
	return ((past+d)/keepTick+1)*keepTick - past
}
