package ipvs

import (
	"fmt"
	"testing"
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
)

// TestHealth checks the states that follow from the outcomes.
func TestHealth(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   []probe.Outcome
		want State
	}{
		{"nothing", nil, Unknown},
		{"the first good one is enough", []probe.Outcome{probe.OK}, Up},
		{"one bad one is not", []probe.Outcome{probe.OK, probe.Timeout}, Up},
		{"two in a row are", []probe.Outcome{probe.OK, probe.Timeout, probe.Refused}, Down},
		{"two apart are not", []probe.Outcome{probe.OK, probe.Timeout, probe.OK, probe.Timeout}, Up},
		{"one good one does not heal", []probe.Outcome{probe.OK, probe.Timeout, probe.Timeout, probe.OK}, Down},
		{"two do", []probe.Outcome{probe.OK, probe.Timeout, probe.Timeout, probe.OK, probe.OK}, Up},
		{"alive is good", []probe.Outcome{probe.OK, probe.Timeout, probe.Timeout, probe.Guarded, probe.SkewedOK}, Up},
		{"an alien is one at once", []probe.Outcome{probe.OK, probe.Identity}, Alien},
		{"and remains one when it fails", []probe.Outcome{probe.OK, probe.Identity, probe.Refused, probe.Refused}, Alien},
		{"and when it drains", []probe.Outcome{probe.OK, probe.Identity, probe.Draining}, Alien},
		{"until it proves itself", []probe.Outcome{probe.OK, probe.Identity, probe.OK, probe.OK}, Up},
		{"draining counts at once", []probe.Outcome{probe.OK, probe.Draining}, Draining},
		{"then it stops", []probe.Outcome{probe.OK, probe.Draining, probe.Refused, probe.Refused}, Down},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := health{Rise: 2, Fall: 2}
			for _, c := range tt.in {
				h.observe(c, time.Unix(0, 0))
			}
			if h.State != tt.want {
				t.Errorf("got %s, want %s", h.State, tt.want)
			}
		})
	}
	t.Run("flapping takes longer each time", func(t *testing.T) {
		h := health{Rise: 2, Fall: 1}
		now := time.Unix(0, 0)
		var needed []int
		h.observe(probe.OK, now)
		for range 5 {
			now = now.Add(time.Second)
			h.observe(probe.Refused, now)
			n := 0
			for h.State != Up {
				n++
				h.observe(probe.OK, now)
			}
			needed = append(needed, n)
		}
		if got, want := fmt.Sprint(needed), "[2 4 8 16 16]"; got != want {
			t.Errorf("good probes needed: %s, want %s", got, want)
		}
		h.observe(probe.OK, now.Add(time.Hour)) // after a quiet hour the flaps are forgotten
		h.observe(probe.Refused, now.Add(time.Hour))
		h.observe(probe.OK, now.Add(time.Hour))
		if h.observe(probe.OK, now.Add(time.Hour)); h.State != Up {
			t.Error("the failure is not forgotten")
		}
	})
}

// TestSlowHealth checks which API servers that are down are only slow.
func TestSlowHealth(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   []probe.Outcome
		want bool
	}{
		{"late", []probe.Outcome{probe.OK, probe.Late, probe.Late}, true},
		{"still late", []probe.Outcome{probe.OK, probe.Late, probe.Late, probe.OK, probe.Late}, true},
		{"a connection broke while it was up", []probe.Outcome{probe.OK, probe.Closed, probe.OK, probe.Late, probe.Late}, true},
		{"never up", []probe.Outcome{probe.Late, probe.Late}, false},
		{"nothing answers, not even its kernel", []probe.Outcome{probe.OK, probe.Timeout, probe.Timeout}, false},
		{"it refused", []probe.Outcome{probe.OK, probe.Late, probe.Late, probe.Refused, probe.Late}, false},
		{"it broke the connection", []probe.Outcome{probe.OK, probe.Late, probe.Late, probe.Closed, probe.Late}, false},
		{"it refused, and is up again", []probe.Outcome{probe.OK, probe.Refused, probe.Refused, probe.OK, probe.OK, probe.Late, probe.Late}, true},
		{"another's", []probe.Outcome{probe.OK, probe.Late, probe.Late, probe.Identity}, false},
		{"another's, and late", []probe.Outcome{probe.OK, probe.Recreated, probe.Late, probe.Late}, false},
		{"up", []probe.Outcome{probe.OK, probe.Late}, false},
	} {
		h := health{Rise: 2, Fall: 2}
		for _, c := range tt.in {
			h.observe(c, time.Unix(0, 0))
		}
		if got := h.slow(); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}
