package ipvs

import (
	"math/rand/v2"
	"time"
)

// latency is a smoothed duration of answers and its deviation, computed as in TCP's retransmission
// timer (RFC 6298). The zero value has no samples.
type latency struct{ smooth, deviation time.Duration }

// add adds a sample.
func (l *latency) add(d time.Duration) {
	d = max(d, 1) // smooth == 0 means that there is no sample
	if l.smooth == 0 {
		l.smooth, l.deviation = d, d/2
		return
	}
	l.deviation += ((l.smooth - d).Abs() - l.deviation) / 4
	l.smooth = max(l.smooth+(d-l.smooth)/8, 1)
}

// timeout returns the timeout for an answer: the smoothed time plus four deviations, or plus margin
// if that is longer. The result never exceeds most.
func (l *latency) timeout(margin, most time.Duration) time.Duration {
	return min(l.smooth+max(4*l.deviation, margin), most)
}

// maxTimeout is the longest timeout for the answer to a PING and for a handshake. A kube-apiserver
// aborts a handshake after 32 s.
const maxTimeout = 16 * time.Second

// spacing delays requests while an API server answers late or with errors. An API server continues
// to work on a request even if the client has stopped waiting for the answer.
type spacing struct {
	since    time.Time // start of the trouble; zero if there is none
	earliest time.Time // no request is sent before this time
	// load is the longest of the last durations of answers. It shrinks by a quarter with each
	// answer.
	load time.Duration
}

const (
	// mostSpacing is the longest pause between an answer and the next request.
	mostSpacing = 30 * time.Second
	// mostAnswer is the longest wait for an answer over a connection whose PINGs are answered. A
	// kube-apiserver aborts a request after a minute.
	mostAnswer = 2 * time.Minute
)

// answered returns the minimum pause after an answer at time now: a quarter of the time since the
// trouble started, partly random. well means that the answer was neither late nor an error. Such an
// answer ends the trouble if the API server is up.
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
	return randomHalf(min(now.Sub(p.since)/4, mostSpacing), rand.Float64())
}

// trouble returns how long the trouble has lasted.
func (p *spacing) trouble(now time.Time) time.Duration {
	if p.since.IsZero() {
		return 0
	}
	return now.Sub(p.since)
}

// loadFactor limits the share of its time that an API server spends on the requests of one node:
// one part in 32.
const loadFactor = 32

// loaded records the duration of an answer, and returns the minimum pause before the next request
// to an API server that is up. The longest of the last answers counts, because an overloaded API
// server alternates between slow and quick ones.
func (p *spacing) loaded(took time.Duration) time.Duration {
	p.load = max(took, p.load*3/4)
	return randomHalf(min(p.load*loadFactor, mostSpacing), rand.Float64())
}

// randomHalf returns a duration between half of d and d. r is random, in [0,1); it spreads the
// requests of a cluster's nodes.
func randomHalf(d time.Duration, r float64) time.Duration {
	return d/2 + time.Duration(r*float64(d/2))
}
