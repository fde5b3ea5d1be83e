package configs

import (
	"slices"
	"strings"
	"testing"
)

// TestFieldsOfAnImage checks that fields that an image does not know are left out if they have
// their defaults, and are reported otherwise.
func TestFieldsOfAnImage(t *testing.T) {
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
	if beyond := site.FieldsBeyond(all); beyond != nil {
		t.Errorf("FieldsBeyond(all fields) = %q, want none", beyond)
	}
	whole, err := EncodeSlot(site)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := EncodeSlotFor(site, all); err != nil || string(b) != string(whole) {
		t.Errorf("with all fields it becomes %s, %v: want %s", b, err, whole)
	}
	without := []string{"spreadSeconds", "criSocket", "network.interfaces.acceptRA", "labels"}
	known := slices.DeleteFunc(slices.Clone(all), func(f string) bool { return slices.Contains(without, f) })
	if beyond, want := site.FieldsBeyond(known), "labels spreadSeconds network.interfaces[1].acceptRA"; strings.Join(beyond, " ") != want {
		t.Errorf("FieldsBeyond = %q, want %q", beyond, want)
	}
	b, err := EncodeSlotFor(site, known)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range without {
		if strings.Contains(string(b), f[strings.LastIndex(f, ".")+1:]) {
			t.Errorf("%s is still there:\n%s", f, b)
		}
	}
	if !strings.Contains(string(b), "token: \"abcdef.0123456789abcdef\"") || strings.Count(string(b), "name: ") != 2 {
		t.Errorf("other fields are missing:\n%s", b)
	}
}
