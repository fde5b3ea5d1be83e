package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/slot"
	"github.com/edgebake/edgebake/test/desk"
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

func TestSiteSign(t *testing.T) {
	c := newCLI(t)
	c.file("site.yaml", site)
	c.file("more.ign", `{"ignition":{"version":"3.5.0"}}`)
	c.file("office.key", plainKey)
	c.file("locked.key", encryptedKey)
	before := time.Now().Add(-time.Minute)
	wantSigned := func(dir string, files ...string) {
		t.Helper()
		got := c.stick(dir)
		when, err := got.Verify([]string{publicKey})
		if err != nil || when.Before(before) || when.After(time.Now()) {
			t.Errorf("%v, signed on %v", err, when)
		}
		if have := slices.Sorted(maps.Keys(got.Files)); !slices.Equal(have, files) {
			t.Errorf("files: %q", have)
		}
	}

	c.run(0, "site", "sign", "site.yaml", "--key", "office.key")
	c.want(c.out, "signed site.yaml with key 454B414245474445: site-stick/site.minisig", "FAT stick named EDGEBAKE")
	wantSigned("site-stick", "site.yaml")
	if got := c.stick("site-stick"); !strings.Contains(string(got.Files["site.yaml"]), "abcdef.0123456789abcdef") {
		t.Error("the token is not on the stick")
	}
	c.run(1, "site", "sign", "site.yaml", "--key", "office.key")
	c.want(c.err, "site-stick/site.yaml exists already: --force replaces it", "site-stick/site.minisig exists already")
	// What others could read is replaced, not written into.
	if err := os.Chmod(filepath.Join(c.dir, "site-stick", "site.yaml"), 0o644); err != nil {
		t.Fatal(err)
	}
	c.run(0, "site", "sign", "site.yaml", "--key", "office.key", "--ignition", "more.ign", "--force")
	wantSigned("site-stick", "config.ign", "site.yaml")
	if st, err := os.Stat(filepath.Join(c.dir, "site-stick", "site.yaml")); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the stick's Site has mode %v, %v", st.Mode(), err)
	}
	// What is left of a former site would be read, and spoil the signature.
	c.run(1, "site", "sign", "site.yaml", "--key", "office.key", "--force")
	c.want(c.err, "site-stick/config.ign is not part of this Site, so the signature would not match: remove it")
	c.run(1, "site", "sign", "site.yaml", "--key", "office.key", "--output", ".", "--force")
	c.want(c.err, "site.yaml would be replaced by what is made of it: name another directory")

	// A password comes from the environment or standard input.
	c.runIn(t.Context(), keyPassword+"\n", 0, "site", "sign", "site.yaml", "--key", "locked.key", "--output", "in")
	wantSigned("in", "site.yaml")
	c.runIn(t.Context(), keyPassword+"!\n", 1, "site", "sign", "site.yaml", "--key", "locked.key", "--output", "no")
	c.want(c.err, "reading the key locked.key: the password is wrong, or the file is damaged")
	c.runIn(t.Context(), "", 1, "site", "sign", "site.yaml", "--key", "locked.key", "--output", "no")
	c.want(c.err, "reading the password of locked.key: there is none: put it into EDGEBAKE_KEY_PASSWORD, or onto standard input")
	c.runIn(t.Context(), site, 1, "site", "sign", "-", "--key", "locked.key", "--output", "no")
	c.want(c.err, "put the password into EDGEBAKE_KEY_PASSWORD")
	t.Setenv("EDGEBAKE_KEY_PASSWORD", keyPassword)
	c.runIn(t.Context(), site, 0, "site", "sign", "-", "--key", "locked.key", "--output", "env")
	wantSigned("env", "site.yaml")

	// Nothing is written before all is well.
	c.file("office.pub", "untrusted comment: minisign public key 454B414245474445\n"+publicKey+"\n")
	c.file("bad.yaml", strings.Replace(site, "berlin-7", "Berlin_7!", 1))
	c.file("hurt.key", strings.Replace(plainKey, "AQIDBAUG", "AQIDBAUH", 1))
	for _, bad := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"site.yaml"}, 2, "requires a key: --key FILE"},
		{[]string{"site.yaml", "--key", "office.pub"}, 1, "reading the key office.pub: it is a public key: name the secret key"},
		{[]string{"site.yaml", "--key", "site.yaml"}, 1, "it is not a minisign secret key"},
		{[]string{"site.yaml", "--key", "hurt.key"}, 1, "reading the key hurt.key: the file is damaged: its halves do not match"},
		{[]string{"site.yaml", "--key", "none.key"}, 1, "none.key"},
		{[]string{"bad.yaml", "--key", "office.key"}, 1, "nodeName"},
	} {
		c.run(bad.code, append(append([]string{"site", "sign"}, bad.args...), "--output", "no")...)
		c.want(c.err, bad.want)
		if strings.Contains(c.err, "AQIDBAU") {
			t.Errorf("a secret key is quoted: %s", c.err)
		}
	}
	if _, err := os.Stat("no"); !os.IsNotExist(err) {
		t.Error("something was written before all was well")
	}
}

