package ipvs

import (
	"math/rand/v2"
	"time"
)

// beat is the moments at which this process looks at the kernel's table,
// keepTick apart since it was started. What has room in time is done then, for
// all API servers together: an idle process that wakes up costs more than what
// it then does. Nodes do not stay together, since each has a start of its own.
type beat struct{ started time.Time }

// within returns a moment of the beat among those that jitter could choose,
// and what jitter chooses if there is none.
func (b beat) within(now time.Time, d time.Duration) time.Time {
	latest := now.Add(d).Sub(b.started)
	last := latest / keepTick
	first := (latest - room(d) + keepTick - 1) / keepTick
	if b.started.IsZero() || first > last {
		return now.Add(jitter(d))
	}
	return b.started.Add((first + time.Duration(rand.Int64N(int64(last-first)+1))) * keepTick)
}

// after is how long it is from now to the first moment of the beat that is
// later than d. Without a beat it is keepTick more than d.
func (b beat) after(d time.Duration) time.Duration {
	if b.started.IsZero() {
		return d + keepTick
	}
	past := time.Since(b.started)
	return ((past+d)/keepTick+1)*keepTick - past
}
