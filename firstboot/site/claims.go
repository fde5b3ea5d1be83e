package site

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// Two machines may match one Site of an Inventory, and would then be the same node. So the first
// one claims the Site on the stick. If there is no claim, join.NameIsFree stops the second one,
// because the first one's Node exists.

// claimedBy returns another machine's claim to the stick's Site, or nil. It ignores claims of
// machines that the Site does not match any more.
func (s *stick) claimedBy(e *machine.Env) *slot.Claim {
	if s.entry == nil {
		return nil
	}
	claims, err := e.ReadClaims(s.dev)
	if err != nil {
		e.Note("reading %s on stick %s: %s", ondisk.SlotClaims, s.dev, machine.OneLine(err))
		return nil
	}
	me := e.Facts()
	for _, c := range claims {
		// A machine that the Inventory does not match any more was replaced.
		other := siteconf.Machine{MACs: c.MACs, Serial: c.Serial, UUID: c.UUID, AssetTag: c.AssetTag}
		if c.Site == s.entry.Name && siteconf.Matches(s.entry.Match, other) && !sameMachine(other, me) {
			return &c
		}
	}
	return nil
}

// sameMachine reports whether a and b may be one machine: no UUID or serial number differs, and they
// share a network card if both have any. Vendors reuse numbers, so numbers alone prove nothing.
func sameMachine(a, b siteconf.Machine) bool {
	for _, own := range [][2]string{{a.UUID, b.UUID}, {a.Serial, b.Serial}} {
		x, y := forms.Identity(own[0]), forms.Identity(own[1])
		if x != "" && y != "" && !strings.EqualFold(x, y) {
			return false
		}
	}
	return len(a.MACs) == 0 || len(b.MACs) == 0 || slices.ContainsFunc(a.MACs, func(mac string) bool {
		return slices.ContainsFunc(b.MACs, func(other string) bool { return forms.CardMAC(mac) == forms.CardMAC(other) })
	})
}

// claim records on the stick that this machine uses the stick's Site. If the stick cannot be
// written, the Site is used anyway.
func (s *stick) claim(e *machine.Env) {
	if s.entry == nil {
		return
	}
	m := e.Facts()
	err := e.WriteClaim(s.dev, slot.Claim{Site: s.entry.Name, MACs: m.MACs, Serial: m.Serial, UUID: m.UUID, AssetTag: m.AssetTag})
	if err != nil && !errors.Is(err, slot.ErrNoClaims) {
		e.Note("recording on stick %s that this machine uses the Site %s: %s", s.dev, s.entry.Name, machine.OneLine(err))
	}
}

// errClaimed returns the error for two machines that match one Site.
func errClaimed(s *stick, by *slot.Claim, me siteconf.Machine) error {
	return fmt.Errorf("another machine already uses its Site %s (%s), which this machine matches too (%s): give each machine its own Site in the inventory, with a match that only it has; if the other machine is gone, delete %s from the stick",
		s.entry.Name, siteconf.Machine{MACs: by.MACs, Serial: by.Serial, UUID: by.UUID, AssetTag: by.AssetTag}, me, ondisk.SlotClaims)
}
