package slot

import (
	"bytes"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
)

// TestScrubHidesWhatOldSlotsHold scrubs a slot of an earlier version, which did not reject tokens
// outside of site.yaml.
func TestScrubHidesWhatOldSlotsHold(t *testing.T) {
	c := sample()
	doc := `{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/a","contents":{"source":"data:,` + token + `"}}]}}`
	c.Files["config.ign"] = []byte(doc)
	c.Files["files/note"] = []byte("a " + token + "\n")
	c.Files["files/other"] = []byte("b\n")
	d := newDevice(mustMake(t, c))
	if err := Scrub(d, ondisk.SlotInfo{Version: 1}, []byte("public\n"), token, ""); err != nil {
		t.Fatal(err)
	}
	got, err := Read(bytes.NewReader(d.durable))
	if err != nil {
		t.Fatal(err)
	}
	stars := strings.Repeat("*", len(token))
	for name, want := range map[string]string{"config.ign": strings.ReplaceAll(doc, token, stars), "files/note": "a " + stars + "\n", "files/other": "b\n"} {
		if string(got.Files[name]) != want {
			t.Errorf("%s is %s", name, got.Files[name])
		}
	}
	if bytes.Contains(d.durable, []byte(token)) {
		t.Error("the token is still in the slot")
	}
}
