package configs

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

const inventoryHead = `apiVersion: edgebake.io/v1alpha1
kind: Inventory
defaults:
  masters: [192.0.2.11:6443]
  caCertHashes: [sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef]
  credentials: {token: abcdef.0123456789abcdef}
  labels: {example.com/region: north, example.com/kind: till}
  ipvs: {scheduler: wlc, disabled: true}
  network: {dns: [192.0.2.1, 192.0.2.2], ntp: [192.0.2.3]}
sites:
`

func mustInventory(t *testing.T, doc string) *Inventory {
	t.Helper()
	inv, err := ParseInventory("inventory.yaml", []byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

// TestInventoryMerge checks the rules in the comment of the type Inventory.
func TestInventoryMerge(t *testing.T) {
	inv := mustInventory(t, inventoryHead+`
  - name: one
    match: {serial: SN1}
  - name: two
    match: {macs: ["52-54-00-00-00-02"]}
    nodeName: till-{{.Serial}}
    labels: {example.com/kind: scale, example.com/floor: "2"}
    ipvs: {disabled: false}
    network: {dns: [192.0.2.9]}
    credentials: {token: fedcba.fedcba9876543210}
  - nodeName: three
    match: {uuid: 4c4c4544-0042-3510-8052-c7c04f4e4232}
    labels:
    unsafeSkipCAVerification: true
    network: {ntp: null}
`)
	one, two, three := inv.Sites[0], inv.Sites[1], inv.Sites[2]
	if one.NodeName != "one" || !one.IPVS.Disabled || one.VIP != "10.103.97.2" || one.Kind != KindSite {
		t.Errorf("one: %+v", one.Site)
	}
	if two.NodeName != "till-{{.Serial}}" || two.IPVS.Disabled || two.IPVS.Scheduler != "wlc" ||
		!reflect.DeepEqual(two.Labels, map[string]string{"example.com/region": "north", "example.com/kind": "scale", "example.com/floor": "2"}) ||
		!reflect.DeepEqual(two.Network.DNS, []string{"192.0.2.9"}) || len(two.Network.NTP) != 1 ||
		two.Credentials.Token.Reveal() != "fedcba.fedcba9876543210" {
		t.Errorf("two: %+v", two.Site)
	}
	if three.Name != "three" || three.Labels != nil || three.CACertHashes != nil || !three.UnsafeSkipCAVerification ||
		len(three.Network.NTP) != 0 || len(three.Network.DNS) != 2 {
		t.Errorf("three: %+v", three.Site)
	}
	// The encoded Inventory must be parsed to the same value.
	out, err := EncodeSlotInventory(inv)
	if err != nil {
		t.Fatal(err)
	}
	again := mustInventory(t, string(out))
	for i := range inv.Sites {
		if !reflect.DeepEqual(inv.Sites[i], again.Sites[i]) {
			t.Errorf("%s came back as %+v, not %+v\n%s", inv.Sites[i].Name, again.Sites[i], inv.Sites[i], out)
		}
	}
	twice, err := EncodeSlotInventory(again)
	if err != nil || string(twice) != string(out) {
		t.Errorf("encoding the Inventory twice gave different bytes (%v):\n%s", err, twice)
	}
}

// TestInventoryPlaces checks that two sites of one node pool cannot have the same address, but
// sites of different pools can.
func TestInventoryPlaces(t *testing.T) {
	const site = `
  - name: %s
    match: {serial: %s}
    nodeType: edge
    nodePool: %s
    network: {interfaces: [{name: en*, addresses: [192.168.1.20/24], gateway: 192.168.1.1}]}`
	mustInventory(t, inventoryHead+fmt.Sprintf(site, "a", "SNA", "berlin")+fmt.Sprintf(site, "b", "SNB", "paris"))
	_, err := ParseInventory("i", []byte(inventoryHead+fmt.Sprintf(site, "a", "SNA", "berlin")+fmt.Sprintf(site, "b", "SNB", "berlin")))
	if err == nil || !strings.Contains(err.Error(), "sites[1].network.interfaces[0].addresses[0]: address 192.168.1.20 in node pool berlin is also used by sites[0] (a)") {
		t.Error(err)
	}
}

// TestInventoryFiles checks that the files named in an Inventory are copied into it.
func TestInventoryFiles(t *testing.T) {
	inv := mustInventory(t, strings.Replace(inventoryHead, "  caCertHashes: [sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef]\n", "  caFile: ca.crt\n", 1)+`
  - name: one
    match: {serial: SN1}
    ignitionFile: one.ign
  - name: two
    match: {serial: SN2}
`)
	var asked []string
	ca, _ := testCert(t, "kubernetes", true)
	files := map[string]string{"ca.crt": ca, "one.ign": `{"ignition":{"version":"3.4.0"}}`}
	err := inv.InlineFiles(func(field, path string) (string, error) {
		asked = append(asked, field)
		return files[path], nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Join(asked, " ") != "defaults.caFile sites[0].ignitionFile" {
		t.Error(asked)
	}
	for _, s := range inv.Sites {
		if s.CACert != files["ca.crt"] || s.CAFile != "" || s.IgnitionFile != "" || s.Ignition.IsZero() != (s.Name == "two") {
			t.Errorf("%s: %+v", s.Name, s.Site)
		}
	}
	inv = mustInventory(t, inventoryHead+"  - {name: one, match: {serial: SN1}, ignitionFile: gone.ign}\n")
	if err := inv.InlineFiles(func(string, string) (string, error) { return "", errors.New("no such file") }); err == nil {
		t.Error("a missing file was read")
	}
}

// TestInventoryOfThousands checks that an Inventory of 5,000 Sites is accepted, and that duplicates
// in it are found.
func TestInventoryOfThousands(t *testing.T) {
	var b strings.Builder
	b.WriteString(inventoryHead)
	for i := range 5000 {
		fmt.Fprintf(&b, "  - name: shop-%d\n    match: {serial: SN%05d, macs: [\"52:54:00:00:%02x:%02x\"]}\n    labels: {example.com/shop: \"%d\"}\n    network: {interfaces: [{name: en*, addresses: [10.%d.%d.2/24], gateway: 10.%d.%d.1}]}\n",
			i, i, i>>8, i&255, i, 1+i/250, i%250, 1+i/250, i%250)
	}
	inv := mustInventory(t, b.String())
	if len(inv.Sites) != 5000 || inv.Sites[4999].Name != "shop-4999" {
		t.Errorf("%d sites", len(inv.Sites))
	}
	b.WriteString("  - {name: last, match: {serial: sn04711}}\n")
	if _, err := ParseInventory("i", []byte(b.String())); err == nil || !strings.HasSuffix(err.Error(), "sites[5000].match.serial: serial number sn04711 is also used by sites[4711] (shop-4711): only one machine can have it") {
		t.Error(err)
	}
}

// TestInventoryBomb checks that aliases cannot make a document larger than the limits allow.
func TestInventoryBomb(t *testing.T) {
	doc := inventoryHead + "  - &a {name: a, match: {macs: &m [x, x, x, x, x, x, x, x, x, x]}}\n"
	prev := "m"
	for i := range 9 {
		name := fmt.Sprintf("m%d", i)
		doc += fmt.Sprintf("  - {name: b%d, match: {macs: &%s [%s]}}\n", i, name, strings.TrimSuffix(strings.Repeat("*"+prev+", ", 10), ", "))
		prev = name
	}
	if _, err := ParseInventory("i", []byte(doc)); err == nil {
		t.Error("the Inventory was accepted")
	}
}

func FuzzInventory(f *testing.F) {
	f.Add([]byte(inventoryHead + "  - {name: a, match: {serial: SN1}}\n"))
	f.Add([]byte(inventoryHead + "  - &x {name: a, match: {serial: SN1}, network: }\n  - *x\n"))
	f.Add([]byte("apiVersion: edgebake.io/v1alpha1\nkind: Inventory\ndefaults: [1]\nsites: {a: b}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		inv, err := ParseInventory("i", data)
		if err != nil {
			return
		}
		out, err := EncodeSlotInventory(inv)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseInventory("i", out)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if !reflect.DeepEqual(again.Sites, inv.Sites) {
			t.Errorf("%+v came back as %+v", inv.Sites, again.Sites)
		}
	})
}

// TestInventorySpread checks that the default of spreadSeconds grows with the number of machines.
func TestInventorySpread(t *testing.T) {
	for _, tt := range []struct {
		sites int
		field string
		want  time.Duration
	}{
		{1, "", 3 * time.Second},
		{300, "", 3 * time.Second},
		{1000, "", 10 * time.Second},
		{1000, "spreadSeconds: 60", time.Minute},
	} {
		var b strings.Builder
		fmt.Fprintf(&b, "apiVersion: edgebake.io/v1alpha1\nkind: Inventory\ndefaults:\n  masters: [10.0.0.1:6443]\n  credentials: {token: abcdef.0123456789abcdef}\n  unsafeSkipCAVerification: true\n  %s\nsites:\n", tt.field)
		for i := range tt.sites {
			fmt.Fprintf(&b, "- {name: shop-%d, match: {serial: S%d}}\n", i, i)
		}
		inv, err := ParseInventory("inventory.yaml", []byte(b.String()))
		if err != nil {
			t.Fatal(err)
		}
		if got := inv.Sites[0].Spread(); got != tt.want {
			t.Errorf("%d sites, %q: %s, want %s", tt.sites, tt.field, got, tt.want)
		}
		warned := LocateInventory("inventory.yaml", []byte(b.String()), inv.Warnings())
		if room := tt.sites <= 256; (warned == nil) != room {
			t.Errorf("%d sites: %v", tt.sites, warned)
		} else if !room && !strings.Contains(warned.Error(), "has space for 256 nodes (a /24 for each), but the Inventory has") || !room && !strings.HasSuffix(warned.Error(), "so this warning stays") {
			t.Errorf("%d sites: %v", tt.sites, warned)
		}
		// A Site that is stamped separately must contain the value.
		text, err := EncodeSlot(&inv.Sites[0].Site)
		if err != nil {
			t.Fatal(err)
		}
		site, err := ParseSite("site.yaml", text)
		if err != nil {
			t.Fatal(err)
		}
		if got := site.Spread(); got != tt.want {
			t.Errorf("%d sites, %q: the Site stamped has %s, want %s", tt.sites, tt.field, got, tt.want)
		}
	}
}
