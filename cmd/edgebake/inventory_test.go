package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	agelib "filippo.io/age"
	"filippo.io/age/armor"

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
