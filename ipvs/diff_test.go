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

func byAddress(dests []kernel.Dest) []kernel.Dest {
	return slices.SortedStableFunc(slices.Values(dests), func(a, b kernel.Dest) int { return a.Addr.Compare(b.Addr) })
}