// TestSiteSignForTheRealMinisign: minisign itself verifies the signature over
// the list that docs/security.md describes, made here by hand.
func TestSiteSignForTheRealMinisign(t *testing.T) {
	minisign := desk.NeedProgram(t, "minisign", "minisign")
	sum := desk.NeedProgram(t, "sha256sum", "coreutils")
	c := newCLI(t)
	c.file("site.yaml", site)
	c.file("more.ign", `{"ignition":{"version":"3.5.0"}}`)
	if out, err := exec.Command(minisign, "-G", "-W", "-s", "office.key", "-p", "office.pub").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	c.run(0, "site", "sign", "site.yaml", "--key", "office.key", "--ignition", "more.ign", "--output", "stick")
	list := "edgebake site 1\n2 files\n"
	for _, name := range []string{"config.ign", "site.yaml"} {
		out, err := exec.Command(sum, filepath.Join("stick", name)).Output()
		if err != nil {
			t.Fatal(err)
		}
		list += fmt.Sprintf("%d %s %s\n", len(name), name, strings.Fields(string(out))[0])
	}
	c.file("list", list)
	out, err := exec.Command(minisign, "-V", "-p", "office.pub", "-x", "stick/site.minisig", "-m", "list").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "Trusted comment: timestamp:") {
		t.Errorf("%v: %s", err, out)
	}
}

// TestImageCarriesItsKeys: what the Image says of sticks is what first boot
// reads of it.
func TestImageCarriesItsKeys(t *testing.T) {
	c := newCLI(t)
	c.project(func(s string) string {
		return s + "sites: {removable: signed, keys: [" + publicKey + "], notBefore: 2026-11-05T12:00:00Z}\n"
	})
	c.run(0, "build", "image.yaml")
	c.run(0, "inspect", "tiny.raw")
	c.want(c.out, "sticks      signed; keys 454B414245474445, signed since 2026-11-05T12:00:00Z")
	c.run(0, "inspect", "tiny.raw", "--output", "json")
	var got media.Info
	if err := json.Unmarshal([]byte(c.out), &got); err != nil {
		t.Fatal(err)
	}
	if got.Image.SitesNotBefore != time.Date(2026, 11, 5, 12, 0, 0, 0, time.UTC).Unix() {
		t.Errorf("image.json says %d", got.Image.SitesNotBefore)
	}
	if got.Image.Removable != "signed" || !slices.Equal(got.Image.SiteKeys, []string{publicKey}) {
		t.Errorf("image.json says %q, %q", got.Image.Removable, got.Image.SiteKeys)
	}
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

// TestStickWithoutRoom: a stick that is full is named, with the fix.
func TestStickWithoutRoom(t *testing.T) {
	desk.NeedRoot(t, "it mounts a small tmpfs")
	c := newCLI(t)
	c.file("office.key", plainKey)
	c.file("site.yaml", site)
	if err := os.Mkdir("small", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", "small", "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount("small", 0) })
	if f, err := os.Create("small/ballast"); err != nil {
		t.Fatal(err)
	} else {
		_, _ = f.Write(make([]byte, 1<<20))
		f.Close()
	}
	c.run(1, "site", "sign", "site.yaml", "--key", "office.key", "-o", "small")
	c.want(c.err, "edgebake: writing small/site.yaml: no space left on device: directory small is full; make room or write elsewhere")
	if left, err := os.ReadDir("small"); len(left) != 1 || err != nil {
		t.Errorf("%v, %v", left, err)
	}
}
