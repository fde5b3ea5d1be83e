package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	agelib "filippo.io/age"
	"filippo.io/age/armor"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
)

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

// TestInventoryOntoAnImage stamps all sites into one image, and each into a
// slot of its own, which then is written into an image.
func TestInventoryOntoAnImage(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.run(0, "build", "image.yaml", "--output", "g.raw")
	c.file("inventory.yaml", inventory)
	c.run(0, "validate", "inventory.yaml")

	c.run(0, "stamp", "g.raw", "inventory.yaml", "--output", "all.raw")
	c.want(c.out, "stamped all.raw", "inventory.yaml (2 sites)")
	c.run(0, "inspect", "all.raw")
	c.want(c.out, "slot        inventory of 2 Sites, stamped ")
	c.run(0, "inspect", "all.raw", "-o", "json")
	var told struct{ Slot media.SlotState }
	if err := json.Unmarshal([]byte(c.out), &told); err != nil || told.Slot.Sites != 2 || told.Slot.State != media.SlotInventory {
		t.Errorf("%+v, %v", told.Slot, err)
	}
	info, err := media.Inspect("all.raw")
	if err != nil || info.Slot.State != media.SlotInventory {
		t.Fatalf("%+v, %v", info.Slot, err)
	}

	c.run(0, "stamp", "g.raw", "inventory.yaml", "--slots", "-o", "out")
	c.want(c.out, "2 slots in out")
	got, err := media.ReadSlotFile("out/paris.slot")
	if err != nil {
		t.Fatal(err)
	}
	site, err := configs.ParseSite("s", got.Files[ondisk.SlotSite])
	if err != nil || site.NodeName != "paris" || site.Credentials.Token.Reveal() != "fedcba.fedcba9876543210" {
		t.Errorf("%+v, %v", site, err)
	}
	if b, err := os.ReadFile("out/paris.slot"); err != nil || bytes.Contains(b, []byte("berlin")) || bytes.Contains(b, []byte("abcdef.0123456789abcdef")) {
		t.Errorf("the slot of one site holds another's (%v)", err)
	}
	c.run(0, "stamp", "g.raw", "--slot", "out/paris.slot", "-o", "paris.raw")
	info, err = media.Inspect("paris.raw")
	if err != nil || info.Slot.State != media.SlotSite || info.Slot.Site.NodeName != "paris" || info.Slot.Golden == "" {
		t.Errorf("%+v, %v", info.Slot, err)
	}
	c.run(0, "stamp", "g.raw", "inventory.yaml", "--each", "-o", "copies")
	for _, dir := range []string{"copies", "gone/"} {
		c.run(2, "stamp", "g.raw", "inventory.yaml", "-o", dir)
		c.want(c.err, "--output "+dir+": it is a directory: name a file in it, or write a copy or a slot for each Site into it: --each, --slots")
	}
	if entries, err := os.ReadDir("copies"); err != nil || len(entries) != 2 || entries[0].Name() != "berlin.raw" {
		t.Errorf("%v, %v", entries, err)
	}

	c.run(1, "stamp", "g.raw", "inventory.yaml", "--slots", "-o", "out")
	c.want(c.err, "nothing was written", "Site berlin: out/berlin.slot exists", "Site paris: out/paris.slot exists")
	many := inventory
	for i := range 40 {
		many += fmt.Sprintf("  - {name: shop-%d, match: {serial: PF3X%d}}\n", i, i)
	}
	c.file("many.yaml", many)
	c.run(0, "stamp", "g.raw", "many.yaml", "--slots", "-o", "many")
	c.run(1, "stamp", "g.raw", "many.yaml", "--slots", "-o", "many")
	c.want(c.err, "nothing was written: directory many has the files of 42 of the 42 Sites already: choose another directory, or --force to replace them")
	if n := strings.Count(c.err, "\n"); n != 1 {
		t.Errorf("one thing takes %d lines:\n%s", n, c.err)
	}
	c.run(1, "stamp", "g.raw", "many.yaml", "--slots", "-o", "g.raw/x")
	c.want(c.err, "nothing was written: making directory g.raw/x: there is a file of that name: name another directory")
	for _, args := range [][]string{{"inspect"}, {"verify"}, {"stamp", "inventory.yaml"}} {
		args = append([]string{args[0], "out/paris.slot"}, args[1:]...)
		c.run(1, args...)
		c.want(c.err, "not an edgebake image: it is a slot (edgebake stamp --slots): edgebake stamp IMAGE --slot FILE writes it into an image or disk")
	}
	c.disk("disk", 8<<30)
	for _, args := range [][]string{{"stamp", "g.raw", "out/paris.slot"}, {"flash", "g.raw", "disk", "--site", "out/paris.slot"}, {"preflight", "out/paris.slot"}, {"validate", "out/paris.slot"}} {
		c.run(1, args...)
		c.want(c.err+c.out, "out/paris.slot is a slot (edgebake stamp --slots): edgebake stamp IMAGE --slot FILE writes it into an image or disk")
	}
	const oneSite = "apiVersion: edgebake.io/v1alpha1\nkind: Site\nmasters: [192.0.2.1:6443]\nunsafeSkipCAVerification: true\ncredentials: {token: abcdef.0123456789abcdef}\nnodeName: a\n"
	c.runIn(t.Context(), oneSite, 0, "stamp", "g.raw", "-", "-o", "in.raw")
	c.want(c.out, "with standard input\n")
	c.runIn(t.Context(), oneSite, 1, "stamp", "g.raw", "-", "--each", "-o", "in")
	c.want(c.err, "standard input is a Site, not an Inventory: stamp it with edgebake stamp g.raw - --output FILE")
	c.runIn(t.Context(), oneSite, 0, "flash", "g.raw", "disk", "--site", "-", "--yes")
	c.want(c.out, "flashed disk with g.raw and standard input:")
	c.run(1, "stamp", "g.raw", "--slot", "out/rome.slot", "-o", "x.raw")
	c.want(c.err, "out/rome.slot: no such file or directory: edgebake stamp --slots makes slots")
	c.file("bare.yaml", strings.Replace(inventory, "{token: abcdef.0123456789abcdef}", "{}", 1))
	const orElsewhere = "defaults.credentials.token: is required; write it there, or give it with --token-file FILE or $EDGEBAKE_TOKEN"
	c.run(1, "stamp", "g.raw", "bare.yaml", "-o", "x.raw")
	c.want(c.err, strings.Replace(orElsewhere, "defaults", "sites[0]", 1))
	c.file("some.yaml", strings.Replace(inventory, "{token: abcdef.0123456789abcdef}", `{token: ""}`, 1))
	c.run(1, "stamp", "g.raw", "some.yaml", "-o", "x.raw")
	c.want(c.err, "defaults.credentials.token: is required (in 1 of 2 Sites, the first is sites[0]); write it there, or give it with --token-file FILE")
	c.run(1, "preflight", "bare.yaml", "--offline")
	c.want(c.out, "to fix: write it there, or give it with --token-file FILE or $EDGEBAKE_TOKEN")
	var labels []string
	for i := range 60 {
		labels = append(labels, fmt.Sprintf("shop.example.com/label-%d: a%060d", i, i))
	}
	for i := range 800 {
		many += fmt.Sprintf("  - {name: more-%d, match: {serial: PF4X%d}, labels: {%s}}\n", i, i, strings.Join(labels, ", "))
	}
	c.file("chain.yaml", many)
	for _, args := range [][]string{{"stamp", "g.raw", "chain.yaml", "-o", "x.raw"}, {"flash", "g.raw", "disk", "--inventory", "chain.yaml", "--yes"}} {
		c.disk("disk", 8<<30)
		c.run(1, args...)
		c.want(c.err, "chain.yaml: takes ", " MiB in a slot, which has room for 4 MiB of it: split the inventory, or stamp each Site onto a copy of its own (edgebake stamp --each)")
	}
	c.run(1, "stamp", "g.raw", "--slot", "inventory.yaml", "-o", "x.raw")
	c.want(c.err, "reading slot inventory.yaml: it has", "a slot has 16777216")
	c.run(2, "stamp", "g.raw", "inventory.yaml", "--each")
	c.run(2, "stamp", "g.raw", "--slots", "inventory.yaml")
	c.run(2, "stamp", "g.raw", "inventory.yaml", "--slot", "out/paris.slot")
	c.run(2, "stamp", "g.raw")
}

