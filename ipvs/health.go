package ipvs

import (
	"math/rand/v2"
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
)

// State is the state of an API server.
type State int

// States of an API server.
const (
	Unknown State = iota // no verdict yet
	Up
	Draining // completes its requests, accepts no new ones
	Down
	Alien // belongs to another cluster, or has no valid certificate
)

func (s State) String() string {
	return [...]string{"unknown", "up", "draining", "down", "alien"}[s]
}

// A flapping API server needs more successful probes to be up again. Each failure within flapSoon
// of a recovery doubles their number, up to flapMax times.
const (
	flapSoon = 30 * time.Second
	flapMax  = 8
)

// health computes the state of one API server from its probes. Its zero value, with Rise and Fall
// set, is an API server that has not been probed.
type health struct {
	Rise, Fall int

	State   State
	Outcome probe.Outcome // of the last probe
	Since   time.Time     // of State
	Falls   int           // number of times it went down

	good, bad int
	// lateOnly is set if all of its failures since its last good answer were late answers, or those
	// of an overloaded server.
	lateOnly bool
	flap     int // factor of the required successful probes: 1, 2, 4 or 8; 0 counts as 1
	// answering is set if it is down but answers: it is not ready, or its requests take too long.
	// From closeAt on, its connections may be closed.
	answering bool
	closeAt   time.Time
}

// closeAfter limits how long a node keeps its connections to an API server that is down but
// answers. It is long because all nodes would reconnect at once, to API servers that may be as
// busy. closeAfter and maxReady together do not exceed the 50 s after which kube-controller-manager
// marks a node that has not renewed its lease as not Ready.
const closeAfter = 20 * time.Second

// observe records the outcome of one probe and reports whether State changed.
func (h *health) observe(outcome probe.Outcome, now time.Time) bool {
	h.Outcome = outcome
	switch {
	case outcome.Alive():
		h.lateOnly = true
	case outcome == probe.Late, outcome == probe.Overdue, outcome == probe.Busy: // it is slow
	case outcome == probe.Closed && h.State == Up && h.bad == 0: // the next attempt shows whether it has stopped
	case outcome == probe.ServerError:
		h.lateOnly = false
	default:
		h.lateOnly, h.answering = false, false
	}
	switch {
	case outcome == probe.Identity || outcome == probe.Recreated:
		h.good, h.bad = 0, 0
		return h.enter(Alien, now) // at once: a wrong identity is not a temporary failure
	case outcome.Alive():
		return h.succeeded(now)
	case outcome == probe.Draining:
		h.good, h.bad = 0, 0
		return h.State != Alien && h.enter(Draining, now)
	}
	return h.failed(now)
}

// succeeded counts a successful probe.
func (h *health) succeeded(now time.Time) bool {
	h.bad = 0
	h.good++
	switch {
	case h.State == Up:
		if now.Sub(h.Since) > flapSoon {
			h.flap = 0
		}
		return false
	case h.State == Unknown, // the first verdict is not a recovery
		h.good >= h.Rise*max(h.flap, 1):
		return h.enter(Up, now)
	}
	return false
}

// failed counts a failed probe.
func (h *health) failed(now time.Time) bool {
	h.good = 0
	h.bad++
	if h.State == Down || h.State == Alien || h.bad < h.Fall {
		return false
	}
	if h.State == Up && h.Falls > 0 && now.Sub(h.Since) < flapSoon {
		h.flap = min(max(h.flap, 1)*2, flapMax)
	}
	h.Falls++
	h.answering = h.Outcome == probe.ServerError || h.Outcome == probe.Overdue
	h.closeAt = now.Add(randomHalf(closeAfter, rand.Float64()))
	return h.enter(Down, now)
}

// slow reports whether an API server is down only because it is overloaded. A stopped one would
// have refused or closed a connection.
func (h *health) slow() bool { return h.State == Down && h.lateOnly }

// keeps reports whether a node keeps its connections to an API server that is down but answers. It
// does so until closeAt, and also later if alone: no other API server is up.
func (h *health) keeps(now time.Time, alone bool) bool {
	return h.State == Down && h.answering && (alone || now.Before(h.closeAt))
}

// probeSoon reports whether the next probe should be sent soon, because the
// last one contradicts the state.
func (h *health) probeSoon() bool {
	return h.bad > 0 && h.State != Down && h.State != Alien || h.good > 0 && h.State != Up
}

// enter sets State and reports whether it changed.
func (h *health) enter(s State, now time.Time) bool {
	if h.State == s {
		return false
	}
	h.State, h.Since = s, now
	h.good, h.bad = 0, 0
	h.answering = h.answering && s == Down
	return true
}
