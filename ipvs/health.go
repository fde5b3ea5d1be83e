package ipvs

import (
	"fmt"
	"time"
)

// outcome is what became of one probe.
type outcome int

// Outcomes. The first group means alive.
const (
	outcomeOK       outcome = iota // ready
	outcomeGuarded                 // 401, 403, 429: alive, and not talking to us
	outcomeTCPOnly                 // accepts connections; the CA is not known yet and it does not speak TLS
	outcomeSkewedOK                // ready; its certificate does not fit this node's clock, which is the suspect
	leastBad
	outcomeDraining    // says that it is shutting down
	outcomeServerError // 5xx, or a status that was not expected
	outcomeRefused
	outcomeClosed  // the held connection broke
	outcomeTimeout // no answer
	outcomeLate    // no answer in time; but it accepts connections
	outcomeExpired // certificate expired by the API server's own clock too
	outcomeUnreachable
	outcomeUnshown  // does not show which cluster it is of
	outcomeIdentity // certificate of another authority, or not a kube-apiserver's
	outcomeReborn   // of another cluster, which has the same CA
)

func (c outcome) String() string {
	switch c {
	case outcomeOK:
		return "ready"
	case outcomeGuarded:
		return "alive (status 401, 403 or 429)"
	case outcomeTCPOnly:
		return "accepts connections"
	case outcomeSkewedOK:
		return "ready, but this node's clock does not fit its certificate"
	case outcomeDraining:
		return "draining"
	case outcomeServerError:
		return "server error"
	case outcomeRefused:
		return "connection refused"
	case outcomeClosed:
		return "connection broken"
	case outcomeTimeout, outcomeLate:
		return "no answer"
	case outcomeExpired:
		return "certificate expired"
	case outcomeUnreachable:
		return "unreachable"
	case outcomeUnshown:
		return "does not show which cluster it is of"
	case outcomeReborn:
		return "another cluster with the same keys than this node joined: to accept it, give this node a Site with a token of that cluster"
	case outcomeIdentity:
		return "wrong identity: its certificate is not signed by the cluster's CA for a kube-apiserver"
	}
	return fmt.Sprintf("class(%d)", int(c))
}

// Alive reports whether the outcome counts for the API server.
func (c outcome) Alive() bool { return c < leastBad }

// answered reports whether the outcome is an answer over a connection on which
// the API server has proven itself.
func (c outcome) answered() bool {
	return c.Alive() || c == outcomeDraining || c == outcomeServerError || c == outcomeExpired
}

// State is what is believed of an API server.
type State int

// States of an API server.
const (
	Unknown State = iota // no verdict yet
	Up
	Draining // finishes what it has, takes nothing new
	Down
	Alien // another cluster's, or cannot prove that it is one of this cluster's API servers
)

func (s State) String() string {
	return [...]string{"unknown", "up", "draining", "down", "alien"}[s]
}

// An API server that flaps has to prove itself longer: each fall soon after a
// rise doubles the number of good probes that it needs, up to flapMax times.
const (
	flapSoon = 30 * time.Second
	flapMax  = 8
)

// health is what is believed of one API server. The zero value with Rise and Fall
// set is an API server of which nothing is known.
type health struct {
	Rise, Fall int

	State State
	Class outcome   // of the last probe
	Since time.Time // of State
	Falls int       // how often it went down

	good, bad int
	// sound: it was up, and has failed in no other way than being late since.
	sound bool
	flap  int // doublings are 1, 2, 4, 8; 0 counts as 1
}

// observe takes the outcome of one probe and reports whether State changed.
func (h *health) observe(c outcome, now time.Time) bool {
	h.Class = c
	if !c.Alive() && c != outcomeLate {
		h.sound = false
	} else if c.Alive() && h.State == Up {
		h.sound = true
	}
	switch {
	case c == outcomeIdentity || c == outcomeReborn:
		h.good, h.bad = 0, 0
		return h.enter(Alien, now) // no second chance: luck does not decide it
	case c.Alive():
		h.bad = 0
		h.good++
		switch h.State {
		case Up:
			if h.flap > 1 && now.Sub(h.Since) > flapSoon {
				h.flap = 0
			}
		case Unknown: // the first verdict is not a recovery
			return h.enter(Up, now)
		default:
			if h.good >= h.Rise*max(h.flap, 1) {
				return h.enter(Up, now)
			}
		}
		return false
	case c == outcomeDraining:
		h.good, h.bad = 0, 0
		if h.State == Alien {
			return false
		}
		return h.enter(Draining, now)
	}
	h.good = 0
	h.bad++
	if h.State == Down || h.State == Alien || h.bad < h.Fall {
		return false
	}
	if h.State == Up {
		if now.Sub(h.Since) < flapSoon && h.Falls > 0 {
			h.flap = min(max(h.flap, 1)*2, flapMax)
		}
	}
	h.Falls++
	return h.enter(Down, now)
}

// slow reports whether an API server is down only because its answers are late. One
// that was stopped in between would have refused or broken a connection.
func (h *health) slow() bool { return h.State == Down && h.sound }

// doubted reports whether the next probe should come soon: the belief does
// not match what was seen last.
func (h *health) doubted() bool {
	return h.bad > 0 && h.State != Down && h.State != Alien || h.good > 0 && h.State != Up
}

func (h *health) enter(s State, now time.Time) bool {
	if h.State == s {
		return false
	}
	h.State, h.Since = s, now
	h.good, h.bad = 0, 0
	h.sound = h.sound || s == Up
	return true
}
