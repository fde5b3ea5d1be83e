package firstboot

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
)

// admitted is what a machine takes of a stick's site.
type admitted struct {
	// site to take; nil: nothing is taken.
	site *configs.Site
	// whole: the stick's other files are taken as well.
	whole bool
	// left names the fields that are not taken although they differ.
	left []string
}

// admit decides what a machine takes of the site on a stick, which anybody may
// plug in. old is the site that it goes by; nil: it cannot be read any more.
//
// A machine that is no member of a cluster yet has no other way to its site.
// A member takes from a stranger only what brings it back to its cluster, whose
// CA stays pinned: the masters, the network, the time servers, a token. It
// takes nothing that lets somebody in (users, keys, Ignition), that leads it to
// another cluster (pins, CA), or that changes what runs on it (arguments,
// labels, pools, the proxy that images come through).
func admit(policy string, joined bool, old, next *configs.Site) admitted {
	switch {
	case policy == ondisk.SitesNever:
		return admitted{}
	case policy == ondisk.SitesAlways, !joined:
		return admitted{site: next, whole: true}
	case policy == ondisk.SitesUntilEnrolled, old == nil:
		return admitted{}
	}
	site := *old
	site.Masters = next.Masters
	site.Network = next.Network
	site.Network.Proxy = old.Network.Proxy
	if !next.Credentials.Token.IsZero() {
		site.Credentials = next.Credentials
	}
	rest := *next
	rest.Network.Proxy = site.Network.Proxy
	left := differing(reflect.ValueOf(rest), reflect.ValueOf(site))
	if !reflect.DeepEqual(next.Network.Proxy, old.Network.Proxy) {
		left = append(left, "network.proxy")
	}
	return admitted{site: &site, left: left}
}

// differing names the fields of two Sites that are not the same.
func differing(a, b reflect.Value) []string {
	var out []string
	for i := range a.NumField() {
		name, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("yaml"), ",")
		if name != "credentials" && !reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			out = append(out, name)
		}
	}
	return out
}

// hasJoined reports whether this machine is a node, or was one until its
// certificate expired or its credentials were damaged: a clock that is wrong,
// which a neighbour can see to, makes no blank machine of it.
func hasJoined(e *Env) bool { return isMember(e) || e.exists(readyMark) }

// admitFiles is what this machine, which goes by old, takes of a stick's files,
// and names what it leaves out.
func admitFiles(e *Env, image ondisk.ImageInfo, old *Active, files map[string][]byte) (take map[string][]byte, left []string, err error) {
	next, err := configs.ParsePublicSite(ondisk.SlotSite, files[ondisk.SlotSite])
	if err != nil {
		return files, nil, nil // whoever resolves the site says what is wrong with it
	}
	var site *configs.Site
	if old != nil {
		site = old.Site
	}
	got := admit(image.Removable, hasJoined(e), site, next)
	switch {
	case got.site == nil:
		return nil, nil, fmt.Errorf("the Image has this machine take no site from one (sites.removable: %s)", cmp.Or(image.Removable, ondisk.SitesRepair))
	case got.whole:
		return files, nil, nil
	}
	if unpinned(site) && !next.Credentials.Token.IsZero() {
		// Nothing else ties the node to its cluster: with a stranger's token it
		// would move to whatever cluster the stick names.
		if got.site.CACertHashes = enrolledPins(e); len(got.site.CACertHashes) == 0 {
			return nil, nil, fmt.Errorf("it brings a token, and nothing tells which cluster is this machine's (unsafeSkipCAVerification, and no CA on the disk)")
		}
		got.site.UnsafeSkipCAVerification = false
	}
	doc, err := configs.EncodeSlot(got.site)
	if err != nil {
		return nil, nil, err
	}
	take, left = maps.Clone(ownContents(e).Files), got.left
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if name != ondisk.SlotSite && !bytes.Equal(files[name], take[name]) {
			left = append(left, name)
		}
	}
	take[ondisk.SlotSite] = doc
	return take, left, nil
}
