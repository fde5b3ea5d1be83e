package site

import (
	"errors"
	"fmt"
	"maps"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/overlays/node"
)

// An inventory holds the sites of many machines, and their secrets. On the
// machine's own disk only its own stays: the slot is written again with it alone
// before anything else uses it. A stick serves several machines and keeps
// all.

// A Site alone may say which machine it is for, too. Once that machine has it, it says so
// no more: a card that is exchanged later does not take the Site away.

// errNoMatch: the Site or the inventory is for other machines.
var (
	errNoMatch  = errors.New("its inventory has no Site for this machine")
	errNotMeant = errors.New("its Site is for another machine (match)")
)

// isOthers reports whether an error says that a Site or an inventory is for other machines.
func isOthers(err error) bool { return errors.Is(err, errNoMatch) || errors.Is(err, errNotMeant) }

// found is the Site that a slot holds for this machine.
type found struct {
	// contents are the slot's, with this machine's Site alone: without its match, and in
	// place of an inventory.
	contents *slot.Contents
	// site is the Site in contents; nil: it has problems, which Parse returns.
	site *configs.Site
	// entry is the Site in the slot's inventory; nil: the slot has none.
	entry *configs.InventorySite
}

// forMachine finds what a slot holds for this machine. before, which may be nil, is the
// Site that it held earlier.
func forMachine(e *machine.Env, c *slot.Contents, before *Active) (*found, error) {
	doc, ok := c.Files[ondisk.SlotInventory]
	if !ok {
		return ifMeant(e, c, before)
	}
	inv, err := configs.ParsePublicInventory(ondisk.SlotInventory, doc)
	if err != nil {
		return nil, run.NeedsPerson(fmt.Errorf("the inventory has problems: %w", err), "correct the inventory and stamp it again, or bring a stick with a Site")
	}
	entry, err := node.FindSite(inv, e.Facts())
	if err != nil {
		return nil, run.NeedsPerson(err, "let each machine match one Site of the inventory, and stamp it again")
	}
	if entry == nil {
		return nil, errNoMatch
	}
	f, err := withSite(c, &entry.Site)
	if err != nil {
		return nil, err
	}
	if size, limit := int64(len(f.contents.Files[ondisk.SlotSite])), slot.SizeLimit(ondisk.SlotSite); size > limit {
		return nil, run.NeedsPerson(fmt.Errorf("the Site %s of the inventory has %d bytes, a slot has room for a Site of %d", entry.Name, size, limit),
			"take large contents out of its ignition, or out of the one in defaults, and put them into the Image (files, overlays) or into a config.ign for all (stamp --ignition); stamp the inventory again")
	}
	f.entry = entry
	return f, nil
}

// ifMeant is forMachine for contents with a Site alone.
func ifMeant(e *machine.Env, c *slot.Contents, before *Active) (*found, error) {
	doc := c.Files[ondisk.SlotSite]
	if before != nil && before.isMadeOf(doc, c.Files[ondisk.SlotIgnition]) {
		return &found{contents: c, site: before.Site}, nil
	}
	site, err := Parse(doc)
	if err != nil || site.Match.IsZero() {
		return &found{contents: c, site: site}, nil
	}
	if !node.Matches(site.Match, e.Facts()) {
		return nil, errNotMeant
	}
	site.Match = configs.Match{}
	return withSite(c, site)
}

// withSite returns contents with this Site in place of what is there.
func withSite(c *slot.Contents, site *configs.Site) (*found, error) {
	doc, err := configs.EncodeSlot(site)
	if err != nil {
		return nil, err
	}
	one := *c
	one.Files = maps.Clone(c.Files)
	delete(one.Files, ondisk.SlotInventory)
	one.Files[ondisk.SlotSite] = doc
	return &found{contents: &one, site: site}, nil
}

// readUnwritten reads the machine's own slot where it still has to be written:
// it holds an inventory with a site for this machine, or the power went while it
// was written. one is what it is to hold; nil where nothing has to be done.
func readUnwritten(e *machine.Env) (dev string, c, one *slot.Contents) {
	dev, err := machine.OwnSlot(e)
	if err != nil {
		return "", nil, nil
	}
	if c, err = e.ReadSlot(dev); err != nil {
		return "", nil, nil
	}
	f, err := forMachine(e, c, nil)
	if err != nil || f.contents == c && !c.Unfinished {
		return "", nil, nil
	}
	return dev, c, f.contents
}

func unwritten(e *machine.Env) bool {
	_, _, one := readUnwritten(e)
	return one != nil
}

// takeFromInventory takes this machine's site of the inventory in its own slot,
// and wipes the others'.
func takeFromInventory(e *machine.Env) error {
	dev, c, one := readUnwritten(e)
	if one == nil {
		return nil
	}
	one.Signature = nil // of what was there
	if err := e.WriteSlot(dev, one); err != nil {
		return fmt.Errorf("taking this machine's Site of the inventory in the slot %s: %w", dev, err)
	}
	if _, many := c.Files[ondisk.SlotInventory]; many {
		e.Log.Info("took this machine's Site of the inventory; the others are wiped from the slot", "slot", dev)
		e.Console("took this machine's Site of the inventory; the others are wiped from the slot")
	}
	return nil
}
