package ipvs

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/edgebake/edgebake/ipvs/kernel"
	"github.com/edgebake/edgebake/test/kerneltest"
)

var testVIP = netip.MustParseAddrPort("10.103.97.2:6443")

func addrAt(i byte) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, i}), 6443)
}

// decode makes a service from fuzz bytes, two for each real server.
func decode(b []byte) *kernel.Service {
	if len(b) == 0 {
		return nil
	}
	s := &kernel.Service{VIP: testVIP, Scheduler: Schedulers()[int(b[0])%6], Flags: uint32(b[0]>>7) * 4}
	for b = b[1:]; len(b) >= 2; b = b[2:] {
		a := addrAt(b[0] % 8)
		if indexDest(s.Dests, a) >= 0 {
			continue
		}
		s.Dests = append(s.Dests, kernel.Dest{Addr: a, Weight: int(b[1] % 3), Forward: kernel.Forward(b[1] >> 6)})
	}
	return s
}

func serving(s *kernel.Service) int {
	n := 0
	if s != nil {
		for _, d := range s.Dests {
			if d.Weight > 0 {
				n++
			}
		}
	}
	return n
}

func equalService(a, b *kernel.Service) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.VIP == b.VIP && a.Scheduler == b.Scheduler && a.Flags == b.Flags && slices.Equal(byAddress(a.Dests), byAddress(b.Dests))
}

func FuzzDiff(f *testing.F) {
	f.Add([]byte{}, []byte{0})
	f.Add([]byte{0, 1, 1, 2, 1}, []byte{0, 1, 1, 3, 1})
	f.Add([]byte{0, 1, 1}, []byte{0, 2, 1})
	f.Add([]byte{0, 1, 1, 2, 0}, []byte{1, 1, 0, 2, 1})
	f.Add([]byte{0, 1, 1}, []byte{})
	f.Fuzz(func(t *testing.T, w, h []byte) {
		want, have := decode(w), decode(h)
		both := serving(want) > 0 && serving(have) > 0
		severed := map[netip.AddrPort]bool{}
		for _, op := range kernel.Diff(want, have) {
			if op.Service.VIP != testVIP {
				t.Fatalf("%s is for another virtual server", op)
			}
			switch op.Kind {
			case kernel.Sever:
				severed[op.Dest.Addr] = true
				if want != nil && indexDest(want.Dests, op.Dest.Addr) >= 0 {
					t.Fatalf("%s removes a real server that is wanted", op)
				}
			case kernel.DelDest:
				if !severed[op.Dest.Addr] {
					t.Fatalf("%s before its connections were severed", op)
				}
			}
			var err error
			if have, err = kerneltest.Step(have, op); err != nil {
				t.Fatal(err)
			}
			if both && serving(have) == 0 {
				t.Fatalf("no API server serves after %s", op)
			}
		}
		if !equalService(have, want) {
			t.Fatalf("got %v, want %v", have, want)
		}
		if again := kernel.Diff(want, have); len(again) != 0 {
			t.Fatalf("a second run finds %v", again)
		}
	})
}

