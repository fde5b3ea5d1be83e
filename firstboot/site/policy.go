package site

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// decision is the result of applyPolicy.
type decision struct {
	// Site is the Site to use, or nil if nothing is accepted.
	Site *configs.Site
	// Whole means that the stick's other files are accepted too.
	Whole bool
	// Omitted names the fields that differ but are not accepted.
	Omitted []string
}

// applyPolicy decides which parts of a stick's Site (next) a machine accepts. Anybody may plug in a
// stick. old is the active Site, or nil if that cannot be read. signed means that next is signed
// with a key that the Image names.
//
// A machine outside a cluster has no other source of a Site, so it accepts everything that the
// Image's policy permits. A member accepts from an untrusted stick only the fields with which it
// can return to its cluster, whose CA stays pinned: API servers, network, a token and, on a
// control-plane node, the cluster's keys, which are verified with that CA.
//
// A member accepts no field that lets somebody in (users, keys, Ignition), moves it to another
// cluster (pins, CA), changes the programs on it (arguments, labels, pools, the proxy for images),
// or could set its clock past the end of its certificate (time servers).
func applyPolicy(policy string, joined, signed bool, old, next *configs.Site) decision {
	switch {
	case policy == ondisk.SitesNever:
		return decision{}
	case signed:
		return decision{Site: next, Whole: true}
	case policy == ondisk.SitesSigned:
		return decision{}
	case policy == ondisk.SitesAlways, !joined:
		return decision{Site: next, Whole: true}
	case policy == ondisk.SitesUntilEnrolled, old == nil:
		return decision{}
	}
	site := *old
	site.Masters = next.Masters
	site.Network, site.NodeIP = next.Network, next.NodeIP
	site.Network.Proxy, site.Network.NTP = old.Network.Proxy, old.Network.NTP
	if !next.Credentials.IsZero() {
		site.Credentials = next.Credentials
	}
	if next.Credentials.Keys != nil && next.ControlPlane != nil && old.ControlPlane != nil {
		// Anybody with the cluster's keys controls the cluster anyway. Before anything is accepted,
		// the keys are verified with the CA of old.
		c := *old.ControlPlane
		c.Absent, c.ContinueFrom, c.Restore = next.ControlPlane.Absent, next.ControlPlane.ContinueFrom, next.ControlPlane.Restore
		c.RequestedAt, c.BootstrapUntil = next.ControlPlane.RequestedAt, next.ControlPlane.BootstrapUntil
		site.ControlPlane = &c
	}
	rest := *next
	rest.Network.Proxy, rest.Network.NTP = site.Network.Proxy, site.Network.NTP
	omitted := differingFields(reflect.ValueOf(rest), reflect.ValueOf(site))
	if !reflect.DeepEqual(next.Network.Proxy, old.Network.Proxy) {
		omitted = append(omitted, "network.proxy")
	}
	if !slices.Equal(next.Network.NTP, old.Network.NTP) {
		omitted = append(omitted, "network.ntp")
	}
	return decision{Site: &site, Omitted: omitted}
}

// differingFields names the fields in which two Sites differ, except credentials.
func differingFields(a, b reflect.Value) []string {
	var out []string
	for i := range a.NumField() {
		name, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("yaml"), ",")
		if name != "credentials" && !reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			out = append(out, name)
		}
	}
	return out
}

// accepted is the part of a stick that this machine accepts.
type accepted struct {
	info  ondisk.SlotInfo
	files map[string][]byte
	// site is the Site in files, or nil if it is invalid.
	site *configs.Site
	// signed is when the stick was signed with a key that the Image names, in seconds since the
	// epoch, or 0 if it was not.
	signed int64
	// omitted names the fields that are not accepted.
	omitted []string
	// digest covers everything on the stick for this machine, including the fields that are omitted
	// later.
	digest string
	// entry is the Site's entry in the stick's Inventory, or nil if there is no Inventory.
	entry *configs.InventorySite
}

