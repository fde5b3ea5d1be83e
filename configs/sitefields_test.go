package configs

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

// TestOnlyFields: fields that are not in the list are left out; those that a person has
// set are named.
func TestOnlyFields(t *testing.T) {
	t.Parallel()
	site, err := ParseSite("site.yaml", []byte(`apiVersion: edgebake.io/v1alpha1
kind: Site
nodeName: edge-1
masters: [192.0.2.1:6443]
credentials: {token: abcdef.0123456789abcdef}
unsafeSkipCAVerification: true
labels: {a: b}
spreadSeconds: 30
network:
  interfaces:
  - {name: eth0, addresses: [192.0.2.9/24]}
  - {name: eth1, addresses: [192.0.2.10/24], acceptRA: true}
`))
	if err != nil {
		t.Fatal(err)
	}
	all := SiteFields()
	for _, f := range []string{"labels", "spreadSeconds", "criSocket", "network.interfaces.acceptRA", "credentials.token", "controlPlane.members.name"} {
		if !slices.Contains(all, f) {
			t.Errorf("%s is not a field: %q", f, all)
		}
	}
	if only, beyond := site.OnlyFields(all); !reflect.DeepEqual(only, site) || only == site || beyond != nil {
		t.Errorf("with all fields it becomes %+v, without %q", only, beyond)
	}
	without := []string{"spreadSeconds", "criSocket", "network.interfaces.acceptRA", "labels"}
	known := slices.DeleteFunc(slices.Clone(all), func(f string) bool { return slices.Contains(without, f) })
	only, beyond := site.OnlyFields(known)
	if want := "labels spreadSeconds network.interfaces[1].acceptRA"; strings.Join(beyond, " ") != want {
		t.Errorf("%q are beyond, want %q", beyond, want)
	}
	b, err := EncodeSlot(only)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range without {
		if strings.Contains(string(b), f[strings.LastIndex(f, ".")+1:]) {
			t.Errorf("%s is still there:\n%s", f, b)
		}
	}
	if site.Labels == nil || only.Credentials.Token.Reveal() != site.Credentials.Token.Reveal() || len(only.Network.Interfaces) != 2 {
		t.Errorf("%+v becomes %+v", site, only)
	}
}
