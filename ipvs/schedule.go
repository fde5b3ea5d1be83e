package ipvs

import (
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
)

// schedule decides what is sent over one open connection, and when. It has no side effects: the
// caller passes events and times to it, and performs the actions that it returns.
type schedule struct {
	profile *Profile
	ticks   tickTimes
	h2      bool // HTTP/2; over HTTP/1.1 a PING is sent as a request

	pingDue  time.Time
	readyDue time.Time
	pinged   time.Time // when the outstanding PING was sent; zero if none
	sent     time.Time // when the last PING was sent
	asked    time.Time // when the outstanding request was sent; zero if none
	lateAt   time.Time // when the outstanding request is reported overdue
	answered time.Time // when the last answer arrived; zero if none has arrived
	began    time.Time // when the connection was made
	// rtt is the measured time until a PING is answered. rtt and spacing are kept across
	// connections.
	rtt     *latency
	spacing *spacing
	// closing is set if the server closes the connection after the outstanding
	// answer.
	closing bool
	// measure is the number of PINGs still to be sent in quick succession, to
	// update rtt.
	measure int
}

// action is the next action on a connection.
type action int

const (
	idle     action = iota // nothing to do before due
	ask                    // send the request
	ping                   // send a PING
	noAnswer               // the PING was not answered in time
	overdue                // the request was not answered within another ReadyTimeout
)

// measurePings is the maximum number of PINGs sent in quick succession after an inquiry and on a
// new connection. A stall of the API server adds a sample of seconds to rtt, which would delay the
// detection of its next failure; sixteen short samples outweigh it.
const measurePings = 16

// closeAfterAnswer is the time within which a close counts as a consequence of the last answer:
// kube-apiserver closes the connection of a client without a certificate after each answer.
const closeAfterAnswer = 2 * time.Second

// newSchedule returns a schedule that starts with a request at readyDue, or immediately if that
// time has passed.
func newSchedule(now time.Time, p *Profile, b tickTimes, h2 bool, readyDue time.Time, rtt *latency, apart *spacing) *schedule {
	s := &schedule{profile: p, ticks: b, h2: h2, readyDue: now, began: now, rtt: rtt, spacing: apart, measure: measurePings}
	if readyDue.After(now) {
		s.readyDue = readyDue
	}
	s.postponePing(now)
	return s
}

// wait returns the timeout for the answer to a PING, after which an inquiry
// starts. It follows the measured latency, so that a slow API server does not
// cause an inquiry at each PING.
func (s *schedule) wait() time.Duration {
	if s.rtt.smooth == 0 {
		return 2 * s.profile.Tick
	}
	return s.rtt.timeout(s.profile.Tick, maxTimeout)
}

// postponePing postpones the next PING after a sign of life from the API server.
func (s *schedule) postponePing(now time.Time) {
	if s.profile.Ping > 0 {
		s.pingDue = s.ticks.within(now, s.profile.Ping)
	} else { // without PINGs: the requests are sufficient
		s.pingDue = now.Add(2 * s.profile.Ready)
	}
}

