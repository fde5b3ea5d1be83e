package main

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/disktest"
)

// cli runs the program in a directory of its own.
type cli struct {
	t        *testing.T
	dir      string
	out, err string
}

func newCLI(t *testing.T) *cli {
	t.Helper()
	c := &cli{t: t, dir: disktest.Scratch(t)}
	t.Setenv("EDGEBAKE_CACHE", filepath.Join(disktest.Scratch(t), "cache"))
	t.Chdir(c.dir)
	return c
}

// run wants the exit code.
func (c *cli) run(code int, args ...string) {
	c.t.Helper()
	c.runIn(c.t.Context(), "", code, args...)
}

func (c *cli) runIn(ctx context.Context, stdin string, code int, args ...string) {
	c.t.Helper()
	var out, err bytes.Buffer
	got := run(ctx, args, streams{In: strings.NewReader(stdin), Out: &out, Err: &err})
	c.out, c.err = out.String(), err.String()
	if got != code {
		c.t.Fatalf("edgebake %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), got, code, c.out, c.err)
	}
}

func (c *cli) want(where string, parts ...string) {
	c.t.Helper()
	for _, p := range parts {
		if !strings.Contains(where, p) {
			c.t.Errorf("output lacks %q:\n%s", p, where)
		}
	}
}

func (c *cli) project(edit func(string) string) {
	c.t.Helper()
	if err := buildtest.Write(c.dir, buildtest.Base(), edit); err != nil {
		c.t.Fatal(err)
	}
}

const site = `apiVersion: edgebake.io/v1alpha1
kind: Site
masters: ["10.0.0.1:6443"]
credentials:
  token: abcdef.0123456789abcdef
caCertHashes: ["sha256:0000000000000000000000000000000000000000000000000000000000000000"]
nodeName: berlin-7
`

func (c *cli) file(name, body string) {
	c.t.Helper()
	name = filepath.Join(c.dir, name)
	err := os.MkdirAll(filepath.Dir(name), 0o755)
	if err == nil {
		err = os.WriteFile(name, []byte(body), 0o644)
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

func TestChain(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.file("site.yaml", site)
	c.run(0, "validate", "image.yaml", "site.yaml")
	c.want(c.out, "image.yaml: ok", "site.yaml: ok")
	c.run(0, "plan", "image.yaml")
	c.want(c.out, "image  tiny, amd64, date 2026-01-01T00:00:00Z\n  base ", "  programs/kubelet\n", "  edgebake's own\n")
	text := c.out
	c.run(0, "plan", "image.yaml", "-o", "json")
	var plan struct{ ID string }
	if err := json.Unmarshal([]byte(c.out), &plan); err != nil || len(plan.ID) != 64 {
		t.Fatalf("plan: %v\n%s", err, c.out)
	}
	c.want(text, "plan   "+plan.ID+"\n")
	c.run(0, "build", "image.yaml")
	c.want(c.out, "tiny.raw: amd64, Kubernetes v1.36.3", plan.ID, "Next: edgebake stamp")
	c.want(c.err, "resolve: ", "images: 1 container image\n", "write: done")
	for _, f := range []string{"tiny.raw", "tiny.report.json", "tiny.sbom.spdx.json", "image.lock"} {
		if _, err := os.Stat(f); err != nil {
			t.Error(err)
		}
	}
	c.run(1, "build", "image.yaml")
	c.want(c.err, "tiny.raw exists; --force replaces it")
	c.run(0, "build", "image.yaml", "--locked", "--output", "again.raw", "--json")
	var last struct {
		State, Output string
		Report        struct{ Plan string }
	}
	lines := strings.Split(strings.TrimSpace(c.out), "\n")
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || last.State != "result" || last.Report.Plan != plan.ID {
		t.Errorf("the last line of --json: %v\n%s", err, lines[len(lines)-1])
	}
	for _, l := range lines {
		if !json.Valid([]byte(l)) {
			t.Errorf("not JSON: %s", l)
		}
	}
	if n := strings.Count(c.out, `"state":"progress"`); n > 20 {
		t.Errorf("%d lines of progress for an instant", n)
	}

	c.run(0, "inspect", "tiny.raw", "--images")
	c.want(c.out, "container images: 1 (verified)")
	c.run(0, "inspect", "tiny.raw", "--verify")
	c.want(c.out, "slot        golden", "(verified)", "ROOT-A", "edgebake.test/pause:1", "v1.36.3", plan.ID)
	c.run(0, "stamp", "tiny.raw", "site.yaml", "--output", "berlin.raw")
	if c.err != "" {
		t.Errorf("stamp says %q", c.err)
	}
	c.want(c.out, "stamped berlin.raw (tiny, Kubernetes v1.36.3) with site.yaml")
	c.run(0, "inspect", "berlin.raw")
	c.want(c.out, "slot        site, stamped ", "\nsite        ", ", API servers ")
	c.run(0, "stamp", "tiny.raw", "site.yaml")
	c.want(c.err, "stamped in place: tiny.raw now holds the Site's token; --output makes a copy\n")
	c.run(0, "stamp", "tiny.raw", "site.yaml") // it is golden no longer
	if c.err != "" {
		t.Errorf("stamp says %q", c.err)
	}
	c.run(0, "inspect", "tiny.raw", "--output", "json")
	var info struct{ Slot struct{ State string } }
	if err := json.Unmarshal([]byte(c.out), &info); err != nil || info.Slot.State != "site" {
		t.Errorf("slot is %q, %v", info.Slot.State, err)
	}
	if strings.Contains(c.out, "0123456789abcdef\"") || strings.Contains(c.out, "abcdef.0123") {
		t.Error("inspect shows the token")
	}
	c.run(0, "images", "image.yaml")
	c.want(c.out, "edgebake.test/pause:1  sha256:")
	c.run(0, "images", "image.yaml", "-o", "json")
	if !json.Valid([]byte(c.out)) {
		t.Errorf("not JSON: %s", c.out)
	}
	c.run(0, "render", "--ignition", "site.yaml")
	c.want(c.out, `"version": "3.5.0"`, "/etc/hostname")
	if strings.Contains(c.out, "abcdef.") {
		t.Error("render shows the token")
	}
}

func TestBadDocuments(t *testing.T) {
	c := newCLI(t)
	c.project(func(s string) string { return strings.Replace(s, "name: tiny", "nmae: tiny", 1) + "disk: {root: 3}\n" })
	c.file("site.yaml", strings.Replace(site, "10.0.0.1:6443", "10.0.0.1 :6443", 1))
	for _, args := range [][]string{{"build", "image.yaml"}, {"plan", "image.yaml"}, {"images", "image.yaml"}, {"validate", "image.yaml", "site.yaml"}} {
		c.run(1, args...)
		c.want(c.err, "image.yaml:3:1: nmae: unknown field")
		for _, l := range strings.Split(strings.TrimSpace(c.err), "\n") {
			if !regexp.MustCompile(`^(image|site)\.yaml:\d+:\d+: `).MatchString(l) {
				t.Errorf("%v: not FILE:LINE:COL: %q", args, l)
			}
		}
	}
	c.want(c.err, "site.yaml:3:")
	c.run(1, "validate", "nowhere.yaml", "image.yaml")
	c.want(c.err, "nowhere.yaml: no such file or directory; `edgebake init` writes", "nmae")
	c.runIn(t.Context(), site, 0, "validate", "-")
	c.want(c.out, "standard input: ok")
	c.runIn(t.Context(), strings.Replace(site, "masters", "mastres", 1), 1, "validate", "-")
	c.want(c.err, `standard input:3:1: mastres: unknown field; did you mean "masters"?`)
}

func TestBadImages(t *testing.T) {
	c := newCLI(t)
	c.file("site.yaml", site)
	c.file("junk.raw", strings.Repeat("junk", 100000))
	c.file("empty.raw", "")
	for _, image := range []string{"junk.raw", "empty.raw", "nowhere.raw"} {
		for _, args := range [][]string{{"inspect", image}, {"stamp", image, "site.yaml"}, {"boot", image}} {
			before, _ := os.ReadFile(image)
			c.run(1, args...)
			c.want(c.err, image)
			if image != "nowhere.raw" {
				c.want(c.err, "not an edgebake image", "name one that edgebake build made")
			}
			if after, _ := os.ReadFile(image); !bytes.Equal(before, after) {
				t.Errorf("%v changed the file", args)
			}
		}
	}
	c.project(nil)
	c.run(0, "build", "image.yaml")
	c.run(0, "build", "image.yaml", "--output", "tiny.raw.zst", "--force")
	if err := os.Rename("tiny.raw.zst", "packed.raw"); err != nil {
		t.Fatal(err)
	}
	c.run(1, "boot", "packed.raw")
	c.want(c.err, "booting packed.raw: it is compressed; zstd -d packed.raw -o")
	c.run(1, "stamp", "tiny.raw", "site.yaml", "--output", "packed.raw")
	c.want(c.err, "packed.raw: file already exists: choose another name, or --force to replace it")
	c.run(1, "build", "image.yaml", "--output", "no/where.raw")
	c.want(c.err, "output no/where.raw: no such file or directory: make directory no first")
	c.run(1, "build", "image.yaml", "--output", "site.yaml/where.raw")
	c.want(c.err, "output site.yaml/where.raw: not a directory")
	c.run(1, "stamp", "tiny.raw", "site.yaml", "--output", "no/where.raw")
	c.want(c.err, "creating no/where.raw: no such file or directory: make directory no first")
	// Damage: the slot is healed by stamping, a file system by nothing.
	c.run(0, "build", "image.yaml", "--output", "hurt.raw")
	hurt := func(label string) {
		c.run(0, "inspect", "hurt.raw", "--output", "json")
		var info media.Info
		if err := json.Unmarshal([]byte(c.out), &info); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile("hurt.raw", os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for _, p := range info.Partitions {
			if p.Label == label {
				if _, err := f.WriteAt(bytes.Repeat([]byte("junk"), 1<<10), p.Start); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	hurt("EDGEBAKE")
	c.run(0, "inspect", "hurt.raw")
	c.want(c.out, "slot        damaged: ", ": stamp the image again\n")
	c.run(1, "inspect", "hurt.raw", "--verify")
	c.want(c.err, "stamp the image again. The golden digest to compare with was there too")
	c.run(0, "stamp", "hurt.raw", "site.yaml")
	c.run(1, "inspect", "hurt.raw", "--verify")
	c.want(c.err, "take a copy of the golden image, or build it again")
	hurt("ROOT-A")
	c.run(0, "inspect", "hurt.raw")
	c.want(c.out, "slot        site", "  damaged: opening ext4 file system")
	hurt("ESP")
	for _, args := range [][]string{{"inspect", "hurt.raw"}, {"stamp", "hurt.raw", "site.yaml"}, {"boot", "hurt.raw"}} {
		c.run(1, args...)
		c.want(c.err, "hurt.raw: not an edgebake image: reading partition ESP: ", "it is damaged, copy or build it again")
	}
	c.file("edge.yaml", site+"nodeType: edge\nnodePool: shops\narch: arm64\n")
	c.run(1, "stamp", "tiny.raw", "edge.yaml")
	c.want(c.err, `cannot make a node of type "edge", only native`, "the Site is for arm64, the image for amd64")
	c.file("later.yaml", strings.Replace(site, "v1alpha1", "v2", 1))
	c.run(1, "stamp", "tiny.raw", "later.yaml")
	c.want(c.err, `later.yaml:1:13: apiVersion: "edgebake.io/v2" is unknown`)
	st, err := os.Stat("tiny.raw")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate("tiny.raw", st.Size()/2); err != nil {
		t.Fatal(err)
	}
	c.run(1, "inspect", "tiny.raw")
	c.want(c.err, "tiny.raw")
	c.run(1, "stamp", "tiny.raw", "site.yaml")
}

// TestStampSaysWhere: what a Site asks of an image and cannot have there is told
// with file, line and column, as validate does, whichever document says it.
func TestStampSaysWhere(t *testing.T) {
	c := newCLI(t)
	c.project(func(doc string) string {
		return strings.Replace(doc, "  - dir: overlay\n", "  - dir: overlay\n  - dir: accounts\n", 1)
	})
	c.file("accounts/etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
	c.file("accounts/etc/group", "root:x:0:\nmissing:x:7:\n")
	c.run(0, "build", "image.yaml", "--output", "other.raw")
	c.file("accounts/etc/group", "root:x:0:\n")
	c.run(0, "build", "image.yaml")
	doc := site + "users: [{name: ops, groups: [missing]}]\nignitionFile: ign/more.ign\n"
	c.file("site.yaml", doc)
	c.file("ign/more.ign", `{"ignition": {"version": "3.4.0"}, "passwd": {
  "users": [{"name": "two", "groups": ["none"]}]},
  "storage": {"files": [
    {"path": "/etc/passwd", "contents": {"source": "data:,x"}}]}}`)
	line := strings.Count(site, "\n") + 1
	c.run(1, "stamp", "tiny.raw", "site.yaml")
	c.want(c.err, fmt.Sprintf("site.yaml:%d:30: users[0].groups[0]: the image has no group missing", line),
		"ign/more.ign:2:40: passwd.users.0.groups.0: the image has no group none",
		"ign/more.ign:4:6: storage.files.0: /etc/passwd is in the image already")
	c.file("site.yaml", strings.Replace(doc, "ignitionFile: ign/more.ign\n", "", 1))
	c.run(1, "stamp", "tiny.raw", "site.yaml", "--ignition", "ign/more.ign")
	c.want(c.err, "site.yaml:", "ign/more.ign:2:40: passwd.users.0.groups.0")

	c.file("stores.yaml", `apiVersion: edgebake.io/v1alpha1
kind: Inventory
defaults:
  masters: [192.0.2.11:6443]
  unsafeSkipCAVerification: true
  credentials: {token: abcdef.0123456789abcdef}
  users: [{name: ops, groups: [missing]}]
sites:
  - {name: a, match: {serial: SN1}}
  - {name: b, match: {serial: SN2}, arch: arm64}
`)
	for _, args := range [][]string{{"tiny.raw", "stores.yaml"}, {"tiny.raw", "stores.yaml", "--each", "--output", "out"}} {
		c.run(1, append([]string{"stamp"}, args...)...)
		c.want(c.err, "stores.yaml:7:32: defaults.users[0].groups[0]: the image has no group missing", "stores.yaml:10:43: sites[1].arch: the Site is for arm64")
		if strings.Count(c.err, "missing:") > 1 {
			t.Errorf("what all sites share is said for each: %s", c.err)
		}
	}
	// A slot is held against the image that it is written into, not only against
	// the one that it was made for.
	c.file("one.yaml", `apiVersion: edgebake.io/v1alpha1
kind: Inventory
sites:
  - name: a
    match: {serial: SN1}
    masters: [192.0.2.11:6443]
    unsafeSkipCAVerification: true
    credentials: {token: abcdef.0123456789abcdef}
    users: [{name: ops, groups: [missing]}]
`)
	c.run(0, "stamp", "other.raw", "one.yaml", "--slots", "--output", "slots")
	c.run(1, "stamp", "tiny.raw", "--slot", "slots/a.slot")
	c.want(c.err, "slots/a.slot: users[0].groups[0]: the image has no group missing")
}

// What the Site gives yurthub is held against the yurthub of the image.
func TestStampYurthubArgs(t *testing.T) {
	c := newCLI(t)
	c.project(func(doc string) string {
		doc = strings.NewReplacer("v1.36.3", "v1.30.3", "cni:", "  crictl: {version: v1.36.0, source: {file: {dir: programs}}}\ncni:").Replace(doc)
		return doc + "yurthub: {version: v1.6.0, image: {ref: \"edgebake.test/pause:1\", layout: images}}\n"
	})
	c.file("programs/crictl", buildtest.ELF(elf.EM_X86_64))
	c.run(0, "build", "image.yaml")
	edge := site + "nodeType: edge\nnodePool: shops\nyurthub: {extraArgs: [--v=4, --pool-scope-resources=services]}\n"
	c.file("edge.yaml", edge)
	c.run(1, "stamp", "tiny.raw", "edge.yaml")
	c.want(c.err, "edge.yaml:10:30: yurthub.extraArgs[1]: --pool-scope-resources is not a flag of yurthub v1.6.0", "remove it, or build the Image with yurthub v1.6.1 or later")
	c.file("edge.yaml", strings.Replace(edge, "pool-scope-resources=services", "gc-frequency=5", 1))
	c.run(0, "stamp", "tiny.raw", "edge.yaml")
}

func TestUsage(t *testing.T) {
	c := newCLI(t)
	for _, args := range [][]string{
		{"bake"}, {"build"}, {"build", "a", "b"}, {"build", "--colour"}, {"build", "image.yaml", "--update", "--locked"}, {"stamp", "x.raw"}, {"inspect"},
		{"render", "site.yaml"}, {"validate"}, {"init", "x"}, {"version", "-o", "xml"}, {"boot", "x.raw", "--forward", "22"},
		{"boot", "x.raw", "--forward", "70000:22"}, {"boot", "x.raw", "--accel", "xen"}, {"boot", "x.raw", "--memory", "0"}, {"boot", "x.raw", "--memory", "2"},
		{"boot", "x.raw", "--cpus", "-1"}, {"boot", "x.raw", "--disk", "-3"},
	} {
		c.run(2, args...)
		if c.err == "" {
			t.Errorf("%v: no message", args)
		}
	}
	c.run(2, "boot", "x.raw", "--forward", "22", "--cpus", "-1")
	if want := "edgebake: --forward 22: want HOST:GUEST, two ports, like 2222:22\nedgebake: --cpus -1: want 1 or more\n"; c.err != want {
		t.Errorf("%q, want %q", c.err, want)
	}
	for _, args := range [][]string{{"bake"}, {"help", "bake"}, {"help", "cache", "bake"}, {"completion", "bake"}} {
		c.run(2, args...)
		c.want(c.err, `edgebake: unknown command "bake"`, "--help lists them")
	}
	c.run(2, "site", "sing", "site.yaml", "--key", "office.key")
	c.want(c.err, `unknown command "sing"; did you mean "sign"?`)
	c.run(2, "inventory", "imports", "stores.csv")
	c.want(c.err, `unknown command "imports"; did you mean "import"?`)
	for _, args := range [][]string{{"help"}, {"help", "build"}, {"help", "cache", "prune"}, {"completion"}} {
		c.run(0, args...)
		c.want(c.out, "Usage:")
	}
	c.run(0)
	c.want(c.out, "build", "stamp", "completion")
	c.run(0, "completion", "bash")
	c.want(c.out, "edgebake")
	c.run(0, "version")
	c.want(c.out, "edgebake.io/v1alpha1")
	c.run(0, "version", "--output", "json")
	if !json.Valid([]byte(c.out)) {
		t.Error(c.out)
	}
}

// TestInit proves that what init writes is valid, and kept.
func TestInit(t *testing.T) {
	c := newCLI(t)
	c.run(0, "init", "--dir", "new")
	img, err := os.ReadFile("new/image.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := configs.ParseImage("image.yaml", img); err != nil {
		t.Error(err)
	}
	// What only its reader knows is told to be replaced, and nothing else.
	c.run(1, "validate", "new/image.yaml", "new/site.yaml")
	c.want(c.out, "new/image.yaml: ok")
	c.want(c.err, "credentials.token: replace the example", "caCertHashes[0]: replace the example", "users[0].sshAuthorizedKeys[0]: replace the example")
	if n := strings.Count(c.err, "\n") - strings.Count(c.err, " (warning)\n"); n != 3 {
		t.Errorf("%d problems:\n%s", n, c.err)
	}
	for _, name := range []string{"image", "site"} {
		doc, err := os.ReadFile("new/" + name + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		schema, ok := strings.CutPrefix(strings.SplitN(string(doc), "\n", 2)[0], "# yaml-language-server: $schema=")
		if raw, err := os.ReadFile(filepath.Join("new", schema)); !ok || err != nil || !json.Valid(raw) {
			t.Errorf("the schema of %s: %v", name, err)
		}
	}
	c.run(0, "init", "--dir", "new", "--cluster")
	c.want(c.out, "validate "+filepath.Join("new", "cluster.yaml"))
	c.run(1, "validate", "new/cluster.yaml")
	if c.want(c.err, "users[0].sshAuthorizedKeys[0]: replace the example"); strings.Count(c.err, "\n") != 1 {
		t.Error(c.err)
	}
	c.run(1, "init", "--dir", "new", "--cluster")
	c.want(c.err, filepath.Join("new", "cluster.yaml")+" exists")
	c.run(2, "init", "--cluster", "--join", joinLine)
	c.file("new/image.yaml", "mine")
	c.run(1, "init", "--dir", "new")
	c.want(c.err, filepath.Join("new", "image.yaml")+" exists", filepath.Join("new", "site.yaml")+" exists")
	if b, _ := os.ReadFile("new/image.yaml"); string(b) != "mine" {
		t.Error("init replaced a file")
	}
}

const joinLine = "sudo kubeadm join [fd00:7::11]:6443 --token abcdef.0123456789abcdef \\\n\t--discovery-token-ca-cert-hash=sha256:1123456789abcdef0123456789abcdef0123456789abcdef0123456789ABCDEF"

// TestLostResults: what standard output does not take is told, whoever has printed it.
func TestLostResults(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		desk.Lacks(t, "%v", err)
	}
	defer full.Close()
	for _, words := range [][]string{{"version"}, {"schema", "site"}, {"explain", "site"}} {
		var said bytes.Buffer
		if code := run(t.Context(), words, streams{In: strings.NewReader(""), Out: full, Err: &said}); code != exitFailed || strings.Count(said.String(), "no space left on device") != 1 {
			t.Errorf("%v: exit code %d: %s", words, code, &said)
		}
	}
}

// TestMeantFlags: an operand too many that belongs to a flag, and a join line without
// quotes.
func TestMeantFlags(t *testing.T) {
	c := newCLI(t)
	c.run(2, "stamp", "a.raw", "site.yaml", "b.raw")
	c.want(c.err, `did you mean "edgebake stamp a.raw site.yaml --output b.raw"?`)
	c.run(2, "flash", "a.raw", "/dev/sdx", "site.yaml")
	c.want(c.err, `did you mean "edgebake flash a.raw /dev/sdx --site site.yaml"?`)
	for words, flag := range map[string]string{
		"build image.yaml a.raw":              "--output",
		"installer a.raw.zst a.iso":           "--iso",
		"preflight site.yaml a.raw":           "--image",
		"report a.raw a.html":                 "--output",
		"verify a.raw office.pub":             "--key",
		"pull r.test/a:1 a.raw.zst":           "--output",
		"init shops":                          "--dir",
		"inventory import a.csv site.yaml":    "--template",
		"site sign site.yaml office.key":      "--key",
		"cluster new cluster.yaml shops":      "--output",
		"cluster sites shops out":             "--output",
		"cluster token mint shop-7":           "--node",
		"installer a.raw.zst b.raw.zst":       "",
		"cluster new cluster.yaml a -o shops": "",
	} {
		c.run(2, strings.Fields(words)...)
		i := strings.LastIndex(words, " ") + 1
		if want := fmt.Sprintf("did you mean %q?", "edgebake "+words[:i]+flag+" "+words[i:]); strings.Contains(c.err, want) != (flag != "") {
			t.Errorf("%s: %s", words, c.err)
		}
	}
	c.run(2, "init", "--join", "kubeadm", "join", "192.0.2.1:6443", "--token", "x")
	c.want(c.err, "put the line that kubeadm prints in quotes")
	c.run(2, "init", "--join", "")
	c.want(c.err, "--join is empty")
	c.run(0, "explain", `site.users[0].name`)
	c.run(0, "explain", `site.labels["example.com/region"]`)
}

// TestInitJoin fills a Site from kubeadm's own line.
func TestInitJoin(t *testing.T) {
	c := newCLI(t)
	c.runIn(t.Context(), strings.Replace(joinLine, "[fd00:7::11]", "cp.example.com", 1), 0, "init", "--join", "-")
	c.want(c.err, "Nobody can log in", "--ssh-key")
	c.run(0, "validate", "site.yaml") // complete without users
	site, err := os.ReadFile("site.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c.want(string(site), "masters:\n  - cp.example.com:6443\n\n", "token: abcdef.0123456789abcdef", "  - sha256:1123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n")

	broken := strings.ReplaceAll(strings.Replace(joinLine, "89abcdef0123", "89ab\ncdef\n0123", 1), "\n", "\r\n")
	c.runIn(t.Context(), broken, 0, "init", "--force", "--join", "-")
	c.run(0, "validate", "site.yaml")

	for line, want := range map[string]string{
		"kubeadm init": "want a line that begins with kubeadm join",
		"kubeadm join": "the API server is empty",
		strings.Replace(joinLine, "--token", "--control-plane --token", 1):  "the line for control-plane nodes",
		strings.Replace(joinLine, "--token", "--cri-socket=x --token", 1):   "--cri-socket, which is not taken over",
		strings.Replace(joinLine, "abcdef.0", "ABCDEF.0", 1):                "it has no --token",
		strings.Replace(joinLine, "sha256:11", "sha256:", 1):                "is not sha256: followed by 64",
		strings.Replace(joinLine, "sha256:11", "sha256:11 1", 1):            "is not sha256: followed by 64",
		strings.Replace(joinLine, "[fd00:7::11]:6443", "127.0.0.1:6443", 1): "the API server 127.0.0.1 is the loopback address",
		strings.Replace(joinLine, "[fd00:7::11]:6443", "a:6443 b:6443", 1):  "it names two API servers",
		strings.Replace(joinLine, "--token", "–token", 1):                   "a text program has changed",
		"kubeadm join a:1 --discovery-token-unsafe-skip-ca-verification":    "--discovery-token-unsafe-skip-ca-verification, which is not taken over",
	} {
		c.run(1, "init", "--force", "--join", line)
		c.want(c.err, "edgebake: --join: ", want)
		if strings.Contains(c.err, "0123456789abcdef\n") || strings.Contains(c.err, "ABCDEF.0") {
			t.Errorf("a token is quoted: %s", c.err)
		}
	}
	c.file("id", "-----BEGIN OPENSSH PRIVATE KEY-----\n")
	c.run(1, "init", "--force", "--join", "kubeadm join", "--ssh-key", "id")
	c.want(c.err, "--join: the API server is empty", "--ssh-key: id: is a private key")
}

func TestInterrupted(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c.runIn(ctx, "", 130, "build", "image.yaml")
	c.want(c.err, "interrupted; nothing was left behind")
	for _, f := range []string{"tiny.raw", "tiny.report.json", "image.lock"} {
		if _, err := os.Stat(f); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", f, err)
		}
	}
}

// TestInterruptedPromises: that nothing is left is said by those commands that
// see to it.
func TestInterruptedPromises(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.file("site.yaml", site)
	c.run(0, "build", "image.yaml", "--output", "tiny.raw")
	c.file("stores.yaml", strings.Replace(site, "kind: Site", "kind: Inventory", 1))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c.runIn(ctx, "", exitInterrupted, "stamp", "tiny.raw", "site.yaml", "--output", "new.raw")
	c.want(c.err, "interrupted; nothing was left behind")
	c.runIn(ctx, "", exitInterrupted, "cluster", "listen", "--name", "127.0.0.1", "--listen", "127.0.0.1:0", "--page", "127.0.0.1:0")
	c.want(c.err, "edgebake: interrupted\n")
	c.runIn(ctx, "", exitInterrupted, "boot", "tiny.raw", "--accel", "tcg")
	if c.err != "edgebake: interrupted\n" {
		t.Error(c.err)
	}
	c.file("kubeconfig", "none")
	for _, args := range [][]string{
		{"stamp", "tiny.raw", "stores.yaml", "--each", "--output", "many"},
		{"cluster", "prepare", "--kubeconfig", "kubeconfig"},
		{"cluster", "remove", "n1", "--kubeconfig", "kubeconfig"},
		{"cluster", "token", "revoke", "abcdef", "--kubeconfig", "kubeconfig"},
		{"verify", "tiny.raw"},
	} {
		c.runIn(ctx, "", exitInterrupted, args...)
		c.want(c.err, "interrupted before it was done")
		if strings.Contains(c.err, "nothing was left behind") || strings.Contains(c.err, "context canceled") {
			t.Errorf("%s: %s", args, c.err)
		}
	}
}

// TestHelpfulEdges are small things that a first hour meets.
func TestHelpfulEdges(t *testing.T) {
	c := newCLI(t)
	for _, pool := range []string{"shops", "shops=edge", "=Edge", "shops=Edge,office"} {
		c.run(2, "cluster", "verify", "--nodepool", pool)
		c.want(c.err, `invalid argument "`+pool+`" for "--nodepool" flag: want NAME=Edge or NAME=Cloud`)
	}
	c.run(0, "--version")
	c.want(c.out, "edgebake ")
	c.run(2, "biuld", "image.yaml")
	c.want(c.err, `unknown command "biuld"; did you mean "build"?`)
	c.run(2, "biuld", "image.yaml", "--output", "edge.raw")
	c.want(c.err, `unknown command "biuld"; did you mean "build"?`)
	c.run(2, "--colour")
	c.want(c.err, "unknown flag: --colour")
	c.run(2, "stamp", "site.yaml", "golden.raw")
	c.want(c.err, "golden.raw is an image: the image comes first: edgebake stamp golden.raw site.yaml")
	c.run(2, "flash", "/dev/sdX", "golden.raw", "--yes")
	c.want(c.err, "golden.raw is an image: the image comes first: edgebake flash golden.raw /dev/sdX")
	c.run(2, "push", "registry.example.com/edge:1", "golden.raw.zst")
	c.want(c.err, "golden.raw.zst is an image: the image comes first: edgebake push golden.raw.zst registry.example.com/edge:1")
	c.run(2, "flash", "golden.raw", "site.yaml", "--yes")
	c.want(c.err, "site.yaml is a document and not a disk: edgebake flash golden.raw /dev/sdX --site site.yaml")
	c.run(1, "inspect", "golden.raw")
	c.want(c.err, "open golden.raw: no such file or directory: edgebake build makes images")
	c.run(1, "verify", "/dev/nosuchdisk")
	c.want(c.err, "open /dev/nosuchdisk: no such file or directory: edgebake devices lists the disks")
	c.run(0, "schema", "--help")
	c.want(c.out, "KIND is image, site, inventory or cluster")
	for _, kind := range []string{"kubernetes", "containerd"} { // the error without Go leads here
		c.run(0, "explain", "image."+kind+".source")
		c.want(c.out, "BASE/v1.37.2/bin/linux/amd64/kubelet", "BASE/v2.3.7/containerd-2.3.7-linux-amd64.tar.gz", "or in the folder bin in it")
	}
	c.run(0, "init")
	for _, file := range []string{"image.yaml", "site.yaml"} {
		text, err := os.ReadFile(file)
		if err != nil || strings.Contains(string(text), "docs/") {
			t.Errorf("%s leads to the docs of a clone (%v)", file, err)
		}
		c.want(string(text), "edgebake explain "+strings.TrimSuffix(file, ".yaml"))
	}
	c.run(1, "init", "--force", "--join", joinLine+" --node-name x")
	c.want(c.err, "edgebake explain site")

	// Something large that is not a document is not read.
	c.file("large.yaml", "")
	if err := os.Truncate("large.yaml", 1<<40); err != nil {
		t.Fatal(err)
	}
	c.run(1, "validate", "large.yaml")
	c.want(c.err, "large.yaml has 1024 GiB, a document has at most 32 MiB: split it")
	if err := os.Rename("large.yaml", "large.csv"); err != nil {
		t.Fatal(err)
	}
	c.file("site.yaml", site)
	c.run(1, "inventory", "import", "large.csv", "--template", "site.yaml")
	c.want(c.err, "large.csv has 1024 GiB, a document has at most 32 MiB: split it")
	c.file("large.raw", "")
	if err := os.Truncate("large.raw", 1<<40); err != nil {
		t.Fatal(err)
	}
	c.run(1, "validate", "large.raw")
	c.want(c.err, "large.raw has 1024 GiB, a document has at most 32 MiB: name the YAML file")
	// Nor is one written that would not be read.
	if err := wouldBeRead("stores.csv", maxDocument, 49_000); err != nil {
		t.Error(err)
	}
	if err := wouldBeRead("stores.csv", maxDocument+1<<20, 49_000); err == nil || !strings.Contains(err.Error(), "stores.csv: the Inventory of its 49000 sites would have 33 MiB, and a document has at most 32 MiB: split the table") {
		t.Error(err)
	}

	for _, command := range [][]string{{"cache"}, {"cache", "prune", "--keep", "1GiB"}, {"cache", "verify"}} {
		c.run(1, append(command, "--cache", "cahce")...)
		c.want(c.err, "--cache cahce: no build has used this directory")
		if _, err := os.Stat("cahce"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%v made it: %v", command, err)
		}
	}
	for _, span := range []string{"30d", "2w", "720h"} {
		c.run(0, "cache", "prune", "--older-than", span)
	}
	for _, span := range []string{"30x", "-1d", "d", "1.5d"} {
		c.run(2, "cache", "prune", "--older-than", span)
		c.want(c.err, "want a time span, e.g. 30d")
	}
}

func TestSchemaAndExplain(t *testing.T) {
	c := newCLI(t)
	for _, kind := range []string{"image", "site"} {
		c.run(0, "schema", kind)
		if !json.Valid([]byte(c.out)) {
			t.Errorf("schema %s is not JSON", kind)
		}
		c.run(0, "explain", kind)
		c.want(c.out, kind+" <object>")
	}
	c.run(0, "explain", "site.network.interfaces")
	c.want(c.out, "site.network.interfaces <[]object>", "gateway <string>", "addresses <[]string>")
	c.run(0, "explain", "site.masters")
	c.want(c.out, "site.masters <[]string> required")
	c.run(0, "explain", "site.labels")
	c.want(c.out, "<map of string>")
	c.run(2, "explain", "site.network.interface")
	c.want(c.err, `site.network has no field "interface"`, `did you mean "interfaces"?`)
	c.run(0, "explain", "Site.network")
	c.want(c.out, "site.network <")
	c.run(0, "schema", "Image")
	c.want(c.out, `"title": "edgebake Image, `)
	c.run(2, "explain", "site.masters.x")
	c.want(c.err, "site.masters has no fields of its own")
	c.run(2, "schema", "sit")
	c.want(c.err, `unknown kind of document "sit"`, "image, inventory, site")
}

// Manual pages show flags as help does, not in the form of the library that makes them.
func TestManualShowsFlagsAsHelp(t *testing.T) {
	c := newCLI(t)
	c.run(0, "man", "-o", "man1")
	pages, err := filepath.Glob("man1/*.1")
	if err != nil || len(pages) < 30 {
		t.Fatalf("%d pages, %v", len(pages), err)
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, `\fB-`) && (strings.Contains(line, `\fP=`) || strings.Contains(line, "[=")) {
				t.Errorf("%s: %s", page, line)
			}
		}
	}
	text, err := os.ReadFile("man1/edgebake-preflight.1")
	if err != nil {
		t.Fatal(err)
	}
	c.want(string(text), "\\fB--ship-within\\fP \\fIduration\\fP\n\thow long until", "(default 72h)\n", "\\fB-o\\fP, \\fB--output\\fP \\fIstring\\fP\n")
}

func TestCompletion(t *testing.T) {
	c := newCLI(t)
	for _, tt := range []struct{ args, want string }{
		{"build,", "yaml"}, {"inspect,", "raw"}, {"stamp,golden.raw,", "yaml"}, {"version,-o,", "json"},
		{"schema,", "site"}, {"explain,site.net", "site.network"}, {"build,image.yaml,--output,", "zst"},
	} {
		c.run(0, append([]string{"__complete"}, strings.Split(tt.args, ",")...)...)
		c.want(c.out, tt.want+"\n")
	}
}

// TestErrorsKeepToThemselves: what others have named does not reach the terminal
// as commands to it.
func TestErrorsKeepToThemselves(t *testing.T) {
	c := newCLI(t)
	c.run(1, "inspect", "no\x1b[2Jsuch\x07.raw")
	if strings.ContainsAny(c.err, "\x1b\x07") || !strings.Contains(c.err, "no?[2Jsuch?.raw") {
		t.Errorf("%q", c.err)
	}
	for _, s := range []string{"a\x1b]0;x\x07b", "a\u009bb", "a\rb"} {
		if got := printable.Text(s); strings.ContainsAny(got, "\x1b\x07\u009b\r") {
			t.Errorf("%q", got)
		}
	}
}

// TestInterruptedBehindTheImage: an interrupt after the image was written does
// not say that nothing was left behind.
func TestInterruptedBehindTheImage(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	failed := errors.New("writing image.lock: no space left on device")
	if err := withImage(ctx, "node.raw", failed); err != failed {
		t.Errorf("without an interrupt: %v", err)
	}
	cancel()
	var left unfinished
	if err := withImage(ctx, "node.raw", failed); !errors.As(err, &left) || !strings.Contains(err.Error(), "node.raw was complete: writing image.lock") {
		t.Errorf("%v", err)
	}
}
