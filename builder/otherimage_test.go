package builder

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/test/buildtest"
)

// layoutOfTwo makes the project's container image an index of two different images for one
// platform. It returns both digests, the one that is preferred first, and the file of the preferred
// manifest.
func layoutOfTwo(t *testing.T, p *project) (first, second, file string) {
	t.Helper()
	blobs := filepath.Join(p.dir, "images/blobs/sha256")
	read := func(path string, into any) {
		t.Helper()
		raw, err := os.ReadFile(path)
		if err == nil {
			err = json.Unmarshal(raw, into)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	put := func(v any) (digest string, size int) {
		t.Helper()
		raw, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		sha := fmt.Sprintf("%x", sha256.Sum256(raw))
		if err := os.WriteFile(filepath.Join(blobs, sha), raw, 0o644); err != nil {
			t.Fatal(err)
		}
		return "sha256:" + sha, len(raw)
	}
	blob := func(digest string) string { return filepath.Join(blobs, strings.TrimPrefix(digest, "sha256:")) }
	type object = map[string]any

	var layout struct{ Manifests []object }
	index := filepath.Join(p.dir, "images/index.json")
	read(index, &layout)
	entry := layout.Manifests[0]
	first, file = entry["digest"].(string), blob(entry["digest"].(string))
	var manifest, config object
	read(file, &manifest)
	at := manifest["config"].(object)
	read(blob(at["digest"].(string)), &config)
	config["config"] = object{"Env": []string{"WHO=other"}}
	at["digest"], at["size"] = put(config)
	second, size := put(manifest)

	const manifestType = "application/vnd.oci.image.manifest.v1+json"
	platform := object{"os": "linux", "architecture": "amd64"}
	entry["mediaType"] = "application/vnd.oci.image.index.v1+json"
	entry["digest"], entry["size"] = put(object{"schemaVersion": 2, "mediaType": entry["mediaType"], "manifests": []object{
		{"mediaType": manifestType, "digest": first, "size": entry["size"], "platform": platform},
		{"mediaType": manifestType, "digest": second, "size": size, "platform": platform},
	}})
	raw, err := json.Marshal(object{"schemaVersion": 2, "manifests": []object{entry}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(index, raw, 0o644); err != nil {
		t.Fatal(err)
	}
	return first, second, file
}

// TestLockedManifest checks that if the layout lacks the locked manifest of an index, a build uses
// another manifest only if it may renew the lock.
func TestLockedManifest(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	first, second, file := layoutOfTwo(t, p)
	const name = imagePrefix + "edgebake.test/pause:1"
	pl, err := Resolve(t.Context(), p.image(t), p.options(""))
	if err != nil {
		t.Fatal(err)
	}
	if got := pl.Inputs[name].Digest; got != first {
		t.Fatalf("the build chose %s, want %s, so the test checks nothing", got, first)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	cache, err := fetch.Open(t.TempDir()) // without the first image
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	o := p.options("")
	o.Cache, o.Lock = cache, pl.Lock()
	o.Locked = true
	_, err = Resolve(t.Context(), p.image(t), o)
	for _, want := range []string{name, first, second, "build without --locked"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("--locked: the error lacks %q: %v", want, err)
		}
	}
	if _, err := Images(t.Context(), p.image(t), o); err == nil || !strings.Contains(err.Error(), second) {
		t.Errorf("--locked, only the images: %v", err)
	}
	o.Locked = false
	renewed, err := Resolve(t.Context(), p.image(t), o)
	if err != nil {
		t.Fatal(err)
	}
	if got := renewed.Lock().Inputs[name].Digest; got != second {
		t.Errorf("the renewed lock has %s, want %s", got, second)
	}
}