// TestSecretsBesideTheDocument: a token from a file, the environment and
// standard input, into a Site and an Inventory.
func TestSecretsBesideTheDocument(t *testing.T) {
	c := newCLI(t)
	bare := strings.Replace(site, "credentials:\n  token: abcdef.0123456789abcdef\n", "", 1)
	c.file("bare.yaml", bare)
	c.file("inventory.yaml", strings.Replace(inventory, "  credentials: {token: abcdef.0123456789abcdef}\n", "", 1))
	c.file("token", "aaaaaa.aaaaaaaaaaaaaaaa\r\n")
	c.file("key", plainKey)
	token := func() string {
		doc := c.stick("out")
		if b := doc.Files[ondisk.SlotSite]; b != nil {
			s, err := configs.ParseSite("s", b)
			if err != nil {
				t.Fatal(err)
			}
			return s.Credentials.Token.Reveal()
		}
		inv, err := configs.ParseInventory("i", doc.Files[ondisk.SlotInventory])
		if err != nil {
			t.Fatal(err)
		}
		return inv.Sites[0].Credentials.Token.Reveal() + " " + inv.Sites[1].Credentials.Token.Reveal()
	}
	sign := func(stdin string, args ...string) {
		t.Helper()
		os.RemoveAll("out")
		c.runIn(t.Context(), stdin, 0, append([]string{"site", "sign", "--key", "key", "-o", "out"}, args...)...)
	}
	c.run(1, "validate", "bare.yaml")
	c.want(c.err, "credentials.token: is required")
	for name, args := range map[string][]string{"file": {"bare.yaml", "--token-file", "token"}, "stdin": {"bare.yaml", "--token-file", "-"}, "the flag wins": {"bare.yaml", "--token-file", "token"}} {
		sign("aaaaaa.aaaaaaaaaaaaaaaa\n", args...)
		if got := token(); got != "aaaaaa.aaaaaaaaaaaaaaaa" {
			t.Errorf("%s: %s", name, got)
		}
	}
	sign("", "inventory.yaml", "--token-file", "token")
	if got := token(); got != "aaaaaa.aaaaaaaaaaaaaaaa aaaaaa.aaaaaaaaaaaaaaaa" {
		t.Error(got)
	}
	t.Setenv(tokenVariable, "bbbbbb.bbbbbbbbbbbbbbbb")
	sign("", "inventory.yaml") // only where there is none
	if got := token(); got != "bbbbbb.bbbbbbbbbbbbbbbb fedcba.fedcba9876543210" {
		t.Error(got)
	}
	c.run(0, "validate", "bare.yaml", "inventory.yaml")
	t.Setenv(tokenVariable, "s3cret")
	for _, doc := range []string{"bare.yaml", "inventory.yaml"} {
		c.run(1, "validate", doc)
		c.want(c.err, "is not a bootstrap token")
		if strings.Contains(c.err, "s3cret") {
			t.Errorf("the token is quoted: %s", c.err)
		}
	}
	// The document is not to blame for it.
	c.file("alone.yaml", site)
	t.Setenv(tokenVariable, "")
	c.file("bad", "s3cret\n")
	for _, doc := range []string{"bare.yaml", "alone.yaml"} {
		c.run(1, "validate", doc, "--token-file", "bad")
		c.want(c.err, "the given token is not a bootstrap token: ", "; it comes from --token-file or $EDGEBAKE_TOKEN")
		if strings.Contains(c.err, "s3cret") || strings.Contains(c.err, "yaml:") {
			t.Errorf("%s", c.err)
		}
	}
	c.file("empty", "\n")
	c.run(1, "validate", "bare.yaml", "--token-file", "empty")
	c.want(c.err, "it is empty")
	c.run(1, "validate", "bare.yaml", "--token-file", "gone")
	c.want(c.err, "gone")
}