// acceptStick returns the parts of a stick that this machine accepts; old is its active Site. The
// signature is verified before anything on the stick is parsed.
func acceptStick(e *machine.Env, image ondisk.ImageInfo, old *Active, dev string, c *slot.Contents) (*accepted, error) {
	all := &accepted{info: c.Info}
	when, unsigned := checkSignature(e, image, old, c)
	if unsigned == nil {
		// edgebake.json itself is not signed, so only the signature's date counts.
		all.info, all.signed = ondisk.SlotInfo{Stamped: when}, when
	}
	switch {
	case image.Removable == ondisk.SitesNever:
		return nil, policyError(image)
	case image.Removable == ondisk.SitesSigned && unsigned != nil:
		return nil, fmt.Errorf("%w; the Image accepts signed Sites only (sites.removable: signed; edgebake site sign)", unsigned)
	case unsigned != nil && !errors.Is(unsigned, slot.ErrUnsigned):
		e.Note("stick %s counts as unsigned: %v", dev, unsigned)
	}
	brought := c
	f, err := forMachine(e, c, nil)
	if err != nil {
		return nil, err
	}
	c = f.contents
	all.files, all.site, all.entry = c.Files, f.site, f.entry
	all.digest = contentsDigest(&slot.Contents{Files: c.Files, Signature: brought.Signature})
	next := f.site
	if next == nil {
		return all, nil // resolveSite reports the problems of the Site
	}
	var site *configs.Site
	if old != nil {
		site = old.Site
	}
	d := applyPolicy(image.Removable, member.HasJoined(e), unsigned == nil, site, next)
	switch {
	case d.Site == nil:
		return nil, policyError(image)
	case d.Whole:
		return all, nil
	}
	return repair(e, site, f, d, all, c == brought)
}

// repair returns the part of a stick that a member accepts: the files of its own slot, with d.Site
// as the Site. plain means that nothing on the stick names this machine.
func repair(e *machine.Env, old *configs.Site, f *slotSite, d decision, all *accepted, plain bool) (*accepted, error) {
	c, next := f.contents, f.site
	// The accepted Site keeps the machine's name, so check the name in the stick's Site here.
	if name := member.LastNodeName(e); name != "" && plain && !strings.Contains(next.NodeName, "{{") && !strings.EqualFold(next.NodeName, name) {
		return nil, fmt.Errorf("this machine is enrolled as %s, but the Site names it %s: use a stick with this machine's own Site", name, next.NodeName)
	}
	if member.Unpinned(old) && !next.Credentials.IsZero() {
		// Only pins tie the node to its cluster: without them, an untrusted token would move it to
		// any cluster that the stick names.
		if d.Site.CACertHashes = member.Pins(e); len(d.Site.CACertHashes) == 0 {
			return nil, fmt.Errorf("it contains a token, but this machine has neither CA pins nor a record of its cluster's CA, so the token could move it to another cluster")
		}
		d.Site.UnsafeSkipCAVerification = false
	}
	doc, err := configs.EncodeSlot(d.Site)
	if err != nil {
		return nil, err
	}
	t := &accepted{info: c.Info, files: maps.Clone(ownContents(e).Files), omitted: d.Omitted, digest: all.digest, entry: f.entry}
	delete(t.files, ondisk.SlotInventory) // the machine's Site is used instead
	for _, name := range slices.Sorted(maps.Keys(c.Files)) {
		if name != ondisk.SlotSite && !bytes.Equal(c.Files[name], t.files[name]) {
			t.omitted = append(t.omitted, name)
		}
	}
	t.files[ondisk.SlotSite] = doc
	if d.Site.ValidatePublic() == nil { // it may be invalid, because it combines two valid Sites
		t.site = d.Site
	}
	return t, nil
}

func policyError(image ondisk.ImageInfo) error {
	hint := ""
	if len(image.SiteKeys) > 0 && image.Removable != ondisk.SitesNever {
		hint = ", unless it is signed by a key that the Image names (edgebake site sign)"
	}
	return fmt.Errorf("the Image accepts no Site from a stick%s (sites.removable: %s)", hint, cmp.Or(image.Removable, ondisk.SitesRepair))
}
