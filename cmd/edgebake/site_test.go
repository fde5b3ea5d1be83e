package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/slot"
)

// A pair of keys, as minisign makes them; the encrypted one has a cheaper
// derivation than minisign's, which takes 1 GiB of memory.
const (
	publicKey = "RWRFREdFQkFLRQOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4"
	plainKey  = `untrusted comment: minisign encrypted secret key
RWQAAEIyAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAARURHRUJBS0UAAQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHwOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=
`
	encryptedKey = `untrusted comment: minisign encrypted secret key
RWRTY0IyZWRnZWJha2UgdGVzdCBzYWx0AAAAAAAAAAAAAAAAAAAAgAAAAAAAAAAAAAEAAAAAZYmoN7UJ6m4R2nE9Sn4hQRBiNFLFVIl2oXtPYGVucNZzQHW84DkqPCdN1d93QJdbfeqY+crPD7YPz0E4wbhB1bq6qxYMVmIcanK1DWKf9RvbOmpZxS6/OuAhKWnDpCmNAAwOcOwzsvk=
`
	keyPassword = "open sesame"
)

// stick reads a directory as first boot reads the stick that it is copied to.
func (c *cli) stick(dir string) *slot.Contents {
	c.t.Helper()
	made := slot.Contents{Files: map[string][]byte{}}
	entries, err := os.ReadDir(filepath.Join(c.dir, dir))
	if err != nil {
		c.t.Fatal(err)
	}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(c.dir, dir, e.Name()))
		if err != nil {
			c.t.Fatal(err)
		}
		if fi, err := e.Info(); err != nil || fi.Mode().Perm() != 0o600 {
			c.t.Errorf("%s: %v, mode %v", e.Name(), err, fi.Mode())
		}
		switch e.Name() {
		case ondisk.SlotClaims: // the machines', and no part of a slot
		case "site.minisig":
			made.Signature = b
		default:
			made.Files[e.Name()] = b
		}
	}
	img, err := slot.Make(made)
	if err != nil {
		c.t.Fatal(err)
	}
	got, err := slot.Read(bytes.NewReader(img))
	if err != nil {
		c.t.Fatal(err)
	}
	return got
}

// TestClaimsGetRoom: a stick that is made again for more machines has room for the
// notes of all of them, and keeps those that are there.
func TestClaimsGetRoom(t *testing.T) {
	c := newCLI(t)
	c.file("office.key", plainKey)
	c.file("inventory.yaml", inventory)
	sign := []string{"site", "sign", "inventory.yaml", "--key", "office.key", "-o", "stick", "--force"}
	c.run(0, sign...)
	claims := filepath.Join("stick", ondisk.SlotClaims)
	noted := bytes.Repeat([]byte("note"), 128)
	if err := os.WriteFile(claims, noted, 0o600); err != nil { // cut short too
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
