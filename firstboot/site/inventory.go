package site

import (
	"bytes"
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

// forMachine is what a slot holds for this machine: the contents as they are, its Site
// without the match that fits the machine, or in place of an inventory the one site that
// matches, which is returned too.
func forMachine(e *machine.Env, c *slot.Contents) (*slot.Contents, *configs.InventorySite, error) {
	doc, ok := c.Files[ondisk.SlotInventory]
	if !ok {
		c, err := ifMeant(e, c)
		return c, nil, err
	}
	inv, err := configs.ParsePublicInventory(ondisk.SlotInventory, doc)
	if err != nil {
		return nil, nil, run.NeedsPerson(fmt.Errorf("the inventory has problems: %w", err), "correct the inventory and stamp it again, or bring a stick with a Site")
	}
	machine := e.Facts()
	site, err := node.FindSite(inv, machine)
	if err != nil {
		return nil, nil, run.NeedsPerson(err, "let each machine match one Site of the inventory, and stamp it again")
	}
	if site == nil {
		return nil, nil, errNoMatch
	}
	own, err := configs.EncodeSlot(&site.Site)
	if err != nil {
		return nil, nil, err
	}
	if limit := slot.SizeLimit(ondisk.SlotSite); int64(len(own)) > limit {
		return nil, nil, run.NeedsPerson(fmt.Errorf("the Site %s of the inventory has %d bytes, a slot has room for a Site of %d", site.Name, len(own), limit),
			"take large contents out of its ignition, or out of the one in defaults, and put them into the Image (files, overlays) or into a config.ign for all (stamp --ignition); stamp the inventory again")
	}
	one := *c
	one.Files = maps.Clone(c.Files)
	delete(one.Files, ondisk.SlotInventory)
	one.Files[ondisk.SlotSite] = own
	return &one, site, nil
}

// ifMeant is forMachine of contents with a Site alone.
func ifMeant(e *machine.Env, c *slot.Contents) (*slot.Contents, error) {
	doc := c.Files[ondisk.SlotSite]
	if !bytes.Contains(doc, []byte("match")) {
		return c, nil // as most; where YAML spells it otherwise, resolveSite sees it
	}
	site, err := configs.ParsePublicSite(ondisk.SlotSite, doc)
	if err != nil || site.Match.IsZero() {
		return c, nil // whoever resolves the site says what is wrong with it
	}
	if !node.Matches(site.Match, e.Facts()) {
		return nil, errNotMeant
	}
	site.Match = configs.Match{}
	own, err := configs.EncodeSlot(site)
	if err != nil {
		return nil, err
	}
	one := *c
	one.Files = maps.Clone(c.Files)
	one.Files[ondisk.SlotSite] = own
	return &one, nil
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
	if one, _, err = forMachine(e, c); err != nil || one == c && !c.Unfinished {
		return "", nil, nil
	}
	return dev, c, one
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