// TestEncryptedDocuments: with a key, a passphrase, armored or not, and what is
// said where it cannot be decrypted.
func TestEncryptedDocuments(t *testing.T) {
	c := newCLI(t)
	id, err := agelib.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	other, err := agelib.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	pass, err := agelib.NewScryptRecipient("open sesame")
	if err != nil {
		t.Fatal(err)
	}
	pass.SetWorkFactor(10)
	encrypt := func(name, doc string, armored bool, to agelib.Recipient) {
		t.Helper()
		var b bytes.Buffer
		out := armor.NewWriter(&b)
		var w interface {
			Write([]byte) (int, error)
			Close() error
		}
		var err error
		if armored {
			w, err = agelib.Encrypt(out, to)
		} else {
			w, err = agelib.Encrypt(&b, to)
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(doc)); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if armored {
			if err := out.Close(); err != nil {
				t.Fatal(err)
			}
		}
		c.file(name, b.String())
	}
	c.file("id.txt", "# a comment\n"+id.String()+"\n")
	c.file("other.txt", other.String()+"\n")
	encrypt("site.yaml.age", site, false, id.Recipient())
	encrypt("inventory.yaml.age", inventory, true, id.Recipient())
	encrypt("pass.age", site, false, pass)
	c.run(0, "validate", "site.yaml.age", "inventory.yaml.age", "--identity", "id.txt")
	b, err := os.ReadFile(filepath.Join(c.dir, "site.yaml.age"))
	if err != nil {
		t.Fatal(err)
	}
	c.runIn(context.Background(), string(b), 0, "render", "--ignition", "-", "--identity", "id.txt")
	c.run(1, "validate", "site.yaml.age", "--identity", "other.txt")
	c.want(c.err, "opening site.yaml.age: other.txt is not a key that it was encrypted to")
	c.run(1, "validate", "pass.age")
	c.want(c.err, "opening pass.age: it is encrypted: name an age identity file")
	t.Setenv(passphraseVariable, "open sesame")
	c.run(0, "validate", "pass.age")
	t.Setenv(passphraseVariable, "wrong")
	c.run(1, "validate", "pass.age")
	t.Setenv(identityVariable, "id.txt")
	c.run(0, "validate", "site.yaml.age")
	c.file("cut.age", string(b[:len(b)-20]))
	c.run(1, "validate", "cut.age")
	c.want(c.err, "opening cut.age: ", "cut short or damaged")
	c.file("nonsense.txt", "AGE-SECRET-KEY-1QQQ\n")
	c.run(1, "validate", "site.yaml.age", "--identity", "nonsense.txt")
	if strings.Contains(c.err, "1QQQ") {
		t.Errorf("a key is quoted: %s", c.err)
	}
	c.file("sops.yaml", site+"users: ENC[AES256_GCM,data:x]\nsops:\n    version: 3.9.0\n")
	c.run(1, "validate", "sops.yaml")
	c.want(c.err, "sops.yaml is encrypted by SOPS: pipe it in decrypted: sops --decrypt sops.yaml |")
}

