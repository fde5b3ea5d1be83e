package main

import (
	"bytes"
	"context"
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

// TestWordsAreLater: each word is later than the last one, also where the clock was
// ahead then.
func TestWordsAreLater(t *testing.T) {
	dir := t.TempDir()
	doc, minted := filepath.Join(dir, "cluster.yaml"), filepath.Join(dir, "shops")
	for name, text := range map[string]string{"cluster.yaml": clusterDocument, "cni.yaml": "apiVersion: v1\nkind: Namespace\nmetadata: {name: cni}\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if code, said := try(t, "cluster", "new", doc, "--output", minted); code != 0 {
		t.Fatal(said)
	}
	if err := mint.NoteWord(minted, time.Date(2099, 1, 2, 3, 4, 5, 0, time.UTC)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`said: "2099-01-02T03:04:06Z"`, `said: "2099-01-02T03:04:07Z"`} {
		if code, said := try(t, "cluster", "sites", minted, "--output", filepath.Join(dir, "lost"), "--force", "--continue-from", "m1"); code != 0 {
			t.Fatal(said)
		}
		if text, err := os.ReadFile(filepath.Join(dir, "lost", "m1.yaml")); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("want %s, %v:\n%s", want, err, text)
		}
	}
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