func TestChoose(t *testing.T) {
	a, b, c := addrAt(1), addrAt(2), addrAt(3)
	w := func(a netip.AddrPort, n int) kernel.Dest {
		return kernel.Dest{Addr: a, Weight: n, Forward: kernel.Masq}
	}
	for _, tt := range []struct {
		name    string
		masters []candidate
		last    []kernel.Dest
		want    []kernel.Dest
	}{
		{"all up", []candidate{{Addr: a, State: Up}, {Addr: b, State: Up}}, nil, []kernel.Dest{w(a, 1), w(b, 1)}},
		{"one down", []candidate{{Addr: a, State: Up}, {Addr: b, State: Down}}, []kernel.Dest{w(a, 1), w(b, 1)}, []kernel.Dest{w(a, 1)}},
		{"one is not ready", []candidate{{Addr: a, State: Up}, {Addr: b, State: Down, Kept: true}}, []kernel.Dest{w(a, 1), w(b, 1)}, []kernel.Dest{w(a, 1), w(b, 0)}},
		{"all are not ready", []candidate{{Addr: a, State: Down, Kept: true}, {Addr: b, State: Down, Kept: true}}, []kernel.Dest{w(b, 1)}, []kernel.Dest{w(a, 1), w(b, 1)}},
		{"one draining", []candidate{{Addr: a, State: Up}, {Addr: b, State: Draining}}, []kernel.Dest{w(a, 1), w(b, 1)}, []kernel.Dest{w(a, 1), w(b, 0)}},
		{"only draining left", []candidate{{Addr: a, State: Down}, {Addr: b, State: Draining}}, []kernel.Dest{w(b, 1)}, []kernel.Dest{w(b, 1)}},
		{"all down: the last set stays", []candidate{{Addr: a, State: Down}, {Addr: b, State: Down}}, []kernel.Dest{w(b, 1)}, []kernel.Dest{w(b, 1)}},
		{"all down but one alien", []candidate{{Addr: a, State: Alien}, {Addr: b, State: Down}}, []kernel.Dest{w(a, 1), w(b, 1)}, []kernel.Dest{w(b, 1)}},
		{"an alien is nobody's last resort", []candidate{{Addr: a, State: Alien}}, []kernel.Dest{w(a, 1)}, nil},
		{"first start: nobody before its verdict", []candidate{{Addr: a, State: Unknown}, {Addr: b, State: Up}}, nil, []kernel.Dest{w(b, 1)}},
		{"restart: all keep their places", []candidate{{Addr: a, State: Unknown}, {Addr: b, State: Unknown}}, []kernel.Dest{w(a, 1), w(b, 1)}, []kernel.Dest{w(a, 1), w(b, 1)}},
		{"restart while one drains", []candidate{{Addr: a, State: Unknown}, {Addr: b, State: Unknown}}, []kernel.Dest{w(a, 1), w(b, 0)}, []kernel.Dest{w(a, 1), w(b, 0)}},
		{"restart while one drains: it is up", []candidate{{Addr: a, State: Unknown}, {Addr: b, State: Up}}, []kernel.Dest{w(a, 1), w(b, 0)}, []kernel.Dest{w(a, 1), w(b, 1)}},
		{"restart while one drains, and the other dies", []candidate{{Addr: a, State: Down}, {Addr: b, State: Unknown}}, []kernel.Dest{w(a, 1), w(b, 0)}, []kernel.Dest{w(a, 1), w(b, 0)}},
		{"restart while one drains, and both die", []candidate{{Addr: a, State: Down}, {Addr: b, State: Down}}, []kernel.Dest{w(a, 1), w(b, 0)}, []kernel.Dest{w(a, 1)}},
		{"restart: unlisted ones go", []candidate{{Addr: a, State: Unknown}}, []kernel.Dest{w(a, 1), w(c, 1)}, []kernel.Dest{w(a, 1)}},
		{"new list, nobody proven: the old ones serve on", []candidate{{Addr: a, State: Unknown}}, []kernel.Dest{w(b, 1), w(c, 1)}, []kernel.Dest{w(b, 1), w(c, 1)}},
		{"new list, one proven: the old ones go", []candidate{{Addr: a, State: Up}}, []kernel.Dest{w(b, 1), w(c, 1)}, []kernel.Dest{w(a, 1)}},
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
	w := func(a netip.AddrPort, n int) kernel.Dest {
		return kernel.Dest{Addr: a, Weight: n, Forward: kernel.Masq}
	}
	for _, tt := range []struct {
		name    string
		masters []candidate
		last    []kernel.Dest
		want    []kernel.Dest
	}{
		{"nobody answers", []candidate{{Addr: a, State: Down, Lost: true}, {Addr: b, State: Down, Lost: true}}, []kernel.Dest{w(a, 1), w(b, 1)}, []kernel.Dest{w(a, 0), w(b, 0)}},
		{"and still nobody", []candidate{{Addr: a, State: Down, Lost: true}}, []kernel.Dest{w(a, 0)}, []kernel.Dest{w(a, 0)}},
		{"one answers badly", []candidate{{Addr: a, State: Down}, {Addr: b, State: Down, Lost: true}}, []kernel.Dest{w(a, 0), w(b, 0)}, []kernel.Dest{w(a, 1), w(b, 0)}},
		{"one is back", []candidate{{Addr: a, State: Up}, {Addr: b, State: Down, Lost: true}}, []kernel.Dest{w(a, 0), w(b, 0)}, []kernel.Dest{w(a, 1)}},
		{"one is another cluster's", []candidate{{Addr: a, State: Alien}, {Addr: b, State: Down, Lost: true}}, []kernel.Dest{w(a, 0), w(b, 0)}, []kernel.Dest{w(b, 0)}},
		{"listed anew, nothing known: it keeps its place", []candidate{{Addr: a, State: Unknown}}, []kernel.Dest{w(a, 0)}, []kernel.Dest{w(a, 0)}},
		{"a restart costs nothing", []candidate{{Addr: a, State: Unknown}}, []kernel.Dest{w(a, 1)}, []kernel.Dest{w(a, 1)}},
		{"no longer listed, and nobody is proven", []candidate{{Addr: a, State: Unknown}}, []kernel.Dest{w(b, 1)}, []kernel.Dest{w(b, 0)}},
		{"a restart while nobody answers", []candidate{{Addr: a, State: Unknown}, {Addr: b, State: Unknown}}, []kernel.Dest{w(a, 0), w(b, 0)}, []kernel.Dest{w(a, 0), w(b, 0)}},
		{"all drain", []candidate{{Addr: a, State: Draining}, {Addr: b, State: Down, Lost: true}}, []kernel.Dest{w(a, 0), w(b, 0)}, []kernel.Dest{w(a, 1)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := choose(tt.masters, tt.last, true); !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func byAddress(dests []kernel.Dest) []kernel.Dest {
	return slices.SortedStableFunc(slices.Values(dests), func(a, b kernel.Dest) int { return a.Addr.Compare(b.Addr) })
}