// TestInventoryImport makes an Inventory of a table, which names files as the
// template does.
func TestInventoryImport(t *testing.T) {
	c := newCLI(t)
	if err := os.MkdirAll("sites", 0o755); err != nil {
		t.Fatal(err)
	}
	c.file("sites/site.yaml", site+"ignitionFile: more.ign\n")
	c.file("sites/more.ign", `{"ignition":{"version":"3.4.0"}}`)
	c.file("stores.csv", "\ufeffS/N;Store;Manager\r\nSN1;berlin;Anna\r\nSN2;paris;\"Bo; Co\"\r\n")
	c.run(1, "inventory", "import", "stores.csv", "--template", "sites/site.yaml", "-o", "inventory.yaml")
	c.want(c.err, `stores.csv:1: column "S/N": `, `stores.csv:1: column "Manager": `)
	ok := []string{"inventory", "import", "stores.csv", "--template", "sites/site.yaml", "--map", "S/N=serial", "--map", "Manager=-", "-o", "inventory.yaml"}
	c.run(1, ok...)
	c.want(c.err, "sites/site.yaml: nodeName: gives 2 machines the node name berlin-7: remove it")
	c.file("sites/site.yaml", strings.Replace(site, "nodeName: berlin-7\n", "ignitionFile: more.ign\n", 1))
	c.run(0, ok...)
	c.want(c.out, "wrote inventory.yaml: 2 sites")
	if fi, err := os.Stat("inventory.yaml"); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	c.run(0, "validate", "inventory.yaml")
	template := strings.Replace(site, "berlin-7", `"shop-{{.MAC}}"`, 1)
	c.runIn(t.Context(), template, 0, "inventory", "import", "stores.csv", "--template", "-", "--map", "S/N=serial", "--map", "Manager=-")
	c.want(c.err, "WARNING: nodeName shop-{{.MAC}} of standard input is left out")
	c.run(1, ok...)
	c.want(c.err, "inventory.yaml exists; --force replaces it")
	c.run(2, "inventory", "import", "stores.csv")
	c.run(2, "inventory", "import", "stores.csv", "--template", "sites/site.yaml", "--map", "x")
	c.run(1, "inventory", "import", "gone.csv", "--template", "sites/site.yaml")
	if strings.Contains(c.err, "edgebake init") {
		t.Errorf("init writes no table: %s", c.err)
	}
	c.want(c.err, "gone.csv")
}

