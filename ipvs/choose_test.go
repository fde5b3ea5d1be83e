package ipvs

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/edgebake/edgebake/ipvs/kernel"
)

// weighted returns a real server with this weight.
func weighted(a netip.AddrPort, n int) kernel.Dest {
	return kernel.Dest{Addr: a, Weight: n, Forward: kernel.Masq}
}

func TestChoose(t *testing.T) {
	a, b, c := addrAt(1), addrAt(2), addrAt(3)
	for _, tt := range []struct {
		name    string
		masters []candidate
		last    []kernel.Dest
		want    []kernel.Dest
	}{
		{"all up", []candidate{{Addr: a, State: Up}, {Addr: b, State: Up}}, nil, []kernel.Dest{weighted(a, 1), weighted(b, 1)}},
		{"one down", []candidate{{Addr: a, State: Up}, {Addr: b, State: Down}}, []kernel.Dest{weighted(a, 1), weighted(b, 1)}, []kernel.Dest{weighted(a, 1)}},
		{"one is not ready", []candidate{{Addr: a, State: Up}, {Addr: b, State: Down, Kept: true}}, []kernel.Dest{weighted(a, 1), weighted(b, 1)}, []kernel.Dest{weighted(a, 1), weighted(b, 0)}},
		{"all are not ready", []candidate{{Addr: a, State: Down, Kept: true}, {Addr: b, State: Down, Kept: true}}, []kernel.Dest{weighted(b, 1)}, []kernel.Dest{weighted(a, 1), weighted(b, 1)}},
		{"one draining", []candidate{{Addr: a, State: Up}, {Addr: b, State: Draining}}, []kernel.Dest{weighted(a, 1), weighted(b, 1)}, []kernel.Dest{weighted(a, 1), weighted(b, 0)}},
		{"only draining left", []candidate{{Addr: a, State: Down}, {Addr: b, State: Draining}}, []kernel.Dest{weighted(b, 1)}, []kernel.Dest{weighted(b, 1)}},
		{"all down: the last set stays", []candidate{{Addr: a, State: Down}, {Addr: b, State: Down}}, []kernel.Dest{weighted(b, 1)}, []kernel.Dest{weighted(b, 1)}},
		{"all down but one alien", []candidate{{Addr: a, State: Alien}, {Addr: b, State: Down}}, []kernel.Dest{weighted(a, 1), weighted(b, 1)}, []kernel.Dest{weighted(b, 1)}},
		{"an alien is nobody's last resort", []candidate{{Addr: a, State: Alien}}, []kernel.Dest{weighted(a, 1)}, nil},
		{"first start: nobody before its verdict", []candidate{{Addr: a, State: Unknown}, {Addr: b, State: Up}}, nil, []kernel.Dest{weighted(b, 1)}},
		{"restart: all keep their places", []candidate{{Addr: a, State: Unknown}, {Addr: b, State: Unknown}}, []kernel.Dest{weighted(a, 1), weighted(b, 1)}, []kernel.Dest{weighted(a, 1), weighted(b, 1)}},
		{"restart while one drains", []candidate{{Addr: a, State: Unknown}, {Addr: b, State: Unknown}}, []kernel.Dest{weighted(a, 1), weighted(b, 0)}, []kernel.Dest{weighted(a, 1), weighted(b, 0)}},
		{"restart while one drains: it is up", []candidate{{Addr: a, State: Unknown}, {Addr: b, State: Up}}, []kernel.Dest{weighted(a, 1), weighted(b, 0)}, []kernel.Dest{weighted(a, 1), weighted(b, 1)}},
		{"restart while one drains, and the other dies", []candidate{{Addr: a, State: Down}, {Addr: b, State: Unknown}}, []kernel.Dest{weighted(a, 1), weighted(b, 0)}, []kernel.Dest{weighted(a, 1), weighted(b, 0)}},
		{"restart while one drains, and both die", []candidate{{Addr: a, State: Down}, {Addr: b, State: Down}}, []kernel.Dest{weighted(a, 1), weighted(b, 0)}, []kernel.Dest{weighted(a, 1)}},
		{"restart: unlisted ones go", []candidate{{Addr: a, State: Unknown}}, []kernel.Dest{weighted(a, 1), weighted(c, 1)}, []kernel.Dest{weighted(a, 1)}},
		{"new list, nobody proven: the old ones serve on", []candidate{{Addr: a, State: Unknown}}, []kernel.Dest{weighted(b, 1), weighted(c, 1)}, []kernel.Dest{weighted(b, 1), weighted(c, 1)}},
		{"new list, one proven: the old ones go", []candidate{{Addr: a, State: Up}}, []kernel.Dest{weighted(b, 1), weighted(c, 1)}, []kernel.Dest{weighted(a, 1)}},
		{"nothing known at all", nil, nil, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := choose(tt.masters, tt.last, false); !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

// TestChooseGuarded checks a guarded group: an API server that does not answer keeps its
// connections and gets no new ones.
func TestChooseGuarded(t *testing.T) {
	a, b := addrAt(1), addrAt(2)
	for _, tt := range []struct {
		name    string
		masters []candidate
		last    []kernel.Dest
		want    []kernel.Dest
	}{
		{"nobody answers", []candidate{{Addr: a, State: Down, Lost: true}, {Addr: b, State: Down, Lost: true}}, []kernel.Dest{weighted(a, 1), weighted(b, 1)}, []kernel.Dest{weighted(a, 0), weighted(b, 0)}},
		{"and still nobody", []candidate{{Addr: a, State: Down, Lost: true}}, []kernel.Dest{weighted(a, 0)}, []kernel.Dest{weighted(a, 0)}},
		{"one answers badly", []candidate{{Addr: a, State: Down}, {Addr: b, State: Down, Lost: true}}, []kernel.Dest{weighted(a, 0), weighted(b, 0)}, []kernel.Dest{weighted(a, 1), weighted(b, 0)}},
		{"one is back", []candidate{{Addr: a, State: Up}, {Addr: b, State: Down, Lost: true}}, []kernel.Dest{weighted(a, 0), weighted(b, 0)}, []kernel.Dest{weighted(a, 1)}},
		{"one is another cluster's", []candidate{{Addr: a, State: Alien}, {Addr: b, State: Down, Lost: true}}, []kernel.Dest{weighted(a, 0), weighted(b, 0)}, []kernel.Dest{weighted(b, 0)}},
		{"listed anew, nothing known: it keeps its place", []candidate{{Addr: a, State: Unknown}}, []kernel.Dest{weighted(a, 0)}, []kernel.Dest{weighted(a, 0)}},
		{"a restart costs nothing", []candidate{{Addr: a, State: Unknown}}, []kernel.Dest{weighted(a, 1)}, []kernel.Dest{weighted(a, 1)}},
		{"no longer listed, and nobody is proven", []candidate{{Addr: a, State: Unknown}}, []kernel.Dest{weighted(b, 1)}, []kernel.Dest{weighted(b, 0)}},
		{"a restart while nobody answers", []candidate{{Addr: a, State: Unknown}, {Addr: b, State: Unknown}}, []kernel.Dest{weighted(a, 0), weighted(b, 0)}, []kernel.Dest{weighted(a, 0), weighted(b, 0)}},
		{"all drain", []candidate{{Addr: a, State: Draining}, {Addr: b, State: Down, Lost: true}}, []kernel.Dest{weighted(a, 0), weighted(b, 0)}, []kernel.Dest{weighted(a, 1)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := choose(tt.masters, tt.last, true); !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

// TestChooseSlow checks that a slow API server serves if there is no better one.
func TestChooseSlow(t *testing.T) {
	a, b, c := addrAt(1), addrAt(2), addrAt(3)
	slow := func(a netip.AddrPort) candidate { return candidate{a, Down, false, true, false} }
	dead := func(a netip.AddrPort) candidate { return candidate{a, Down, true, false, false} }
	for _, tt := range []struct {
		name             string
		masters          []candidate
		last             []kernel.Dest
		want, whenJoined []kernel.Dest
	}{
		{"alone", []candidate{slow(a)}, []kernel.Dest{weighted(a, 1)}, []kernel.Dest{weighted(a, 1)}, []kernel.Dest{weighted(a, 1)}},
		{"a better one serves", []candidate{slow(a), {b, Up, false, false, false}}, []kernel.Dest{weighted(a, 1), weighted(b, 1)}, []kernel.Dest{weighted(b, 1)}, []kernel.Dest{weighted(b, 1)}},
		{"the other refuses", []candidate{slow(a), dead(b)}, []kernel.Dest{weighted(a, 1), weighted(b, 1)}, []kernel.Dest{weighted(a, 1)}, []kernel.Dest{weighted(a, 1), weighted(b, 0)}},
		{"the other is of another cluster", []candidate{slow(a), {b, Alien, false, false, false}}, []kernel.Dest{weighted(b, 1)}, []kernel.Dest{weighted(a, 1)}, []kernel.Dest{weighted(a, 1)}},
		{"it was out, and the last one refuses now", []candidate{slow(a), dead(b)}, []kernel.Dest{weighted(b, 1)}, []kernel.Dest{weighted(a, 1)}, []kernel.Dest{weighted(a, 1), weighted(b, 0)}},
		{"all are slow", []candidate{slow(a), slow(b), slow(c)}, []kernel.Dest{weighted(c, 1)}, []kernel.Dest{weighted(a, 1), weighted(b, 1), weighted(c, 1)}, []kernel.Dest{weighted(a, 1), weighted(b, 1), weighted(c, 1)}},
		{"one drains", []candidate{slow(a), {b, Draining, false, false, false}}, []kernel.Dest{weighted(a, 1), weighted(b, 0)}, []kernel.Dest{weighted(b, 1)}, []kernel.Dest{weighted(b, 1)}},
	} {
		if got := choose(tt.masters, tt.last, false); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
		if got := choose(tt.masters, tt.last, true); !slices.Equal(got, tt.whenJoined) {
			t.Errorf("%s, on a node that has joined: %v, want %v", tt.name, got, tt.whenJoined)
		}
	}
}
