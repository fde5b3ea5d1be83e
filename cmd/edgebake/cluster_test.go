package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/cluster/mint"
)

const clusterDocument = `apiVersion: edgebake.io/v1alpha1
kind: Cluster
name: shops
kubernetesVersion: v1.36.3
manifests: [cni.yaml]
masters: [{name: m1, address: 192.168.7.11}, {name: m2, address: 192.168.7.12}]
nodes: [{name: a, match: {serial: PC0Q1234}}]
`

// try runs edgebake and returns its exit code and all it said.
func try(t *testing.T, words ...string) (int, string) {
	t.Helper()
	var out bytes.Buffer
	code := run(context.Background(), words, streams{In: strings.NewReader(""), Out: &out, Err: &out})
	return code, out.String()
}

// noise are n digits that nobody can pack into less than half.
func noise(n int) string {
	rng := rand.New(rand.NewPCG(1, 2))
	b := make([]byte, n)
	for i := range b {
		b[i] = "0123456789abcdef"[rng.IntN(16)]
	}
	return string(b)
}

func TestClusterCommands(t *testing.T) {
	dir := t.TempDir()
	doc, minted := filepath.Join(dir, "cluster.yaml"), filepath.Join(dir, "shops")
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("cluster.yaml", clusterDocument)
	put("cni.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: cni}\n---\nkind: [\n")
	step := func(code int, want string, words ...string) {
		t.Helper()
		if got, said := try(t, words...); got != code || !strings.Contains(said, want) {
			t.Errorf("edgebake %s: exit code %d:\n%swant %d and %q", strings.Join(words, " "), got, said, code, want)
		}
	}
	step(1, "cni.yaml:5: document 2: not YAML", "validate", doc)
	step(1, "cni.yaml:5: document 2: not YAML", "cluster", "new", doc, "--output", minted)
	if _, err := os.Stat(minted); err == nil {
		t.Error("a cluster was minted in spite of its manifest")
	}
	put("two.yaml", strings.Replace(clusterDocument, "name: shops", "name: Shops", 1))
	step(1, "cni.yaml:5: document 2: not YAML", "validate", filepath.Join(dir, "two.yaml"))
	step(1, "two.yaml:3:7: name: ", "cluster", "new", filepath.Join(dir, "two.yaml"), "--output", minted)
	step(1, "cni.yaml:5: document 2: not YAML", "cluster", "new", filepath.Join(dir, "two.yaml"), "--output", minted)
	put("cni.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: cni}\n")
	step(0, "masters: 2 control-plane nodes survive the loss of 0", "validate", doc)
	step(2, "requires a directory: --output DIR", "cluster", "new", doc)
	step(0, "minted cluster shops", "cluster", "new", doc, "--output", minted)
	step(0, "nothing changed", "cluster", "new", doc, "--output", minted)
	step(0, "wrote 3 Sites", "cluster", "sites", minted)
	if text, err := os.ReadFile(filepath.Join(minted, "sites", "m1.yaml")); err != nil || !strings.Contains(string(text), "manifests: ") {
		t.Errorf("a master's Site is without the manifests: %v", err)
	}
	if text, err := os.ReadFile(filepath.Join(minted, "sites", "a.yaml")); err != nil || strings.Contains(string(text), "manifests") {
		t.Errorf("a worker's Site has the manifests: %v", err)
	}
	// A node that the document has lost is told of where its Site is still.
	put("more.yaml", strings.Replace(clusterDocument, "nodes: [", "nodes: [{name: b}, ", 1))
	step(0, "token for b", "cluster", "new", filepath.Join(dir, "more.yaml"), "--output", minted)
	step(0, "wrote 4 Sites", "cluster", "sites", minted, "--force")
	step(0, "b is gone", "cluster", "new", doc, "--output", minted)
	step(0, filepath.Join(minted, "sites", "b.yaml")+" is the Site of b, which the cluster no longer has", "cluster", "sites", minted, "--force")
	if err := os.Remove(filepath.Join(minted, "sites", "b.yaml")); err != nil {
		t.Fatal(err)
	}
	if _, said := try(t, "cluster", "sites", minted); strings.Contains(said, "no longer has") {
		t.Error(said)
	}
	step(1, doc+": it is a file: name the directory", "cluster", "sites", doc)
	step(1, doc+".d: there is no such directory: `edgebake cluster new` makes one", "cluster", "sites", doc+".d")
	step(1, "with --cluster a cluster.yaml", "cluster", "new", filepath.Join(dir, "none.yaml"), "--output", minted)
	step(0, "site", "validate", filepath.Join(minted, "sites", "a.yaml"))
	step(0, "wrote 3 Sites", "cluster", "sites", minted) // the same again replaces nothing
	step(0, ": 1 node\n", "cluster", "sites", minted, "--inventory", filepath.Join(dir, "inventory.yaml"))
	step(1, "--force replaces it", "cluster", "sites", minted, "--inventory", filepath.Join(dir, "inventory.yaml"))
	step(0, "ok", "validate", filepath.Join(dir, "inventory.yaml"))
	// What is rejected has noted no birth; what is not, one.
	births := func(want int) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(minted, "mint.json"))
		if got := strings.Count(string(text), `"until"`); err != nil || got != want {
			t.Errorf("%d births are noted, want %d, %v:\n%s", got, want, err, text)
		}
	}
	births(1)
	again := []string{"cluster", "sites", minted, "--birth", "48h"}
	step(1, "--absent m9: the cluster has no such control-plane node; it has m1, m2\n", append(again, "--absent", "m9", "--force")...)
	step(1, "--absent names every control-plane node", append(again, "--absent", "m1,m2", "--force")...)
	step(1, "--continue-from m9: the cluster has no", append(again, "--continue-from", "m9", "--force")...)
	step(1, "--restore needs --continue-from", append(again, "--restore", doc, "--force")...)
	step(1, "no such file", append(again, "--continue-from", "m1", "--restore", filepath.Join(dir, "none.db"), "--force")...)
	lost := []string{"cluster", "sites", minted, "--output", filepath.Join(dir, "lost"), "--force", "--continue-from", "m1"}
	step(1, "has no checksum at its end", append(lost, "--restore", doc)...)
	db := make([]byte, 4096)
	sum := sha256.Sum256(db)
	put("other.db", string(append(db, sum[:]...)))
	step(0, "WARNING: the CA of "+minted+" is not found in "+filepath.Join(dir, "other.db"), append(lost, "--restore", filepath.Join(dir, "other.db"))...)
	step(0, "With them m1 continues with its own data, and all others join it.", lost...)
	// Each word is later than the last one, also where the clock was ahead then.
	said := func() string {
		text, err := os.ReadFile(filepath.Join(dir, "lost", "m1.yaml"))
		_, after, ok := strings.Cut(string(text), "said: ")
		if err != nil || !ok {
			t.Fatalf("no time of the word: %v", err)
		}
		return after[:len("\"2026-11-25T10:00:00Z\"")]
	}
	if err := mint.NoteWord(minted, time.Date(2099, 1, 2, 3, 4, 5, 0, time.UTC)); err != nil {
		t.Fatal(err)
	}
	step(0, "m1 continues", lost...)
	first := said()
	step(0, "m1 continues", lost...)
	if second := said(); first != `"2099-01-02T03:04:06Z"` || second != `"2099-01-02T03:04:07Z"` {
		t.Errorf("said at %s, then at %s", first, second)
	}
	step(1, "m1.yaml exists and differs; --force replaces it", again...)
	step(1, "not a directory", append(again, "--output", filepath.Join(doc, "sites"))...)
	if err := os.MkdirAll(filepath.Join(dir, "taken", "a.yaml"), 0o700); err != nil {
		t.Fatal(err)
	}
	step(1, "writing the Site of a: read "+filepath.Join(dir, "taken", "a.yaml")+": is a directory: remove it, or name another", append(again, "--output", filepath.Join(dir, "taken"), "--force")...)
	births(1)
	step(0, "the cluster may be born with them", append(again, "--force")...)
	births(2)
	put("cni.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: other}\n")
	step(0, "updated", "cluster", "new", doc, "--output", minted)
	step(1, "m1.yaml exists and differs; --force replaces it", "cluster", "sites", minted)
	put("cni.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: large}\ndata: {a: x"+noise(600<<10)+"}\n")
	step(0, "updated", "cluster", "new", doc, "--output", minted)
	step(1, "writing the Site of m2: it has ", "cluster", "sites", minted, "--force")
	step(1, "KiB are the Cluster's manifests, packed", "cluster", "sites", minted, "--force")
	put("cluster.yaml", strings.Replace(clusterDocument, "7.12", "7.13", 1))
	step(1, "cluster.yaml:6:10: masters: was m1 (192.168.7.11), m2 (192.168.7.12)", "cluster", "new", doc, "--output", minted)
	step(2, "unknown command", "cluster", "site", minted)
}

