package images

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/test/imagetest"
)

// TestSizesInDescriptors checks that a blob must have the size given in the manifest or index, even
// if it is already in the cache.
func TestSizesInDescriptors(t *testing.T) {
	resize := map[string]func(l *layout, size int) string{
		"config": func(l *layout, size int) string {
			return l.rewrite(func(m jsonDoc) { m["config"].(jsonDoc)["size"] = size })
		},
		"layer 1 of 1": func(l *layout, size int) string {
			return l.rewrite(func(m jsonDoc) { layerOf(m, 0)["size"] = size })
		},
		"manifest": func(l *layout, size int) string {
			l.wrap(func(m jsonDoc) []any { m["size"] = size; return []any{with(m, "linux", "amd64")} })
			return "manifest"
		},
	}
	for what, edit := range resize {
		for _, size := range []int{0, 1, 100000} {
			for _, warm := range []bool{false, true} {
				for _, mode := range []string{"bake", "keep", "import"} {
					t.Run(fmt.Sprintf("%s %d warm %t %s", what, size, warm, mode), func(t *testing.T) {
						l := newLayout(t, imagetest.Image{Ref: "edgebake.test/a:1", Layers: []imagetest.Layer{imagetest.Script(imagetest.File("a", 0o644, 0, 0, "a"))}})
						c, o := newCache(t), testOptions()
						o.KeepLayers = mode == "keep"
						build := func() error {
							pinned, err := Resolve(t.Context(), c, l.imgs, o)
							if err != nil {
								return err
							}
							if mode == "import" {
								_, err = fetchAndArchive(t.Context(), c, pinned, o)
							} else {
								_, err = fetchAndBake(t.Context(), c, pinned, o)
							}
							return err
						}
						if warm {
							if err := build(); err != nil {
								t.Fatal(err)
							}
						}
						edit(l, size)
						wantError(t, build(), "image edgebake.test/a:1", what, "bytes")
						unpoisoned(t, c)
					})
				}
			}
		}
	}
}

// TestVerdictIsTheSameWithAnyCache checks that a layer's blob is completely verified before it is
// accepted, even if the cache has the same contents from another blob.
func TestVerdictIsTheSameWithAnyCache(t *testing.T) {
	const good, bad = "edgebake.test/good:1", "edgebake.test/bad:1"
	without := func(n int) func([]byte) []byte { return func(b []byte) []byte { return b[:len(b)-n] } }
	followed := func(more string) func([]byte) []byte {
		return func(b []byte) []byte { return append(b, more...) }
	}
	for name, damage := range map[string]struct {
		compression string
		blob        func([]byte) []byte
		layer       func(descriptor jsonDoc)
	}{
		"gzip without its end":        {"gzip", without(8), nil},
		"gzip without its last byte":  {"gzip", without(1), nil},
		"gzip with garbage":           {"gzip", followed("garbage"), nil},
		"gzip with zeros":             {"gzip", followed("\x00\x00\x00\x00"), nil},
		"gzip with the start of more": {"gzip", followed("\x1f\x8b\x08"), nil},
		"gzip of another checksum":    {"gzip", func(b []byte) []byte { b[len(b)-8] ^= 1; return b }, nil},
		"zstd without its last byte":  {"zstd", without(1), nil},
		"zstd with garbage":           {"zstd", followed("garbage"), nil},
		"plain with more":             {"none", followed("garbage"), nil},
		"called plain":                {"gzip", followed(""), func(d jsonDoc) { d["mediaType"] = "application/vnd.oci.image.layer.v1.tar" }},
		"called longer":               {"gzip", followed(""), func(d jsonDoc) { d["size"] = d["size"].(int) + 1 }},
	} {
		for _, keep := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s keep %t", name, keep), func(t *testing.T) {
				layer := imagetest.Script(imagetest.File("a", 0o644, 0, 0, strings.Repeat("contents ", 1000)))
				layer.Compression = damage.compression
				l := newLayout(t, imagetest.Image{Ref: bad, Layers: []imagetest.Layer{layer}}, imagetest.Image{Ref: good, Layers: []imagetest.Layer{layer}})
				l.change(func(m, _ jsonDoc) {
					d := layerOf(m, 0)
					raw, err := os.ReadFile(l.blob(d["digest"].(string)))
					if err != nil {
						t.Fatal(err)
					}
					d["digest"], d["size"] = l.putRaw(damage.blob(raw))
					if damage.layer != nil {
						damage.layer(d)
					}
				})
				badOne, goodOne := l.imgs[0], l.imgs[1]
				o := testOptions()
				o.KeepLayers = keep
				for order, builds := range map[string][][]configs.ContainerImage{
					"alone":              {{badOne}},
					"after the good one": {{goodOne}, {badOne}},
					"twice":              {{badOne}, {badOne}},
					"before, together":   {{badOne, goodOne}},
					"behind, together":   {{goodOne, badOne}},
				} {
					c := newCache(t)
					for n, imgs := range builds {
						_, err := resolveAndBake(t, c, o, imgs)
						if len(imgs) == 1 && imgs[0] == goodOne {
							if err != nil {
								t.Fatalf("%s: the good one: %v", order, err)
							}
							continue
						}
						if err == nil {
							t.Errorf("%s: build %d took the damaged layer", order, n+1)
							continue
						}
						wantError(t, err, bad, "layer 1 of 1")
						if strings.Contains(err.Error(), good) {
							t.Errorf("%s: the error names the good image: %v", order, err)
						}
					}
					unpoisoned(t, c)
				}
			})
		}
	}
}

