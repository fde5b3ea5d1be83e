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
	"github.com/edgebake/edgebake/overlays/node"
)

// Two machines may match one site of an inventory: a card that is carried from
// one to the other, a vendor that gives all boards one serial number. Both would
// be the same node. The first notes on the stick which site it has taken, before
// it uses it; the second reads that and stops. Where a stick has no room for
// notes, or cannot be written, the cluster's Node of that name is what stops the
// second (nameIsFree).

// claimedBy returns who else has taken the stick's site; nil: nobody that still
// matches it.
func (s *stick) claimedBy(e *machine.Env) *slot.Claim {
	if s.entry == nil {
		return nil
	}
	claims, err := e.ReadClaims(s.dev)
	if err != nil {
		e.Note("who has taken sites of stick %s cannot be read: %s", s.dev, machine.OneLine(err))
		return nil
	}
	me := e.Facts()
	for _, c := range claims {
		// One that the inventory does not mean any more was replaced.
		other := node.Machine{MACs: c.MACs, Serial: c.Serial, UUID: c.UUID, AssetTag: c.AssetTag}
		if c.Site == s.entry.Name && node.Matches(s.entry.Match, other) && !sameMachine(other, me) {
			return &c
		}
	}
	return nil
}

// sameMachine reports whether nothing shows that two machines are two. UUIDs
// tell them apart, serial numbers too, which are all that boards with a device
// tree have, and so do cards where they have none in common: vendors that give
// many boards one serial number give them one UUID too.
func sameMachine(a, b node.Machine) bool {
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

// claim notes that this machine has taken the stick's site. A stick that cannot
// be written serves all the same.
func (s *stick) claim(e *machine.Env) {
	if s.entry == nil {
		return
	}
	m := e.Facts()
	err := e.WriteClaim(s.dev, slot.Claim{Site: s.entry.Name, MACs: m.MACs, Serial: m.Serial, UUID: m.UUID, AssetTag: m.AssetTag})
	if err != nil && !errors.Is(err, slot.ErrNoClaims) {
		e.Note("stick %s does not note that this machine has taken the Site %s: %s", s.dev, s.entry.Name, machine.OneLine(err))
	}
}

// errClaimed says that two machines are one site's.
func errClaimed(s *stick, by *slot.Claim, me node.Machine) error {
	return fmt.Errorf("another machine has taken its Site %s (%s), and this one matches it too (%s): give each a Site of its own in the inventory, by what only that machine has; if the other one is gone, delete %s from the stick",
		s.entry.Name, node.Machine{MACs: by.MACs, Serial: by.Serial, UUID: by.UUID, AssetTag: by.AssetTag}, me, ondisk.SlotClaims)
}
