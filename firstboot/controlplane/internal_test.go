package controlplane

import (
	"errors"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs/manifest"
	"github.com/edgebake/edgebake/configs/yamltree"
)

// TestMarkerKeys checks that an object has the same key whatever its contents are, and that a
// second item with the same name gets its own key.
func TestMarkerKeys(t *testing.T) {
	t.Parallel()
	all, err := objectsOf([]manifest.File{{Name: "a.yaml", Text: `{apiVersion: apps/v1, kind: Deployment, metadata: {name: a, namespace: b}}
---
{apiVersion: apps/v2, kind: Deployment, metadata: {name: a, namespace: b}, spec: {}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: "system:a"}}
`}})
	if err != nil {
		t.Fatal(err)
	}
	keys, alone := markerKeys(all), markerKeys(all[1:])
	if keys[0] == keys[1] || keys[1] == keys[2] || alone[0] != keys[0] || alone[1] != keys[2] {
		t.Errorf("%q, without the first %q", keys, alone)
	}
}

func TestLacking(t *testing.T) {
	t.Parallel()
	const site = "mode: ipvs\niptables: {syncPeriod: 1h, masqueradeAll: false}\nipvs: {excludeCIDRs: [10.0.0.1/32]}\nfeatureGates: {A: true}\n"
	for has, want := range map[string]string{
		"mode: ipvs\niptables: {syncPeriod: 1h0m0s}\nipvs: {excludeCIDRs: [10.0.0.2/32, 10.0.0.1/32]}\nfeatureGates: {A: true, B: false}\noomScoreAdj: null\n": "",
		"mode: \"\"\niptables: {syncPeriod: 30s, masqueradeAll: true}\nipvs: {excludeCIDRs: null}\n": "featureGates.A is not set in the cluster, but true in the Site; iptables.masqueradeAll is true in the cluster, but false in the Site; " +
			"iptables.syncPeriod is 30s in the cluster, but 1h in the Site; ipvs.excludeCIDRs is not set in the cluster, but [10.0.0.1/32] in the Site; mode is not set in the cluster, but ipvs in the Site",
	} {
		var s, h map[string]any
		if err := errors.Join(yamltree.Unmarshal([]byte(site), &s), yamltree.Unmarshal([]byte(has), &h)); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(differences("", s, h), "; "); got != want {
			t.Errorf("%s\ngot  %q\nwant %q", has, got, want)
		}
	}
}
