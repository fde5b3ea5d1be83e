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
	"github.com/edgebake/edgebake/overlays/siteconf"
)

// An Inventory contains the Sites of many machines, with their secrets. Therefore a machine first
// rewrites its own slot with only its own Site. On a stick, all Sites stay.

// A single Site may also name its machine (match). Once that machine has the Site, match is
// removed, so that a network card exchanged later does not invalidate the Site.

// errNoMatch and errNotMeant mean that the Inventory or the Site is for other machines.
var (
	errNoMatch  = errors.New("the inventory has no Site for this machine")
	errNotMeant = errors.New("the Site is for another machine (match)")
)

// isOthers reports whether err is errNoMatch or errNotMeant.
func isOthers(err error) bool { return errors.Is(err, errNoMatch) || errors.Is(err, errNotMeant) }

// slotSite is the Site in a slot for this machine.
type slotSite struct {
	// contents is the slot's contents. An Inventory is replaced by this machine's Site, without its
	// match.
	contents *slot.Contents
	// site is the Site in contents. It is nil if the Site is invalid; Parse then reports the
	// problems.
	site *configs.Site
	// entry is the Site's entry in the slot's Inventory, or nil if there is no Inventory.
	entry *configs.InventorySite
}

// forMachine finds the Site for this machine in a slot. before is an earlier result, or nil.
func forMachine(e *machine.Env, c *slot.Contents, before *Active) (*slotSite, error) {
	doc, ok := c.Files[ondisk.SlotInventory]
	if !ok {
		return ifMeant(e, c, before)
	}
	inv, err := configs.ParsePublicInventory(ondisk.SlotInventory, doc)
	if err != nil {
		return nil, run.NeedsPerson(fmt.Errorf("the inventory has problems: %w", err), "correct the inventory and stamp it again, or bring a stick with a Site")
	}
	entry, err := siteconf.FindSite(inv, e.Facts())
	if err != nil {
		return nil, run.NeedsPerson(err, "correct the inventory so that each machine matches one Site, and stamp it again")
	}
	if entry == nil {
		return nil, errNoMatch
	}
	f, err := withSite(c, &entry.Site)
	if err != nil {
		return nil, err
	}
	if size, limit := int64(len(f.contents.Files[ondisk.SlotSite])), slot.SizeLimit(ondisk.SlotSite); size > limit {
		return nil, run.NeedsPerson(fmt.Errorf("the Site %s of the inventory has %d bytes, which exceeds the limit of %d", entry.Name, size, limit),
			"move large contents from ignition (in the Site's entry or in defaults) to the Image (files, overlays) or to a config.ign for all machines (stamp --ignition), and stamp the inventory again")
	}
	f.entry = entry
	return f, nil
}

// ifMeant is like forMachine, for a slot with a single Site.
func ifMeant(e *machine.Env, c *slot.Contents, before *Active) (*slotSite, error) {
	doc := c.Files[ondisk.SlotSite]
	if before != nil && before.isMadeOf(doc, c.Files[ondisk.SlotIgnition]) {
		return &slotSite{contents: c, site: before.Site}, nil
	}
	site, err := Parse(doc)
	if err != nil || site.Match.IsZero() {
		return &slotSite{contents: c, site: site}, nil
	}
	if !siteconf.Matches(site.Match, e.Facts()) {
		return nil, errNotMeant
	}
	site.Match = configs.Match{}
	return withSite(c, site)
}

// withSite returns contents with this Site instead of a Site or an Inventory.
func withSite(c *slot.Contents, site *configs.Site) (*slotSite, error) {
	doc, err := configs.EncodeSlot(site)
	if err != nil {
		return nil, err
	}
	one := *c
	one.Files = maps.Clone(c.Files)
	delete(one.Files, ondisk.SlotInventory)
	one.Files[ondisk.SlotSite] = doc
	return &slotSite{contents: &one, site: site}, nil
}

// slotRewrite is the new contents of the machine's own slot, which must be rewritten.
type slotRewrite struct {
	dev           string
	present, next *slot.Contents
}

// pendingRewrite returns the rewrite that the machine's own slot needs (see Active.mustRewrite), or
// nil. It reports no error for a slot that is unreadable or has no Site for this machine: such a
// slot is not rewritten, and Read reports the error.
func pendingRewrite(e *machine.Env) *slotRewrite {
	dev, err := machine.OwnSlot(e)
	if err != nil {
		return nil
	}
	c, err := e.ReadSlot(dev)
	if err != nil {
		return nil
	}
	f, err := forMachine(e, c, nil)
	if err != nil || f.contents == c && !c.Unfinished {
		return nil
	}
	return &slotRewrite{dev: dev, present: c, next: f.contents}
}

// rewriteSlot carries out the pending rewrite of the machine's own slot, if there is one. Afterwards
// the slot has only this machine's Site, without match.
func rewriteSlot(e *machine.Env) error {
	r := pendingRewrite(e)
	if r == nil {
		return nil
	}
	r.next.Signature = nil // it belongs to the former contents
	if err := e.WriteSlot(r.dev, r.next); err != nil {
		return fmt.Errorf("writing this machine's Site to the slot %s: %w", r.dev, err)
	}
	if _, many := r.present.Files[ondisk.SlotInventory]; many {
		e.Log.Info("using this machine's Site from the inventory; the other machines' Sites are wiped from the slot", "slot", r.dev)
		e.Console("using this machine's Site from the inventory; the other machines' Sites are wiped from the slot")
	}
	return nil
}