// TestLimitIsTheSameWithAnyCache checks that cached layers also count against maxLayerSize.
func TestLimitIsTheSameWithAnyCache(t *testing.T) {
	l := newLayout(t, imagetest.Image{Ref: "edgebake.test/a:1", Layers: []imagetest.Layer{imagetest.Script(imagetest.File("a", 0o644, 0, 0, strings.Repeat("a", 2<<20)))}})
	c, o := newCache(t), testOptions()
	if _, err := resolveAndBake(t, c, o, l.imgs); err != nil {
		t.Fatal(err)
	}
	o.MaxLayer = 1 << 20
	_, err := resolveAndBake(t, c, o, l.imgs)
	wantError(t, err, "edgebake.test/a:1", "layer 1 of 1", "more than 1Mi", "imageStore.maxLayerSize")
}

// TestKnownLayersNeedNoSource checks that no source is opened for layers whose blobs were already
// verified. A new blob with known contents is read once.
func TestKnownLayersNeedNoSource(t *testing.T) {
	layer := imagetest.Script(imagetest.File("a", 0o644, 0, 0, "a"))
	other := layer
	other.Compression = "zstd"
	l := newLayout(t, imagetest.Image{Ref: "edgebake.test/a:1", Layers: []imagetest.Layer{layer}}, imagetest.Image{Ref: "edgebake.test/b:1", Layers: []imagetest.Layer{other}})
	c, o := newCache(t), testOptions()
	pinned, err := Resolve(t.Context(), c, l.imgs, o)
	if err == nil {
		err = Fetch(t.Context(), c, pinned[:1], o)
	}
	if err == nil {
		err = Fetch(t.Context(), c, pinned[1:], o)
	}
	if err == nil {
		err = os.RemoveAll(l.dir)
	}
	if err == nil {
		_, err = fetchAndBake(t.Context(), c, pinned, o)
	}
	if err != nil {
		t.Error(err)
	}
}

// TestDamagedLayerIsNotWanted checks that a damaged blob in the cache does not make the image
// invalid, and that the blob is fetched again if it is needed.
func TestDamagedLayerIsNotWanted(t *testing.T) {
	l := newLayout(t, imagetest.Image{Ref: "edgebake.test/a:1", Layers: []imagetest.Layer{imagetest.Script(imagetest.File("a", 0o644, 0, 0, "a"))}})
	dir := t.TempDir()
	bake := func(keep bool) []Pinned {
		t.Helper()
		c, err := fetch.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		o := testOptions()
		o.KeepLayers = keep
		pinned, err := Resolve(t.Context(), c, l.imgs, o)
		if err == nil {
			_, err = fetchAndBake(t.Context(), c, pinned, o)
		}
		if err != nil {
			t.Fatal(err)
		}
		return pinned
	}
	blob := filepath.Join(dir, "blobs", bake(true)[0].Layers[0].Digest.Hex())
	if err := errors.Join(os.Chmod(blob, 0o644), os.Truncate(blob, 3)); err != nil {
		t.Fatal(err)
	}
	bake(false)
	bake(true)
	if fi, err := os.Stat(blob); err != nil || fi.Size() == 3 {
		t.Errorf("the damaged blob is still there: %v", err)
	}
}

