package site

import (
	"reflect"
	"slices"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
)

// TestWhatAStickMayChange checks which fields of a stick's Site are accepted. All of them differ
// from the machine's, so a new field is rejected until the policy permits it.
func TestWhatAStickMayChange(t *testing.T) {
	t.Parallel()
	var old, next configs.Site
	old.Masters, next.Masters = []string{"old"}, []string{"new"}
	fill(reflect.ValueOf(&next).Elem())
	next.Credentials.Token = configs.NewSecret("abcdef.0123456789abcdef")

	for _, c := range []struct {
		policy            string
		enrolled, signed  bool
		none, whole, some bool
	}{
		{ondisk.SitesNever, false, false, true, false, false},
		{ondisk.SitesNever, true, false, true, false, false},
		{ondisk.SitesUntilEnrolled, false, false, false, true, false},
		{ondisk.SitesUntilEnrolled, true, false, true, false, false},
		{ondisk.SitesRepair, false, false, false, true, false},
		{ondisk.SitesRepair, true, false, false, false, true},
		{"", true, false, false, false, true}, // an image of an older version
		{ondisk.SitesAlways, true, false, false, true, false},
		{ondisk.SitesSigned, false, false, true, false, false},
		{ondisk.SitesSigned, true, false, true, false, false},
		{ondisk.SitesSigned, false, true, false, true, false},
		{ondisk.SitesSigned, true, true, false, true, false},
		{ondisk.SitesNever, true, true, true, false, false},
		{ondisk.SitesUntilEnrolled, true, true, false, true, false},
		{ondisk.SitesRepair, true, true, false, true, false},
	} {
		got := applyPolicy(c.policy, c.enrolled, c.signed, &old, &next)
		if (got.Site == nil) != c.none || got.Whole != c.whole || (len(got.Omitted) > 0) != c.some {
			t.Errorf("%s, enrolled %v, signed %v: %+v", c.policy, c.enrolled, c.signed, got)
		}
	}

	for _, policy := range []string{ondisk.SitesRepair, ondisk.SitesUntilEnrolled} {
		if got := applyPolicy(policy, true, false, nil, &next); got.Site != nil {
			t.Errorf("%s: a node whose Site cannot be read takes %+v", policy, got)
		}
	}

	got := applyPolicy(ondisk.SitesRepair, true, false, &old, &next)
	want := old
	want.Masters, want.Network, want.NodeIP, want.Credentials = next.Masters, next.Network, next.NodeIP, next.Credentials
	want.Network.Proxy, want.Network.NTP = old.Network.Proxy, old.Network.NTP
	if !reflect.DeepEqual(*got.Site, want) {
		t.Errorf("taken: %+v", *got.Site)
	}
	for i := range reflect.TypeFor[configs.Site]().NumField() {
		switch name := reflect.TypeFor[configs.Site]().Field(i).Name; name {
		case "Masters", "Network", "NodeIP", "Credentials":
		default:
			if !reflect.ValueOf(*got.Site).Field(i).IsZero() {
				t.Errorf("%s was accepted from an unsigned stick", name)
			}
		}
	}
	for _, name := range []string{"users", "ignition", "caCertHashes", "caCert", "kubeletExtraArgs", "endpoint", "vip", "yurthub", "report", "network.proxy", "network.ntp"} {
		if !slices.Contains(got.Omitted, name) {
			t.Errorf("%s was left out without a note: %v", name, got.Omitted)
		}
	}
	if again := applyPolicy(ondisk.SitesRepair, true, false, &old, &old); len(again.Omitted) > 0 {
		t.Errorf("nothing differs: %v", again.Omitted)
	}
	next.Credentials = configs.Credentials{}
	old.Credentials.Token = configs.NewSecret("live")
	if got := applyPolicy(ondisk.SitesRepair, true, false, &old, &next); got.Site.Credentials.Token.Reveal() != "live" {
		t.Error("a stick without a token removed the machine's token")
	}
}

// fill sets every zero field below v.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		if v.CanInterface() {
			if _, ok := v.Interface().(configs.Secret); ok {
				v.Set(reflect.ValueOf(configs.NewSecret("secret")))
				return
			}
		}
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				fill(v.Field(i))
			}
		}
	case reflect.String:
		v.SetString("new")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int:
		v.SetInt(7)
	case reflect.Slice:
		s := reflect.MakeSlice(v.Type(), 1, 1)
		fill(s.Index(0))
		v.Set(s)
	case reflect.Map:
		m := reflect.MakeMap(v.Type())
		m.SetMapIndex(reflect.ValueOf("k"), reflect.ValueOf("new"))
		v.Set(m)
	}
}
