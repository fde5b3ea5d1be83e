package ipvs

import (
	"math/rand/v2"
	"time"
)

// latency is a smoothed time to an answer, and its deviation, computed as TCP does for
// retransmissions (RFC 6298). The zero value has no samples.
type latency struct{ smooth, deviation time.Duration }

// add adds a sample.
func (l *latency) add(d time.Duration) {
	d = max(d, 1) // zero means no sample
	if l.smooth == 0 {
		l.smooth, l.deviation = d, d/2
		return
	}
	l.deviation += ((l.smooth - d).Abs() - l.deviation) / 4
	l.smooth = max(l.smooth+(d-l.smooth)/8, 1)
}

// timeout returns how long to wait for an answer: the smoothed time plus four deviations,
// or at least margin, but at most most.
func (l *latency) timeout(margin, most time.Duration) time.Duration {
	return min(l.smooth+max(4*l.deviation, margin), most)
}

// maxTimeout is the longest wait for the answer to a PING, or for a handshake. A
// kube-apiserver gives up a handshake after 32 s.
const maxTimeout = 16 * time.Second

// spacing keeps requests apart while an API server is in trouble: it answers late, or with
// errors. It works on each request, also when nobody waits for the answer anymore.
type spacing struct{ since time.Time } // when the trouble began; zero: there is none

const (
	// mostSpacing is the longest pause between an answer and the next request because of
	// trouble.
	mostSpacing = 30 * time.Second
	// mostAnswer is the longest wait for an answer over a connection whose PINGs are
	// answered. A kube-apiserver gives up a request after a minute.
	mostAnswer = 2 * time.Minute
)

// answered returns the least pause after an answer that came now: a quarter of the time
// that the trouble has lasted. well is an answer that is neither late nor an error; the
// trouble ends with it if the API server is up.
func (p *spacing) answered(now time.Time, took time.Duration, well, up bool) time.Duration {
	switch {
	case well && up:
		p.since = time.Time{}
		return 0
	case well:
		return 0
	case p.since.IsZero():
		p.since = now.Add(-took)
	}
	return spread(min(now.Sub(p.since)/4, mostSpacing), rand.Float64())
}

// spread returns half of d to all of it; r in [0,1) spreads the nodes of a cluster.
func spread(d time.Duration, r float64) time.Duration {
	return d/2 + time.Duration(r*float64(d/2))
}
