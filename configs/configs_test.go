package configs

import "testing"

func TestExamplesStart(t *testing.T) {
	if _, err := ParseImage("image.yaml", ExampleImage()); err != nil {
		t.Error(err)
	}
	s, err := ParseSite("site.yaml", ExampleSite())
	if err != nil {
		t.Fatal(err)
	}
	slot, err := EncodeSlot(s)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ParseSite("slot", slot); err != nil {
		t.Errorf("%v\n%s", err, slot)
	}
	public, err := EncodePublic(s)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ParsePublicSite("public", public); err != nil {
		t.Errorf("%v\n%s", err, public)
	}
}
