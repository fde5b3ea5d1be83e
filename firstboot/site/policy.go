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

// admitted is what a machine takes of a stick's site.
type admitted struct {
	// Site to take; nil: nothing is taken.
	Site *configs.Site
	// Whole: the stick's other files are taken as well.
	Whole bool
	// Omitted names the fields that are not taken although they differ.
	Omitted []string
}

// admit decides what a machine takes of the site on a stick, which anybody may
// plug in. old is its active Site; nil: it cannot be read any more.
// signed says that a key which the Image names has signed next.
//
// A machine that is not a member of a cluster yet has no other way to its site. A
// member takes from a stranger only what brings it back to its cluster, whose CA
// stays pinned: the API servers, the network, a token, and on a control-plane node the
// cluster's keys, which hold against that CA. It takes nothing that lets somebody in
// (users, keys, Ignition), that leads it to another cluster (pins, CA), that changes
// what runs on it (arguments, labels, pools, the proxy that images come through), or
// that could move its clock past the end of its certificate (time servers).
func admit(policy string, joined, signed bool, old, next *configs.Site) admitted {
	switch {
	case policy == ondisk.SitesNever:
		return admitted{}
	case signed:
		return admitted{Site: next, Whole: true}
	case policy == ondisk.SitesSigned:
		return admitted{}
	case policy == ondisk.SitesAlways, !joined:
		return admitted{Site: next, Whole: true}
	case policy == ondisk.SitesUntilEnrolled, old == nil:
		return admitted{}
	}
	site := *old
	site.Masters = next.Masters
	site.Network, site.NodeIP = next.Network, next.NodeIP
	site.Network.Proxy, site.Network.NTP = old.Network.Proxy, old.Network.NTP
	if !next.Credentials.IsZero() {
		site.Credentials = next.Credentials
	}
	if next.Credentials.Keys != nil && next.ControlPlane != nil && old.ControlPlane != nil {
		// Whoever has the cluster's keys has the cluster. They are held against
		// the CA of old before anything is taken.
		c := *old.ControlPlane
		c.Absent, c.ContinueFrom, c.Restore = next.ControlPlane.Absent, next.ControlPlane.ContinueFrom, next.ControlPlane.Restore
		c.Said, c.BirthUntil = next.ControlPlane.Said, next.ControlPlane.BirthUntil
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
	return admitted{Site: &site, Omitted: omitted}
}

// differingFields names the fields of two Sites that are not the same.
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

// taking is what this machine takes of a stick.
type taking struct {
	info  ondisk.SlotInfo
	files map[string][]byte
	// site is the Site in files; nil: it has problems.
	site *configs.Site
	// signed is when a key that the Image names signed it, in seconds since the
	// epoch; 0: it has no such signature.
	signed int64
	// omitted names the fields that are not taken.
	omitted []string
	// digest is of what the stick holds for this machine, before anything is
	// left out.
	digest string
	// entry is the site of the stick's inventory; nil: it has none.
	entry *configs.InventorySite
}

// admitFiles is what this machine, whose active Site is old, takes of a stick. Nothing
// on the stick is parsed before its signature has been looked at.
func admitFiles(e *machine.Env, image ondisk.ImageInfo, old *Active, dev string, c *slot.Contents) (*taking, error) {
	all := &taking{info: c.Info}
	when, unsigned := checkSignature(e, image, old, c)
	if unsigned == nil {
		// edgebake.json itself is not signed: only the signature's date counts.
		all.info, all.signed = ondisk.SlotInfo{Stamped: when}, when
	}
	switch {
	case image.Removable == ondisk.SitesNever:
		return nil, notAdmitted(image)
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
		return all, nil // resolveSite reports its problems
	}
	var site *configs.Site
	if old != nil {
		site = old.Site
	}
	got := admit(image.Removable, member.HasJoined(e), unsigned == nil, site, next)
	switch {
	case got.Site == nil:
		return nil, notAdmitted(image)
	case got.Whole:
		return all, nil
	}
	return repair(e, site, f, got, all, c == brought)
}

// repair returns what a member takes of a stick with another Site: got instead of the
// Site in f. plain: nothing on the stick names this machine.
func repair(e *machine.Env, old *configs.Site, f *found, got admitted, all *taking, plain bool) (*taking, error) {
	c, next := f.contents, f.site
	// In a repair the machine keeps its own name, so the name is checked here.
	if name := member.Node(e); name != "" && plain && !strings.Contains(next.NodeName, "{{") && !strings.EqualFold(next.NodeName, name) {
		return nil, fmt.Errorf("this machine is enrolled as %s, the Site calls it %s: bring this machine's own Site", name, next.NodeName)
	}
	if member.Unpinned(old) && !next.Credentials.IsZero() {
		// Nothing else ties the node to its cluster: with a stranger's token it
		// would move to whatever cluster the stick names.
		if got.Site.CACertHashes = member.Pins(e); len(got.Site.CACertHashes) == 0 {
			return nil, fmt.Errorf("it contains a token, and it is unknown which cluster this machine belongs to (unsafeSkipCAVerification, and no record of its CA)")
		}
		got.Site.UnsafeSkipCAVerification = false
	}
	doc, err := configs.EncodeSlot(got.Site)
	if err != nil {
		return nil, err
	}
	t := &taking{info: c.Info, files: maps.Clone(ownContents(e).Files), omitted: got.Omitted, digest: all.digest, entry: f.entry}
	delete(t.files, ondisk.SlotInventory) // of which the machine's site is taken
	for _, name := range slices.Sorted(maps.Keys(c.Files)) {
		if name != ondisk.SlotSite && !bytes.Equal(c.Files[name], t.files[name]) {
			t.omitted = append(t.omitted, name)
		}
	}
	t.files[ondisk.SlotSite] = doc
	if got.Site.ValidatePublic() == nil { // its parts are from two valid Sites
		t.site = got.Site
	}
	return t, nil
}

func notAdmitted(image ondisk.ImageInfo) error {
	hint := ""
	if len(image.SiteKeys) > 0 && image.Removable != ondisk.SitesNever {
		hint = ", unless it is signed by a key that the Image names (edgebake site sign)"
	}
	return fmt.Errorf("the Image accepts no Site from a stick%s (sites.removable: %s)", hint, cmp.Or(image.Removable, ondisk.SitesRepair))
}
