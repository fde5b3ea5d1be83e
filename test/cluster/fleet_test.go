package cluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestFleetManifests sends the manifests in docs/fleet.md to a real API server as a dry run, which
// also rejects unknown fields.
func TestFleetManifests(t *testing.T) {
	c := needCluster(t)
	doc, err := os.ReadFile("../../docs/fleet.md")
	if err != nil {
		t.Fatal(err)
	}
	var manifests []string
	for i, block := range strings.Split(string(doc), "```yaml\n") {
		if yaml, _, ok := strings.Cut(block, "```"); ok && i > 0 && strings.Contains(yaml, "kind: Job") {
			manifests = append(manifests, strings.ReplaceAll(yaml, "namespace: edge-images", "namespace: default"))
		}
	}
	if len(manifests) != 2 {
		t.Fatalf("docs/fleet.md has %d blocks with Jobs", len(manifests))
	}
	file := filepath.Join(t.TempDir(), "fleet.yaml")
	if err := os.WriteFile(file, []byte(strings.Join(manifests, "---\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := c.Kubectl(t.Context(), "create", "--dry-run=server", "--validate=strict", "-f", file)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"job.batch/build-my-edge created", "job.batch/stamp-stores created", "persistentvolumeclaim/slots created"} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in:\n%s", want, out)
		}
	}
}
