package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"io"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

func TestImagesAreSoundAndTheSameEachTime(t *testing.T) {
	var digests [2]string
	for i := range digests {
		dir := filepath.Join(t.TempDir(), "images")
		if err := run(t.Context(), dir, []string{runtime.GOARCH}, io.Discard); err != nil {
			t.Fatal(err)
		}
		index, err := layout.ImageIndexFromPath(dir)
		if err != nil {
			t.Fatal(err)
		}
		m, err := index.IndexManifest()
		if err != nil {
			t.Fatal(err)
		}
		for j, d := range m.Manifests {
			if got := d.Annotations["org.opencontainers.image.ref.name"]; got != images[j].ref {
				t.Errorf("image %d is called %q", j, got)
			}
			img, err := index.Image(d.Digest)
			if err != nil {
				t.Fatal(err)
			}
			onlyFile(t, img, images[j].program)
			if d.Platform == nil || d.Platform.Architecture != runtime.GOARCH {
				t.Errorf("platform %v", d.Platform)
			}
		}
		if len(m.Manifests) != len(images) {
			t.Errorf("%d images", len(m.Manifests))
		}
		d, err := index.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests[i] = d.String()
	}
	if digests[0] != digests[1] {
		t.Errorf("digests differ: %v", digests)
	}
}

// onlyFile checks that the image has no file but the program, which must be static and for this
// architecture. It runs the program.
func onlyFile(t *testing.T, img v1.Image, program string) {
	t.Helper()
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if e := cf.Config.Entrypoint; len(e) != 1 || e[0] != "/"+program {
		t.Errorf("entrypoint %v", e)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	if len(layers) != 1 || len(cf.RootFS.DiffIDs) != 1 {
		t.Fatalf("%d layers, %d diff ids", len(layers), len(cf.RootFS.DiffIDs))
	}
	if id, err := layers[0].DiffID(); err != nil || id != cf.RootFS.DiffIDs[0] {
		t.Errorf("diff id %v, %v; the config says %v", id, err, cf.RootFS.DiffIDs[0])
	}
	rc, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer rc.Close()
	r := tar.NewReader(rc)
	h, err := r.Next()
	for err == nil && h.Typeflag == tar.TypeDir && strings.HasPrefix(program, h.Name) {
		h, err = r.Next() // its directory
	}
	if err != nil || h.Name != program || h.Mode != 0o755 {
		t.Fatalf("first entry %+v, %v", h, err)
	}
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	bin, err := elf.NewFile(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	if want := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[runtime.GOARCH]; bin.Machine != want {
		t.Errorf("%s is for %v", program, bin.Machine)
	}
	if libs, err := bin.ImportedLibraries(); err != nil || len(libs) > 0 {
		t.Errorf("%s needs libraries %v, %v", program, libs, err)
	}
	if _, err := r.Next(); err != io.EOF {
		t.Errorf("there is more in the layer: %v", err)
	}
}