// rewrite edits the manifest of the first image, but no size or digest that refers to it.
func (l *layout) rewrite(edit func(manifest jsonDoc)) string {
	l.t.Helper()
	var index, manifest jsonDoc
	l.read("", &index)
	entry := index["manifests"].([]any)[0].(jsonDoc)
	l.read(entry["digest"].(string), &manifest)
	edit(manifest)
	entry["digest"], entry["size"] = l.put(manifest)
	l.writeIndex(index)
	return entry["digest"].(string)
}

// TestMediaTypeIsTheDocuments checks that the media type on the node is the document's own,
// independent of descriptors and of the cache.
func TestMediaTypeIsTheDocuments(t *testing.T) {
	for name, test := range map[string]struct {
		own  any // media type in the document; nil for none
		want string
	}{
		"OCI": {ociManifest, ociManifest}, "docker": {dockerManifest, dockerManifest}, "none": {nil, ociManifest},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLayout(t, imagetest.Image{Ref: "edgebake.test/a:1", Layers: []imagetest.Layer{imagetest.Script()}})
			digest := l.rewrite(func(m jsonDoc) {
				delete(m, "mediaType")
				if test.own != nil {
					m["mediaType"] = test.own
				}
			})
			var contentType string
			s := serve(t, l, httptest.NewServer)
			s.fail = func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, "/manifests/") {
					raw, err := os.ReadFile(l.blob(digest))
					if err != nil {
						t.Error(err)
					}
					w.Header().Set("Content-Type", contentType)
					w.Header().Set("Docker-Content-Digest", digest)
					w.Write(raw)
					return true
				}
				return false
			}
			var pinned []Pinned
			pin := func(what string, img configs.ContainerImage) {
				t.Helper()
				c, o := newCache(t), testOptions()
				o.Registries = []configs.Registry{{Host: s.host, Insecure: true}}
				for _, cache := range []string{"cold", "warm"} {
					got, err := Resolve(t.Context(), c, []configs.ContainerImage{img}, o)
					if err != nil {
						t.Fatalf("%s, %s cache: %v", what, cache, err)
					}
					if got[0].Target.MediaType != test.want || got[0].Manifest.MediaType != test.want {
						t.Errorf("%s, %s cache: the media types are %s and %s", what, cache, got[0].Target.MediaType, got[0].Manifest.MediaType)
					}
					got[0].Source, got[0].Ref = configs.ContainerImage{}, imageref.Ref{}
					pinned = append(pinned, got[0])
				}
			}
			for _, pointer := range []any{ociManifest, dockerManifest, nil} {
				var index jsonDoc
				l.read("", &index)
				entry := index["manifests"].([]any)[0].(jsonDoc)
				delete(entry, "mediaType")
				if pointer != nil {
					entry["mediaType"] = pointer
				}
				l.writeIndex(index)
				pin(fmt.Sprint("index.json says ", pointer), l.imgs[0])
				contentType = fmt.Sprint(pointer)
				if pointer == nil {
					contentType = "application/json"
				}
				pin("the registry says "+contentType, configs.ContainerImage{Ref: s.host + "/a:1"})
				pin("the registry says "+contentType+" of a digest", configs.ContainerImage{Ref: s.host + "/a@" + digest})
			}
			for _, p := range pinned {
				if !reflect.DeepEqual(p, pinned[0]) {
					t.Errorf("%+v and %+v", p, pinned[0])
				}
			}
		})
	}
}
