package firstboot

import (
	"bytes"
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
// plug in. old is the site that it goes by.
//
// A machine that is no member of a cluster yet has no other way to its site.
// A member takes from a stranger only what brings it back to its cluster, whose
// CA stays pinned: the masters, the network, the time servers, a token. It
// takes nothing that lets somebody in (users, keys, Ignition), that leads it to
// another cluster (pins, CA), or that changes what runs on it (arguments,
// labels, pools, the proxy that images come through).
func admit(policy string, enrolled bool, old, next *configs.Site) admitted {
	switch {
	case policy == ondisk.SitesNever:
		return admitted{}
	case policy == ondisk.SitesAlways, !enrolled, old == nil:
		return admitted{site: next, whole: true}
	case policy == ondisk.SitesUntilEnrolled:
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

// admitFiles is what this machine takes of a stick's files, and names what it
// leaves out.
func admitFiles(e *Env, image ondisk.ImageInfo, files map[string][]byte) (take map[string][]byte, left []string, err error) {
	next, err := configs.ParsePublicSite(ondisk.SlotSite, files[ondisk.SlotSite])
	if err != nil {
		return files, nil, nil // whoever resolves the site says what is wrong with it
	}
	var old *configs.Site
	if active, err := activeSite(e, image); err == nil {
		old = active.Site
	}
	got := admit(image.Removable, enrolled(e) == nil, old, next)
	switch {
	case got.site == nil:
		return nil, nil, fmt.Errorf("the Image has this machine take no site from one (sites.removable: %s)", image.Removable)
	case got.whole:
		return files, nil, nil
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
