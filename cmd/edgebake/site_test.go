package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// A pair of keys in the format of minisign.
const (
	publicKey = "RWRFREdFQkFLRQOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4"
	plainKey  = `untrusted comment: minisign encrypted secret key
RWQAAEIyAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAARURHRUJBS0UAAQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHwOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=
`
)

// TestClaimsGetRoom checks a stick that is made again for more machines: it keeps its claims and
// has space for those of all machines.
func TestClaimsGetRoom(t *testing.T) {
	c := newCLI(t)
	c.file("office.key", plainKey)
	c.file("inventory.yaml", inventory)
	sign := []string{"site", "sign", "inventory.yaml", "--key", "office.key", "-o", "stick", "--force"}
	c.run(0, sign...)
	claims := filepath.Join("stick", ondisk.SlotClaims)
	noted := bytes.Repeat([]byte("note"), 128)
	if err := os.WriteFile(claims, noted, 0o600); err != nil { // also truncates the file
		t.Fatal(err)
	}
	many := inventory
	for i := range 100 {
		many += fmt.Sprintf("  - {name: shop-%d, match: {serial: PF3X%d}}\n", i, i)
	}
	c.file("inventory.yaml", many)
	for range 2 {
		c.run(0, sign...)
		b, err := os.ReadFile(claims)
		if err != nil || len(b) != len(slot.ClaimsFile(102)) || !bytes.HasPrefix(b, noted) || len(bytes.Trim(b[len(noted):], "\x00")) > 0 {
			t.Errorf("%d bytes, want %d (%v)", len(b), len(slot.ClaimsFile(102)), err)
		}
	}
	c.file("inventory.yaml", inventory)
	c.run(0, sign...)
	if b, err := os.ReadFile(claims); err != nil || len(b) != len(slot.ClaimsFile(102)) || !bytes.HasPrefix(b, noted) {
		t.Errorf("for fewer machines: %d bytes (%v)", len(b), err)
	}
}

const inventory = `apiVersion: edgebake.io/v1alpha1
kind: Inventory
defaults:
  masters: ["10.0.0.1:6443"]
  credentials: {token: abcdef.0123456789abcdef}
  caCertHashes: ["sha256:0000000000000000000000000000000000000000000000000000000000000000"]
sites:
  - {name: berlin, match: {serial: SN1}}
  - {name: paris, match: {macs: ["52:54:00:00:00:02"]}, credentials: {token: fedcba.fedcba9876543210}}
`
