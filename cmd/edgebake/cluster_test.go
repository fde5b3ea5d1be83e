package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
	put("cni.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: cni}\n")
	step(0, "masters: 2 masters survive the loss of 0", "validate", doc)
	step(2, "wants a directory: --output DIR", "cluster", "new", doc)
	step(0, "minted cluster shops", "cluster", "new", doc, "--output", minted)
	step(0, "nothing changed", "cluster", "new", doc, "--output", minted)
	step(0, "wrote 3 Sites", "cluster", "sites", minted)
	step(0, "site", "validate", filepath.Join(minted, "sites", "a.yaml"))
	step(0, "wrote 3 Sites", "cluster", "sites", minted) // the same again is no replacing
	step(0, "1 nodes", "cluster", "sites", minted, "--inventory", filepath.Join(dir, "inventory.yaml"))
	step(1, "--force replaces it", "cluster", "sites", minted, "--inventory", filepath.Join(dir, "inventory.yaml"))
	step(0, "ok", "validate", filepath.Join(dir, "inventory.yaml"))
	put("cluster.yaml", strings.Replace(clusterDocument, "7.12", "7.13", 1))
	step(1, "cluster.yaml:6:10: masters: was m1 (192.168.7.11), m2 (192.168.7.12)", "cluster", "new", doc, "--output", minted)
	step(2, "unknown command", "cluster", "site", minted)
}