// TestPreflightOffline: a table with what is wrong and its fix, and the exit
// code.
func TestPreflightOffline(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.run(0, "build", "image.yaml", "--output", "g.raw")
	c.file("inventory.yaml", inventory)
	c.run(0, "preflight", "inventory.yaml", "--image", "g.raw", "--offline")
	c.want(c.out, "✓ names and matches", "✓ networks", "✓ VIP", "✓ token form", "✓ CA", "✓ image")
	c.file("bad.yaml", strings.NewReplacer("fedcba.fedcba9876543210", "hunter2", "SN1", "Default string").Replace(inventory)+
		"  - {name: paris, match: {serial: SN3}, vip: 10.1.1.9, network: {interfaces: [{name: en*, addresses: [10.1.1.2/24], gateway: 10.2.2.2}]}}\n")
	c.run(1, "preflight", "bad.yaml", "--offline")
	c.want(c.out, "✗ names and matches", "bad.yaml:8:36: sites[0].match.serial: ", "✗ networks", "✗ VIP", "✗ token form", "✓ CA", "to fix: ")
	c.want(c.err, "preflight of bad.yaml: ", "checks failed")
	if strings.Contains(c.out+c.err, "hunter2") {
		t.Errorf("a secret is quoted: %s", c.out)
	}
	c.run(1, "preflight", "bad.yaml", "--offline", "-o", "json")
	var report struct {
		Checks []struct{ Name, State, Fix string }
	}
	if err := json.Unmarshal([]byte(c.out), &report); err != nil || len(report.Checks) < 6 {
		t.Errorf("%v: %s", err, c.out)
	}
	c.file("torn.yaml", site+"network: {interfaces: [\n")
	c.run(1, "preflight", "torn.yaml", "--offline")
	c.want(c.out, "✗ document", "not YAML", "– not checked: names and matches, networks, VIP, token form, CA\n")
	c.file("other.yaml", strings.Replace(site, "kind: Site", "kind: Sight", 1))
	c.run(1, "preflight", "other.yaml", "--offline")
	if strings.Contains(c.out, "✓") {
		t.Errorf("what was not looked at is called right:\n%s", c.out)
	}
	c.file("arm.yaml", site+"arch: arm64\n")
	c.run(1, "preflight", "arm.yaml", "--image", "g.raw", "--offline")
	c.want(c.out, "✗ image", "the Site is for arm64")
	c.run(2, "preflight", "arm.yaml", "--offline", "--kubeconfig", "x")
	c.run(1, "preflight", "arm.yaml", "--kubeconfig", "gone")
	c.run(1, "preflight", "gone.yaml")
	c.want(c.err, "gone.yaml")
}

// TestSiteOfAnInventoryTooLarge: a file that defaults name is in the inventory
// once, and in each machine's own site.
func TestSiteOfAnInventoryTooLarge(t *testing.T) {
	c := newCLI(t)
	c.file("large.ign", `{"ignition":{"version":"3.4.0"},"storage":{"files":[{"path":"/etc/large","contents":{"source":"data:,`+strings.Repeat("x", 300<<10)+`"}}]}}`)
	c.file("inventory.yaml", strings.Replace(inventory, "sites:\n", "  ignitionFile: large.ign\nsites:\n", 1))
	c.file("key", plainKey)
	c.runIn(t.Context(), "", 1, "site", "sign", "--key", "key", "-o", "out", "inventory.yaml")
	c.want(c.err, "inventory.yaml:9:", "sites[0]", "inventory.yaml:10:", "sites[1]", "of at most 262144 bytes", "--ignition")
	c.runIn(t.Context(), "", 1, "validate", "inventory.yaml")
	c.want(c.err, "sites[0]", "of at most 262144 bytes")
	c.file("inventory.yaml", inventory)
	c.runIn(t.Context(), "", 0, "site", "sign", "--key", "key", "-o", "out", "inventory.yaml", "--ignition", "large.ign")
}