// next returns the action for the time now. The caller must perform it.
func (s *schedule) next(now time.Time) action {
	switch {
	case !s.pinged.IsZero() && !now.Before(s.pingDue):
		return noAnswer
	case s.awaits() && !now.Before(s.lateAt):
		s.lateAt = now.Add(s.profile.ReadyTimeout)
		return overdue
	case !s.awaits() && !now.Before(s.readyDue):
		s.ask(now)
		// If the answer takes long, a PING shows whether only the request hangs.
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
	return idle
}

// ask records that a request is sent. Only one request is outstanding at a time, because a slow API
// server works on all requests that it receives.
func (s *schedule) ask(now time.Time) {
	s.asked, s.lateAt = now, now.Add(s.profile.ReadyTimeout)
}

// due returns the next time at which next has an action.
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

// pong records the answer to a PING.
func (s *schedule) pong(now time.Time) {
	if s.pinged.IsZero() {
		return
	}
	took := now.Sub(s.pinged)
	if took >= s.profile.Tick { // the API server is slow: more PINGs would not help it
		s.measure = 0
	}
	s.rtt.add(took)
	switch {
	case s.measures():
		s.measure--
		s.pingDue = now.Add(s.profile.Tick)
	case s.profile.Ping > 0:
		s.pingDue = s.ticks.within(s.pinged, s.profile.Ping)
	default:
		s.postponePing(now)
	}
	s.pinged = time.Time{}
}

// measures reports whether rtt has to be updated because it delays inquiries.
func (s *schedule) measures() bool {
	return s.h2 && s.measure > 0 && s.wait() > 2*s.profile.Tick
}

// awaits reports whether a request is outstanding.
func (s *schedule) awaits() bool { return !s.asked.IsZero() }

// response records the answer to the request, and the state and soon that observe returned for it.
// retry is the pause before a request to an API server that is not up.
func (s *schedule) response(now time.Time, answer probe.Outcome, state State, soon bool, retry time.Duration) {
	// A request takes longer than a PING. So a request faster than rtt shows that the API server
	// has become faster.
	took := now.Sub(s.asked)
	if took < s.rtt.smooth || !s.h2 {
		s.rtt.add(took)
	}
	well := answer.Alive() && took < s.profile.ReadyTimeout/8
	s.spacing.earliest = now.Add(s.spacing.answered(now, took, well, state == Up))
	loaded := s.spacing.loaded(took)
	s.asked, s.pinged, s.answered = time.Time{}, time.Time{}, now
	switch {
	case soon:
		s.readyDue = now.Add(2 * s.profile.Tick)
	case state != Up:
		s.readyDue = now.Add(retry)
	default:
		s.readyDue = s.ticks.within(now, s.profile.Ready)
		s.notBefore(now.Add(loaded))
	}
	s.notBefore(s.spacing.earliest)
	if s.measures() {
		s.pingDue = now
	} else {
		s.postponePing(now)
	}
	s.spacePing()
}

// spacePing delays a PING over HTTP/1.1 until spacing allows it, because it is sent as a request.
func (s *schedule) spacePing() {
	if !s.h2 && s.pingDue.Before(s.spacing.earliest) {
		s.pingDue = s.spacing.earliest
	}
}

// notBefore postpones the next request to t at least.
func (s *schedule) notBefore(t time.Time) {
	if s.readyDue.Before(t) {
		s.readyDue = t
	}
}

// hurry moves the next request forward to at most d after the last answer, or after the start of
// the connection if there was none.
func (s *schedule) hurry(d time.Duration) {
	last := s.answered
	if last.IsZero() {
		last = s.began
	}
	if t := last.Add(d); t.Before(s.readyDue) {
		s.readyDue = t
		s.notBefore(s.spacing.earliest)
	}
}

// goAway records that the server will close the connection, often because it is stopping. leave
// means that the caller must open another connection now and send the first request over it at
// resume, or immediately if resume is zero. A close soon after an answer only means that this
// client has no certificate, so resume is not zero.
func (s *schedule) goAway(now time.Time) (leave bool, resume time.Time) {
	if s.awaits() {
		s.closing = true
		return false, time.Time{}
	}
	if !s.answered.IsZero() && now.Sub(s.answered) < closeAfterAnswer {
		return true, s.readyDue
	}
	return true, time.Time{}
}

// inquired records the end of an inquiry as a sample of rtt: the answer took at least this long.
func (s *schedule) inquired(now time.Time) {
	if !s.pinged.IsZero() {
		s.rtt.add(now.Sub(s.pinged))
	}
}

// afterInquiry continues after an inquiry that the API server answered. If rounds of the inquiry
// failed, a request is sent at once: its answer sets the number of failures back to 0.
func (s *schedule) afterInquiry(now time.Time, failed bool) {
	s.pinged, s.measure = time.Time{}, measurePings
	if failed {
		s.readyDue = now
		s.notBefore(s.spacing.earliest)
	}
	s.postponePing(now)
}

// resume continues on a connection that was silent. The silent time does not count for the
// outstanding request.
func (s *schedule) resume(now time.Time) {
	if s.awaits() {
		s.ask(now)
	}
	s.afterInquiry(now, true)
}

// pingSoon sends a PING immediately, because programs of the node use the API server. It does
// nothing if a PING is outstanding or was sent recently.
func (s *schedule) pingSoon(now time.Time) {
	if s.pinged.IsZero() && now.Before(s.pingDue) && now.Sub(s.sent) >= keepTick/2 {
		s.pingDue = now
		s.spacePing()
	}
}
