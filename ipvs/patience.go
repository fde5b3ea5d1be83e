package ipvs

import "time"

// latency is a smoothed time between a question and its answer, and the deviation
// from it, as TCP keeps them for its retransmissions (RFC 6298). The zero value has
// no samples.
type latency struct{ smooth, deviation time.Duration }

// add takes one sample.
func (l *latency) add(d time.Duration) {
	d = max(d, 1) // zero means no sample
	if l.smooth == 0 {
		l.smooth, l.deviation = d, d/2
		return
	}
	l.deviation += ((l.smooth - d).Abs() - l.deviation) / 4
	l.smooth = max(l.smooth+(d-l.smooth)/8, 1)
}

// patience is how long to wait for an answer: the smoothed time and four deviations,
// at least margin, and no longer than most in all.
func (l *latency) patience(margin, most time.Duration) time.Duration {
	return min(l.smooth+max(4*l.deviation, margin), most)
}

// mostPatience is the longest wait for the answer to a PING, or for a handshake. A
// kube-apiserver gives up a handshake after 32 s.
const mostPatience = 16 * time.Second
