package ipvs

import (
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
)

// schedule decides what is sent over one held connection and when. It is pure:
// it is told what happened and the time, and says what to do next.
type schedule struct {
	profile *Profile
	beat    beat
	h2      bool // or a PING is a request

	pingDue  time.Time
	readyDue time.Time
	pinged   time.Time // when the outstanding PING was sent; zero if none
	sent     time.Time // when the last PING was sent
	asked    time.Time // when the outstanding request was sent; zero if none
	lateAt   time.Time // when the outstanding request counts as unanswered once more
	answered time.Time // when the last answer came; zero if none did
	earliest time.Time // no request is sent before
	// rtt is the measured time until a PING is answered, across connections; so is spacing.
	rtt     *latency
	spacing *spacing
	// leaving says that the server hangs up after the outstanding answer.
	leaving bool
}

// action is what a schedule wants to be done now.
type action int

const (
	rest     action = iota // until due
	ask                    // send the request
	ping                   // send a PING
	noAnswer               // to the PING
	overdue                // the request is not answered for another ReadyTimeout
)

// strangerTime is how soon after an answer a hang-up belongs to that answer.
const strangerTime = 2 * time.Second

// newSchedule begins with a request at readyDue, or at once if that is over.
func newSchedule(now time.Time, p *Profile, b beat, h2 bool, readyDue time.Time, rtt *latency, apart *spacing) *schedule {
	s := &schedule{profile: p, beat: b, h2: h2, readyDue: now, rtt: rtt, spacing: apart}
	if readyDue.After(now) {
		s.readyDue = readyDue
	}
	s.calm(now)
	return s
}

// wait is how long the answer to a PING may take before an inquiry begins. It follows
// the measured latency: a slow API server has none at each PING.
func (s *schedule) wait() time.Duration {
	if s.rtt.smooth == 0 {
		return 2 * s.profile.Tick
	}
	return s.rtt.patience(s.profile.Tick, mostPatience)
}

// calm puts the next PING off, since there was a sign of life.
func (s *schedule) calm(now time.Time) {
	if s.profile.Ping > 0 {
		s.pingDue = s.beat.within(now, s.profile.Ping)
	} else { // the requests are signs of life enough
		s.pingDue = now.Add(2 * s.profile.Ready)
	}
}

// next returns what to do now, and takes it as done.
func (s *schedule) next(now time.Time) action {
	switch {
	case !s.pinged.IsZero() && !now.Before(s.pingDue):
		return noAnswer
	case s.awaits() && !now.Before(s.lateAt):
		s.lateAt = now.Add(s.profile.ReadyTimeout)
		return overdue
	case !s.awaits() && !now.Before(s.readyDue):
		s.ask(now)
		// An answer that does not come soon has a PING tell whether only the
		// request hangs.
		if soon := now.Add(s.wait()); s.pinged.IsZero() && soon.Before(s.pingDue) {
			s.pingDue = soon
		}
		return ask
	case s.pinged.IsZero() && !now.Before(s.pingDue) && (s.h2 || !s.awaits()):
		s.pinged, s.sent = now, now
		if !s.h2 {
			s.ask(now)
		}
		s.pingDue = now.Add(s.wait())
		return ping
	}
	return rest
}

// ask notes that a request is sent. It is the only one until it is answered: an API server
// that takes long works on all that it gets.
func (s *schedule) ask(now time.Time) {
	s.asked, s.lateAt = now, now.Add(s.profile.ReadyTimeout)
}

// due is when there is something to do again, if nothing happens before.
func (s *schedule) due() time.Time {
	at := s.readyDue
	if s.awaits() {
		at = s.lateAt
	}
	pinging := !s.pinged.IsZero() || s.h2 || !s.awaits()
	if pinging && s.pingDue.Before(at) {
		at = s.pingDue
	}
	return at
}

// pong takes the answer to a PING.
func (s *schedule) pong(now time.Time) {
	if s.pinged.IsZero() {
		return
	}
	s.rtt.add(now.Sub(s.pinged))
	if s.profile.Ping > 0 {
		s.pingDue = s.beat.within(s.pinged, s.profile.Ping)
	} else {
		s.calm(now)
	}
	s.pinged = time.Time{}
}

// awaits reports whether a request is outstanding.
func (s *schedule) awaits() bool { return !s.asked.IsZero() }

// response takes the answer to the request, and what is believed since. retry is the pause
// before a request to an API server that is not up.
func (s *schedule) response(now time.Time, answer probe.Outcome, state State, soon bool, retry time.Duration) {
	// The answer to a request takes longer than that to a PING. A shorter one shows
	// that the API server is faster than it was.
	took := now.Sub(s.asked)
	if took < s.rtt.smooth || !s.h2 {
		s.rtt.add(took)
	}
	well := answer.Alive() && took < s.profile.ReadyTimeout/8
	s.earliest = now.Add(s.spacing.answered(now, took, well, state == Up))
	s.asked, s.pinged, s.answered = time.Time{}, time.Time{}, now
	switch {
	case soon:
		s.readyDue = now.Add(2 * s.profile.Tick)
	case state != Up:
		s.readyDue = now.Add(retry)
	default:
		s.readyDue = s.beat.within(now, s.profile.Ready)
	}
	s.notBefore(s.earliest)
	s.calm(now)
}

// notBefore puts the next request off.
func (s *schedule) notBefore(t time.Time) {
	if s.readyDue.Before(t) {
		s.readyDue = t
	}
}

// hurry brings the next request forward to at most d after the last answer.
func (s *schedule) hurry(d time.Duration) {
	if t := s.answered.Add(d); !s.answered.IsZero() && t.Before(s.readyDue) {
		s.readyDue = t
		s.notBefore(s.earliest)
	}
}

// goAway takes the server's word that it will hang up. It moves its clients,
// often because it is about to stop. That is not a fault: it is asked anew, over
// another connection. But around an answer it is how kube-apiserver treats
// whoever did not show a certificate: then nothing is new until the next
// request is due, which is told by resume.
func (s *schedule) goAway(now time.Time) (leave bool, resume time.Time) {
	if s.awaits() {
		s.leaving = true
		return false, time.Time{}
	}
	if !s.answered.IsZero() && now.Sub(s.answered) < strangerTime {
		return true, s.readyDue
	}
	return true, time.Time{}
}

// inquired takes the end of an inquiry: the answer took, or takes, at least so long.
func (s *schedule) inquired(now time.Time) {
	if !s.pinged.IsZero() {
		s.rtt.add(now.Sub(s.pinged))
	}
}

// trust goes on after an inquiry that the API server has answered, with a request, which clears
// what the rounds counted.
func (s *schedule) trust(now time.Time) {
	s.pinged, s.readyDue = time.Time{}, now
	s.notBefore(s.earliest)
	s.calm(now)
}

// resume goes on over a connection that was silent. What an outstanding request has waited
// meanwhile was not the API server's work on it.
func (s *schedule) resume(now time.Time) {
	if s.awaits() {
		s.ask(now)
	}
	s.trust(now)
}

// needed has a PING sent at once, unless one is outstanding or was sent in this beat:
// programs of the node use the API server.
func (s *schedule) needed(now time.Time) {
	if s.pinged.IsZero() && now.Before(s.pingDue) && now.Sub(s.sent) >= keepTick/2 {
		s.pingDue = now
	}
}