// TestBirthRenewsTokens: a cluster that was not switched on while its workers'
// tokens were valid can still be born, and the workers can join it.
func TestBirthRenewsTokens(t *testing.T) {
	dir := t.TempDir()
	doc, minted, out := filepath.Join(dir, "cluster.yaml"), filepath.Join(dir, "shops"), filepath.Join(dir, "late")
	for name, text := range map[string]string{"cluster.yaml": clusterDocument, "cni.yaml": "apiVersion: v1\nkind: Namespace\nmetadata: {name: cni}\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if code, said := try(t, "cluster", "new", doc, "--output", minted); code != 0 {
		t.Fatal(said)
	}
	late := time.Now().AddDate(1, 0, 0)
	var said strings.Builder
	s := streams{Out: &said, Err: &said, talk: &talk{}}
	if err := (&sitesOptions{out: out}).write(s, minted, late); err == nil || !strings.Contains(err.Error(), "--birth makes new ones") {
		t.Errorf("with tokens that have expired: %v", err)
	}
	if err := (&sitesOptions{out: out, birth: 48 * time.Hour, force: true}).write(s, minted, late); err != nil || !strings.Contains(said.String(), "made new tokens for 1 node") {
		t.Errorf("%v, said %q", err, said.String())
	}
	said.Reset()
	if err := (&sitesOptions{out: out, birth: 48 * time.Hour, force: true}).write(s, minted, late.Add(time.Hour)); err != nil || strings.Contains(said.String(), "new tokens") {
		t.Errorf("the second time: %v, said %q", err, said.String())
	}
	if _, err := os.Stat(filepath.Join(out, "a.yaml")); err != nil {
		t.Error(err)
	}
}
