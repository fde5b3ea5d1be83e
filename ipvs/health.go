package ipvs

import (
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
)

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
	Class probe.Outcome // of the last probe
	Since time.Time     // of State
	Falls int           // how often it went down

	good, bad int
	// lateOnly: it was up, and has failed in no other way than being late since.
	lateOnly bool
	flap     int // doublings are 1, 2, 4, 8; 0 counts as 1
}

// observe takes the outcome of one probe and reports whether State changed.
func (h *health) observe(c probe.Outcome, now time.Time) bool {
	h.Class = c
	if !c.Alive() && c != probe.Late {
		h.lateOnly = false
	} else if c.Alive() && h.State == Up {
		h.lateOnly = true
	}
	switch {
	case c == probe.Identity || c == probe.Reborn:
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
	case c == probe.Draining:
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
func (h *health) slow() bool { return h.State == Down && h.lateOnly }

// probeSoon reports whether the next probe should come soon: the belief does
// not match what was seen last.
func (h *health) probeSoon() bool {
	return h.bad > 0 && h.State != Down && h.State != Alien || h.good > 0 && h.State != Up
}

func (h *health) enter(s State, now time.Time) bool {
	if h.State == s {
		return false
	}
	h.State, h.Since = s, now
	h.good, h.bad = 0, 0
	h.lateOnly = h.lateOnly || s == Up
	return true
}
