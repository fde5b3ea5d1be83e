package media

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
)

// TestFieldsThatTheImageDoesNotKnow checks fields that an older image's first boot would reject. A
// default is left out of the slot, and a value that a person wrote is an error.
func TestFieldsThatTheImageDoesNotKnow(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "g.raw")
	golden(t, path, 1<<20, false)
	m, err := openLocked(path, os.O_RDONLY, false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	inventory := func(sites int, defaults string) *configs.Inventory {
		text := "apiVersion: edgebake.io/v1alpha1\nkind: Inventory\ndefaults: {masters: [192.168.7.11:6443], unsafeSkipCAVerification: true, credentials: {token: abcdef.0123456789abcdef}" + defaults + "}\nsites:\n"
		for i := range sites {
			text += fmt.Sprintf("- {name: shop-%d, match: {serial: EB-%d}}\n", i, i)
		}
		inv, err := configs.ParseInventory("i.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return inv
	}
	all := configs.SiteFields()
	earlier := slices.DeleteFunc(slices.Clone(all), func(f string) bool { return f == "spreadSeconds" || f == "labels" })
	for name, tc := range map[string]struct {
		sites    int
		defaults string
		known    []string
		spread   string // value in the slot
		problem  string // problem of a single Site
		whole    string // problem of the whole Inventory, if it differs from problem
	}{
		"it knows all":                  {sites: 1000, known: all, spread: "spreadSeconds: 10"},
		"a mere default":                {sites: 1000, known: earlier},
		"a small Inventory":             {sites: 3, known: earlier},
		"the same value, written":       {sites: 1000, defaults: ", spreadSeconds: 10", known: earlier, whole: "spreadSeconds: this image's first boot does not support"},
		"a value of its own":            {sites: 1000, defaults: ", spreadSeconds: 60", known: earlier, problem: "spreadSeconds: this image's first boot does not support the field: remove it, or build the image again with this edgebake"},
		"another field":                 {sites: 3, defaults: ", labels: {a: b}", known: earlier, problem: "labels: this image's first boot does not support the field"},
		"an older image":                {sites: 1000},
		"an older image, and a value":   {sites: 1000, defaults: ", spreadSeconds: 60", spread: "spreadSeconds: 60"},
		"an older image, another field": {sites: 3, defaults: ", labels: {a: b}"},
	} {
		m.info.SiteFields, m.info.InventoryVersions = tc.known, []string{"v1alpha1"}
		inv := inventory(tc.sites, tc.defaults)
		doc := &inv.Sites[0].Site
		c, err := m.slotOf(Site{Doc: doc, DefaultSpread: configs.DefaultSpread(len(inv.Sites))}, StampOptions{Now: now})
		whole, wholeErr := m.serves(Site{Inventory: inv})
		if tc.whole == "" {
			tc.whole = tc.problem
		}
		if (whole != nil) != (tc.whole != "") || whole != nil && !strings.Contains(whole.Error(), tc.whole) || wholeErr != nil {
			t.Errorf("%s: the whole Inventory: %v, %v", name, whole, wholeErr)
		}
		if (err != nil) != (tc.problem != "") || err != nil && !strings.Contains(err.Error(), tc.problem) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil {
			continue
		}
		text := string(c.Files[ondisk.SlotSite])
		if got := strings.Contains(text, "spreadSeconds"); got != (tc.spread != "") || !strings.Contains(text, tc.spread) {
			t.Errorf("%s: the slot has\n%s", name, text)
		}
		if strings.Contains(text, "labels") != strings.Contains(tc.defaults, "labels") {
			t.Errorf("%s: the slot has\n%s", name, text)
		}
	}
}
