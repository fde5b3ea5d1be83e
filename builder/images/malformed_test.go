package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/transfer"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/imagetest"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("error %q\nlacks %q", err, p)
		}
	}
}

// unpoisoned checks that every blob in the cache has the digest that is its name, and that no
// unfinished file is left.
func unpoisoned(t *testing.T, c *fetch.Cache) {
	t.Helper()
	blobs := filepath.Dir(c.BlobPath("x"))
	entries, err := os.ReadDir(blobs)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		b, err := os.ReadFile(filepath.Join(blobs, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != e.Name() {
			t.Errorf("the cache has %d wrong bytes as %s", len(b), e.Name())
		}
	}
	err = filepath.WalkDir(filepath.Join(blobs, "../tmp"), func(p string, d os.DirEntry, err error) error {
		if err == nil && strings.HasPrefix(d.Name(), "blob-") {
			t.Errorf("left unfinished: %s", p)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// layout is an OCI layout with documents that a test can change.
type layout struct {
	t    *testing.T
	dir  string
	imgs []configs.ContainerImage
}

func newLayout(t *testing.T, imgs ...imagetest.Image) *layout {
	t.Helper()
	dir, cs := writeLayout(t, imgs...)
	return &layout{t, dir, cs}
}

func (l *layout) blob(digest string) string {
	return filepath.Join(l.dir, "blobs/sha256", strings.TrimPrefix(digest, "sha256:"))
}

func (l *layout) read(digest string, doc any) {
	l.t.Helper()
	name := filepath.Join(l.dir, "index.json")
	if digest != "" {
		name = l.blob(digest)
	}
	raw, err := os.ReadFile(name)
	if err == nil {
		err = json.Unmarshal(raw, doc)
	}
	if err != nil {
		l.t.Fatal(err)
	}
}

// put stores a JSON document and returns its digest and size.
func (l *layout) put(doc any) (string, int) {
	l.t.Helper()
	raw, err := json.Marshal(doc)
	if err != nil {
		l.t.Fatal(err)
	}
	return l.putRaw(raw)
}

func (l *layout) putRaw(raw []byte) (string, int) {
	l.t.Helper()
	sum := sha256.Sum256(raw)
	digest := "sha256:" + hex.EncodeToString(sum[:])
	if err := os.WriteFile(l.blob(digest), raw, 0o644); err != nil {
		l.t.Fatal(err)
	}
	return digest, len(raw)
}

type jsonDoc = map[string]any

// change edits the manifest and config of the first image, and lets the index point to them.
func (l *layout) change(edit func(manifest, config jsonDoc)) {
	l.t.Helper()
	var index, manifest, config jsonDoc
	l.read("", &index)
	entry := index["manifests"].([]any)[0].(jsonDoc)
	l.read(entry["digest"].(string), &manifest)
	c := manifest["config"].(jsonDoc)
	l.read(c["digest"].(string), &config)
	edit(manifest, config)
	c["digest"], c["size"] = l.put(config)
	entry["digest"], entry["size"] = l.put(manifest)
	if mt, ok := manifest["mediaType"]; ok {
		entry["mediaType"] = mt
	}
	l.writeIndex(index)
}

func (l *layout) writeIndex(index jsonDoc) {
	l.t.Helper()
	raw, err := json.Marshal(index)
	if err != nil {
		l.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(l.dir, "index.json"), raw, 0o644); err != nil {
		l.t.Fatal(err)
	}
}

func layerOf(manifest jsonDoc, n int) jsonDoc { return manifest["layers"].([]any)[n].(jsonDoc) }

func TestBadLayouts(t *testing.T) {
	const ref = "edgebake.test/a:1"
	cut := func(t *testing.T, l *layout, compression string) {
		// The manifest is consistent, but its layer is incomplete.
		var whole bytes.Buffer
		raw := bytes.Repeat([]byte("data that compresses "), 10000)
		if compression == "gzip" {
			w := gzip.NewWriter(&whole)
			w.Write(raw)
			w.Close()
		} else {
			w, err := zstd.NewWriter(&whole)
			if err != nil {
				t.Fatal(err)
			}
			w.Write(raw)
			w.Close()
		}
		l.change(func(m, _ jsonDoc) {
			d := layerOf(m, 1)
			d["digest"], d["size"] = l.putRaw(whole.Bytes()[:whole.Len()-9])
			d["mediaType"] = "application/vnd.oci.image.layer.v1.tar+" + compression
		})
	}
	for _, tt := range []struct {
		name string
		do   func(t *testing.T, l *layout)
		want []string
	}{
		{"blob is damaged", func(t *testing.T, l *layout) {
			l.change(func(m, _ jsonDoc) {
				name := l.blob(layerOf(m, 1)["digest"].(string))
				raw, err := os.ReadFile(name)
				if err != nil {
					t.Fatal(err)
				}
				raw[4] ^= 1 // gzip's time stamp: the blob can still be uncompressed
				os.WriteFile(name, raw, 0o644)
			})
		}, []string{"layer 2 of 2", "expected", "fetch it again"}},
		{"blob is cut off", func(t *testing.T, l *layout) {
			l.change(func(m, _ jsonDoc) {
				name := l.blob(layerOf(m, 1)["digest"].(string))
				st, err := os.Stat(name)
				if err != nil {
					t.Fatal(err)
				}
				os.Truncate(name, st.Size()-1)
			})
		}, []string{"layer 2 of 2", "unexpected EOF", "fetch it again"}},
		{"blob is too long", func(t *testing.T, l *layout) {
			l.change(func(m, _ jsonDoc) {
				f, err := os.OpenFile(l.blob(layerOf(m, 1)["digest"].(string)), os.O_APPEND|os.O_WRONLY, 0)
				if err != nil {
					t.Fatal(err)
				}
				f.WriteString("more")
				f.Close()
			})
		}, []string{"layer 2 of 2", "longer than", "use another"}},
		{"diffID of another layer", func(t *testing.T, l *layout) {
			l.change(func(_, c jsonDoc) {
				diffs := c["rootfs"].(jsonDoc)["diff_ids"].([]any)
				diffs[1] = "sha256:" + strings.Repeat("ab", 32)
			})
		}, []string{"layer 2 of 2", "do not match the diffID", "pushed again"}},
		{"truncated gzip", func(t *testing.T, l *layout) { cut(t, l, "gzip") }, []string{"layer 2 of 2", "uncompressing", "unexpected EOF", "truncated", "its digest is right", "pushed again"}},
		{"truncated zstd", func(t *testing.T, l *layout) { cut(t, l, "zstd") }, []string{"layer 2 of 2", "uncompressing", "unexpected EOF", "truncated", "its digest is right", "pushed again"}},
		{"not what it was", func(t *testing.T, l *layout) {
			l.change(func(m, _ jsonDoc) {
				// The blob cannot be uncompressed. Still, the error must report its wrong digest.
				name := l.blob(layerOf(m, 1)["digest"].(string))
				raw, err := os.ReadFile(name)
				if err != nil {
					t.Fatal(err)
				}
				raw[0] ^= 1
				os.WriteFile(name, raw, 0o644)
			})
		}, []string{"layer 2 of 2", "expected", "changed in transit"}},
		{"unknown layer type", func(t *testing.T, l *layout) {
			l.change(func(m, _ jsonDoc) { layerOf(m, 0)["mediaType"] = "application/vnd.oci.image.layer.v1.tar+lzma" })
		}, []string{"layer 1 of 2", "tar+lzma", "with tar, tar+gzip or tar+zstd", "pushed again"}},
		{"unknown manifest type", func(t *testing.T, l *layout) {
			l.change(func(m, _ jsonDoc) { m["mediaType"] = "application/vnd.example.thing" })
		}, []string{"manifest", "application/vnd.example.thing", "neither a manifest nor an index", "name an image"}},
		{"docker schema 1", func(t *testing.T, l *layout) {
			l.change(func(m, _ jsonDoc) { m["mediaType"] = "application/vnd.docker.distribution.manifest.v1+prettyjws" })
		}, []string{"schema 1", "push the image again"}},
		{"artifact", func(t *testing.T, l *layout) {
			l.change(func(m, _ jsonDoc) {
				m["config"].(jsonDoc)["mediaType"] = "application/vnd.cncf.helm.config.v1+json"
			})
		}, []string{"helm.config", "another kind of artifact", "name an image"}},
		{"missing layer", func(t *testing.T, l *layout) {
			l.change(func(m, _ jsonDoc) { os.Remove(l.blob(layerOf(m, 1)["digest"].(string))) })
		}, []string{"layer 2 of 2", "incomplete"}},
		{"layer that is a named pipe", func(t *testing.T, l *layout) {
			l.change(func(m, _ jsonDoc) {
				name := l.blob(layerOf(m, 1)["digest"].(string))
				if err := errors.Join(os.Remove(name), unix.Mkfifo(name, 0o644)); err != nil {
					t.Fatal(err)
				}
			})
		}, []string{"layer 2 of 2", "is not a file"}},
		{"more layers than diffIDs", func(t *testing.T, l *layout) {
			l.change(func(_, c jsonDoc) { c["rootfs"].(jsonDoc)["diff_ids"] = []any{} })
		}, []string{"config", "lists 0 layers, but the manifest lists 2", "pushed again"}},
		{"digest that is a path", func(t *testing.T, l *layout) {
			l.change(func(m, _ jsonDoc) { layerOf(m, 0)["digest"] = "sha256:../../../../etc/passwd" })
		}, []string{"layer 1 of 2", "64 hex digits", "use another"}},
		{"layer that climbs out", func(t *testing.T, l *layout) {
			var raw bytes.Buffer
			tw := tar.NewWriter(&raw)
			(&imagetest.Writer{Writer: tw}).Put(tar.Header{Name: "../../../etc/shadow"}, "root::")
			tw.Close()
			l.change(func(m, c jsonDoc) {
				d := layerOf(m, 1)
				d["digest"], d["size"] = l.putRaw(raw.Bytes())
				d["mediaType"] = "application/vnd.oci.image.layer.v1.tar"
				c["rootfs"].(jsonDoc)["diff_ids"].([]any)[1] = d["digest"]
			})
		}, []string{"layer 2 of 2", "../../../etc/shadow", "leads out of the image; the image may be malicious: do not use it"}},
		{"layer that is no tar", func(t *testing.T, l *layout) {
			l.change(func(m, c jsonDoc) {
				d := layerOf(m, 1)
				d["digest"], d["size"] = l.putRaw(bytes.Repeat([]byte("this is no tar. "), 100))
				d["mediaType"] = "application/vnd.oci.image.layer.v1.tar"
				c["rootfs"].(jsonDoc)["diff_ids"].([]any)[1] = d["digest"]
			})
		}, []string{"layer 2 of 2", "reading the tar", "built again"}},
		{"not JSON", func(t *testing.T, l *layout) {
			var index jsonDoc
			l.read("", &index)
			e := index["manifests"].([]any)[0].(jsonDoc)
			e["digest"], e["size"] = l.putRaw([]byte("<html>"))
			raw, _ := json.Marshal(index)
			os.WriteFile(filepath.Join(l.dir, "index.json"), raw, 0o644)
		}, []string{"manifest", "not a manifest in JSON", "use another"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLayout(t, small(ref, "a"), small("edgebake.test/good:1", "good"))
			tt.do(t, l)
			c := newCache(t)
			o := testOptions()
			_, err := resolveAndBake(t, c, o, l.imgs)
			wantError(t, err, append(tt.want, ref)...)
			if fixes := strings.Count(err.Error(), "again"); fixes > 1 {
				t.Errorf("%d fixes: %v", fixes, err)
			}
			unpoisoned(t, c)
			// The other image is not affected.
			if _, err := resolveAndBake(t, c, o, l.imgs[1:]); err != nil {
				t.Errorf("the good image: %v", err)
			}
		})
	}
}

func TestMissingPlatformSaysWhichExist(t *testing.T) {
	img := small("edgebake.test/a:1", "a")
	img.Others = []imagetest.Image{{Arch: "arm64"}, {Arch: "s390x"}}
	l := newLayout(t, img)
	o := testOptions()
	o.Arch = "riscv64"
	_, err := resolveAndBake(t, newCache(t), o, l.imgs)
	wantError(t, err, "edgebake.test/a:1", "no manifest for linux/riscv64", "linux/amd64", "linux/arm64", "linux/s390x")

	l = newLayout(t, small("edgebake.test/b:1", "b"))
	_, err = resolveAndBake(t, newCache(t), o, l.imgs)
	wantError(t, err, "edgebake.test/b:1", "for linux/amd64, not for linux/riscv64")

	o.Arch = "amd64"
	img = small("edgebake.test/c:1", "c")
	img.Variant = "v2"
	l = newLayout(t, img)
	// As in containerd, a manifest outside an index may have any variant.
	if _, err = resolveAndBake(t, newCache(t), o, l.imgs); err != nil {
		t.Error(err)
	}
}

func TestPlatformIsChosen(t *testing.T) {
	for _, docker := range []bool{false, true} {
		img := small("edgebake.test/a:1", "amd")
		img.Docker = docker
		img.Others = []imagetest.Image{{Arch: "arm64", Docker: docker, Layers: []imagetest.Layer{imagetest.Script(imagetest.File("arm", 0o644, 0, 0, "arm"))}}}
		l := newLayout(t, img)
		o := testOptions()
		o.Arch = "arm64"
		c := newCache(t)
		r := mustBake(t, c, o, l.imgs)
		found := slices.ContainsFunc(r.Nodes, func(n nodeType) bool { return strings.HasSuffix(n.Path, "/fs/arm") })
		if !found {
			t.Error("the arm64 layer is not there")
		}
		if _, err := store.Verify(store.NodeFiles(r.Nodes, c), store.Root); err != nil {
			t.Error(err)
		}
	}
}

func TestOneTagTwoImages(t *testing.T) {
	a := newLayout(t, small("edgebake.test/a:1", "one"))
	b := newLayout(t, small("edgebake.test/a:1", "two"))
	_, err := Resolve(t.Context(), newCache(t), append(a.imgs, b.imgs...), testOptions())
	wantError(t, err, "edgebake.test/a:1", "two different images", a.dir, b.dir, "another tag")
	p, err := Resolve(t.Context(), newCache(t), append(a.imgs, a.imgs...), testOptions())
	if err != nil || len(p) != 1 {
		t.Errorf("the same image twice: %d, %v", len(p), err)
	}
}

func TestPinnedDigestIsKept(t *testing.T) {
	l := newLayout(t, small("edgebake.test/a:1", "one"))
	p, err := Resolve(t.Context(), newCache(t), l.imgs, testOptions())
	if err != nil {
		t.Fatal(err)
	}
	l.imgs[0].Digest = string(p[0].Target.Digest)
	if _, err := Resolve(t.Context(), newCache(t), l.imgs, testOptions()); err != nil {
		t.Error(err)
	}
	l.imgs[0].Digest = "sha256:" + strings.Repeat("1", 64)
	_, err = Resolve(t.Context(), newCache(t), l.imgs, testOptions())
	wantError(t, err, "edgebake.test/a:1", "sha256:111", string(p[0].Target.Digest))
}

func TestMissingNameSaysWhichExist(t *testing.T) {
	l := newLayout(t, small("edgebake.test/a:1", "a"), small("edgebake.test/b:1", "b"))
	l.imgs[0].Ref = "edgebake.test/c:1"
	_, err := Resolve(t.Context(), newCache(t), l.imgs, testOptions())
	wantError(t, err, "edgebake.test/c:1", "the layout has no image of that name, only edgebake.test/a:1, edgebake.test/b:1; use one of these as ref", "org.opencontainers.image.ref.name")

	// The error must show a short name in full, as the field ref requires it.
	l = newLayout(t, small("edgebake.test/a:1", "a"))
	var index jsonDoc
	l.read("", &index)
	index["manifests"].([]any)[0].(jsonDoc)["annotations"] = jsonDoc{"org.opencontainers.image.ref.name": "app:v1"}
	l.writeIndex(index)
	l.imgs[0].Ref = "localhost/app:v1"
	_, err = Resolve(t.Context(), newCache(t), l.imgs, testOptions())
	wantError(t, err, "only docker.io/library/app:v1; use one of these as ref")
	l.imgs[0].Ref = "docker.io/library/app:v1"
	if _, err := Resolve(t.Context(), newCache(t), l.imgs, testOptions()); err != nil {
		t.Error(err)
	}
}

// TestSoleImageOfSeveral checks that Sole is an error if a layout or archive contains several
// images, and that the error explains how to select one.
func TestSoleImageOfSeveral(t *testing.T) {
	l := newLayout(t, small("edgebake.test/a:1", "a"), small("edgebake.test/b:1", "b"))
	sole := configs.ContainerImage{Ref: Sole, Layout: l.dir}
	_, err := Resolve(t.Context(), newCache(t), []configs.ContainerImage{sole}, testOptions())
	wantError(t, err, "the image: OCI layout ", "must contain one image but has 2: edgebake.test/a:1 sha256:", ", edgebake.test/b:1 sha256:", "select one by digest")
	var index manifestDoc
	l.read("", &index)
	sole.Digest = string(index.Manifests[1].Digest)
	if p, err := Resolve(t.Context(), newCache(t), []configs.ContainerImage{sole}, testOptions()); err != nil || string(p[0].Target.Digest) != sole.Digest {
		t.Errorf("%+v, %v", p, err)
	}
	sole.Digest = "sha256:" + strings.Repeat("1", 64)
	_, err = Resolve(t.Context(), newCache(t), []configs.ContainerImage{sole}, testOptions())
	wantError(t, err, "the layout has no image sha256:111", "edgebake.test/b:1 sha256:", "correct the digest")
}

func TestAllProblemsAtOnce(t *testing.T) {
	_, err := Resolve(t.Context(), newCache(t), []configs.ContainerImage{
		{Ref: "edgebake.test/untagged"},
		{Ref: "edgebake.test/a:1", Layout: "/nonexistent/layout"},
		{Ref: "edgebake.test/b:1", Archive: "/nonexistent/archive.tar"},
		{Ref: "edgebake.test/c:1", Layout: "x", Archive: "y"},
	}, testOptions())
	wantError(t, err, "untagged:1.2.3", "/nonexistent/layout", "/nonexistent/archive.tar", "keep one")
}

// server is a registry on the loopback interface. It serves a layout, and can fail.
type server struct {
	*httptest.Server
	host string
	auth string // required user:password
	// fail, if set, may answer a request instead of the registry. It returns false if it did not
	// answer.
	fail func(w http.ResponseWriter, r *http.Request) bool
	gets atomic.Int64
	mu   sync.Mutex
}

func serve(t *testing.T, l *layout, start func(http.Handler) *httptest.Server) *server {
	t.Helper()
	s := &server{}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v2/{$}", func(http.ResponseWriter, *http.Request) {})
	blob := func(w http.ResponseWriter, digest string) {
		raw, err := os.ReadFile(l.blob(digest))
		if err != nil {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}`)
			return
		}
		w.Header().Set("Docker-Content-Digest", digest)
		w.Write(raw)
	}
	mux.HandleFunc("GET /v2/{a}/manifests/{ref}", func(w http.ResponseWriter, r *http.Request) {
		var index manifestDoc
		l.read("", &index)
		digest := r.PathValue("ref")
		for _, d := range index.Manifests {
			if string(d.Digest) == digest || strings.HasSuffix(d.Annotations[annotationRefName], "/"+r.PathValue("a")+":"+digest) {
				digest = string(d.Digest)
				w.Header().Set("Content-Type", d.MediaType)
			}
		}
		if w.Header().Get("Content-Type") == "" {
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
		}
		blob(w, digest)
	})
	mux.HandleFunc("GET /v2/{a}/blobs/{digest}", func(w http.ResponseWriter, r *http.Request) { blob(w, r.PathValue("digest")) })
	s.Server = start(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.gets.Add(1)
		s.mu.Lock()
		fail := s.fail
		s.mu.Unlock()
		if s.auth != "" {
			if u, p, _ := r.BasicAuth(); u+":"+p != s.auth {
				w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
		}
		if fail != nil && fail(w, r) {
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	s.host = strings.TrimPrefix(strings.TrimPrefix(s.URL, "http://"), "https://")
	return s
}

// fromRegistry bakes image a:1 from a server.
func fromRegistry(t *testing.T, c *fetch.Cache, s *server, edit func(*Options)) (*Result, error) {
	o := testOptions()
	o.Registries = []configs.Registry{{Host: s.host, Insecure: true}}
	if edit != nil {
		edit(&o)
	}
	return resolveAndBake(t, c, o, []configs.ContainerImage{{Ref: s.host + "/a:1"}})
}

func TestRegistry(t *testing.T) {
	l := newLayout(t, small("edgebake.test/a:1", "a"))
	for name, start := range map[string]func(http.Handler) *httptest.Server{"http": httptest.NewServer, "tls": httptest.NewTLSServer} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, l, start)
			c := newCache(t)
			r, err := fromRegistry(t, c, s, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := store.Verify(store.NodeFiles(r.Nodes, c), store.Root); err != nil {
				t.Error(err)
			}
			// Without its entry in the configuration, the insecure registry is rejected.
			_, err = fromRegistry(t, newCache(t), s, func(o *Options) { o.Registries = nil })
			why := map[string]string{"http": " speaks plain HTTP, not HTTPS; ", "tls": " has a certificate that cannot be verified: "}
			wantError(t, err, s.host+"/a:1", s.host+why[name], "insecure: true for this host")
			// The cache now contains all blobs, so only the tag must be requested.
			before := s.gets.Load()
			s.fail = func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, "/blobs/") {
					t.Errorf("asked for %s again", r.URL.Path)
				}
				return false
			}
			again, err := fromRegistry(t, c, s, nil)
			if err != nil || s.gets.Load() == before {
				t.Fatalf("%v after %d requests", err, s.gets.Load()-before)
			}
			// With a digest, nothing is requested.
			before = s.gets.Load()
			o := testOptions()
			o.Registries = []configs.Registry{{Host: s.host, Insecure: true}}
			locked, err := resolveAndBake(t, c, o, []configs.ContainerImage{{Ref: s.host + "/a:1", Digest: again.Images[0].Digest}})
			if err != nil || s.gets.Load() != before {
				t.Fatalf("%v after %d requests, with the digest pinned", err, s.gets.Load()-before)
			}
			if render(t, locked) != render(t, again) {
				t.Error("the results from the cache and from the registry differ")
			}
		})
	}
}

func TestPlainHTTPIsRefused(t *testing.T) {
	s := serve(t, newLayout(t, small("edgebake.test/a:1", "a")), httptest.NewServer)
	_, err := fromRegistry(t, newCache(t), s, func(o *Options) { o.Registries = nil })
	wantError(t, err, s.host+"/a:1", "insecure: true")
	if s.gets.Load() > 0 {
		t.Errorf("%d requests went out in plain text", s.gets.Load())
	}
}

func TestRegistryFailures(t *testing.T) {
	status := func(code int, match string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, match) {
				return false
			}
			w.WriteHeader(code)
			fmt.Fprint(w, "<html><h1>Sorry</h1></html>")
			return true
		}
	}
	says := func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"errors":[{"code":"DENIED","message":"not on\n Sundays"}]}`)
		return true
	}
	realm := func(url string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("WWW-Authenticate", `Bearer realm="`+url+`"`)
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}
	}
	page := func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, "<html>please log in to this hotel's network</html>")
		return true
	}
	hang := func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		<-r.Context().Done()
		return true
	}
	hangup := func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/manifests/") {
			panic(http.ErrAbortHandler)
		}
		return false
	}
	stall := func(match string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, match) {
				return false
			}
			w.Header().Set("Content-Length", "100000")
			w.Write([]byte("begun"))
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return true
		}
	}
	short := func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			return false
		}
		w.Write([]byte("not the blob"))
		return true
	}
	// Only the silent server gets a short timeout: on a busy machine, other responses may take
	// longer.
	const briefly = 300 * time.Millisecond
	for _, tt := range []struct {
		name  string
		fail  func(http.ResponseWriter, *http.Request) bool
		stall time.Duration
		want  []string
	}{
		{"401", status(401, "/manifests/"), 0, []string{"answered 401 Unauthorized; log in", "authFile"}},
		{"403", status(403, "/manifests/"), 0, []string{"answered 403 Forbidden; log in", "authFile"}},
		{"403 with a reason", says, 0, []string{"answered 403 Forbidden: not on Sundays; log in"}},
		{"404", status(404, "/manifests/"), 0, []string{"answered 404 Not Found; check repository, tag and digest for spelling"}},
		{"404 blob", status(404, "/blobs/"), 0, []string{"config sha256:", "answered 404 Not Found; it lacks a part of the image", "pushed again"}},
		{"429", status(429, "/manifests/"), 0, []string{"limits requests", "mirror"}},
		{"500", status(500, "/manifests/"), 0, []string{"failing", "mirror"}},
		{"503 blob", status(503, "/blobs/"), 0, []string{"config sha256:", "failing"}},
		{"hangs up", hangup, 0, []string{"closed the connection without a response", "proxy", "mirror"}},
		{"hangs", hang, briefly, []string{"sent nothing for 300ms", "proxy", "mirror"}},
		{"stalls", stall("/blobs/"), briefly, []string{"sent nothing for 300ms", "proxy", "mirror"}},
		{"stalls in a manifest", stall("/manifests/"), briefly, []string{"sent nothing for 300ms", "proxy", "mirror"}},
		{"wrong bytes", short, 0, []string{"config sha256:", "expected", "use another source"}},
		{"login server by address", realm("http://10.1.2.3/token"), 0, []string{"10.1.2.3", "by a host name"}},
		{"a page", page, 0, []string{"the response is not an image manifest (its type is \"text/html", "login page"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := serve(t, newLayout(t, small("edgebake.test/a:1", "a")), httptest.NewServer)
			s.fail = tt.fail
			c := newCache(t)
			_, err := fromRegistry(t, c, s, func(o *Options) { o.Stall = tt.stall })
			wantError(t, err, append(tt.want, "image "+s.host+"/a:1: fetching", ": "+s.host)...)
			for _, noise := range []string{"<h", "GET ", "http:", "from registry"} {
				if strings.Contains(err.Error(), noise) {
					t.Errorf("noise (%s): %v", noise, err)
				}
			}
			unpoisoned(t, c)
			// When the registry works again, the same cache must be usable.
			s.mu.Lock()
			s.fail = nil
			s.mu.Unlock()
			if _, err := fromRegistry(t, c, s, nil); err != nil {
				t.Errorf("after the registry works again: %v", err)
			}
		})
	}
}

// TestRegistryIsRetried checks that a request that fails once is repeated.
func TestRegistryIsRetried(t *testing.T) {
	s := serve(t, newLayout(t, small("edgebake.test/a:1", "a")), httptest.NewServer)
	var once atomic.Bool
	s.fail = func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/manifests/") && once.CompareAndSwap(false, true) {
			w.WriteHeader(http.StatusServiceUnavailable)
			return true
		}
		return false
	}
	if _, err := fromRegistry(t, newCache(t), s, nil); err != nil || !once.Load() {
		t.Error(err)
	}
}

// TestNextMirrorAfterSpoiledTransfer checks that the next mirror is used after a transfer that was
// interrupted or returned wrong bytes.
func TestNextMirrorAfterSpoiledTransfer(t *testing.T) {
	for name, spoil := range map[string]func(raw []byte) []byte{
		"breaks off":  func(raw []byte) []byte { return raw[:len(raw)/2] },
		"wrong bytes": func(raw []byte) []byte { raw[len(raw)/2] ^= 1; return raw },
	} {
		t.Run(name, func(t *testing.T) {
			l := newLayout(t, small("edgebake.test/a:1", "a"))
			good, bad := serve(t, l, httptest.NewServer), serve(t, l, httptest.NewServer)
			var spoiled atomic.Int64
			bad.fail = func(w http.ResponseWriter, r *http.Request) bool {
				_, digest, ok := strings.Cut(r.URL.Path, "/blobs/")
				raw, err := os.ReadFile(l.blob(digest))
				if !ok || err != nil {
					return false
				}
				spoiled.Add(1)
				w.Header().Set("Content-Length", fmt.Sprint(len(raw)))
				w.Write(spoil(raw))
				return true
			}
			o := testOptions()
			o.Registries = []configs.Registry{
				{Host: "127.0.0.1:1", Mirrors: []string{bad.host, good.host}},
				{Host: bad.host, Insecure: true}, {Host: good.host, Insecure: true},
			}
			wanted := []configs.ContainerImage{{Ref: "127.0.0.1:1/a:1"}}
			c := newCache(t)
			var mu sync.Mutex
			var warnings []string
			o.Warn = func(text string) {
				mu.Lock()
				defer mu.Unlock()
				warnings = append(warnings, text)
			}
			if _, err := resolveAndBake(t, c, o, wanted); err != nil || spoiled.Load() != 3 {
				t.Errorf("%d blobs spoiled, wanted one config and two layers: %v", spoiled.Load(), err)
			}
			// Each of the two steps must warn once.
			if len(warnings) != 2 || !strings.HasPrefix(warnings[0], bad.host) || !strings.HasSuffix(warnings[0], "; trying the next host") {
				t.Errorf("warnings: %q", warnings)
			}
			unpoisoned(t, c)
			// If all hosts fail, the error names each of them with its fix.
			good.mu.Lock()
			good.fail = func(w http.ResponseWriter, r *http.Request) bool {
				if strings.Contains(r.URL.Path, "/blobs/") {
					w.WriteHeader(http.StatusInternalServerError)
				}
				return strings.Contains(r.URL.Path, "/blobs/")
			}
			good.mu.Unlock()
			c = newCache(t)
			_, err := resolveAndBake(t, c, o, wanted)
			wantError(t, err, "config sha256:", "nor the registry provides it:\n  "+bad.host, "\n  "+good.host+" answered 500", "try later", "\n  127.0.0.1:1 ")
			unpoisoned(t, c)
		})
	}
}

// TestBadMirrorsAreAskedLast checks that after a mirror has timed out once, every blob is first
// requested from the other hosts.
func TestBadMirrorsAreAskedLast(t *testing.T) {
	r := newRegistry(&Options{Registries: []configs.Registry{{Host: "a.test", Mirrors: []string{"b.test", "c.test"}}}}, nil)
	ref := imageref.Ref{Domain: "a.test", Path: "x", Tag: "1"}
	bad := map[string]error{}
	asked := func(digest imageref.Digest) string {
		var hosts []string
		r.each(t.Context(), ref, digest, func(_ *remote.Puller, repo name.Repository) (bool, error) {
			hosts = append(hosts, repo.RegistryStr())
			return false, bad[repo.RegistryStr()]
		})
		return strings.Join(hosts, " ")
	}
	bad["b.test"] = errors.New("not found")
	if got := asked("sha256:1") + ", " + asked("sha256:1") + ", " + asked("sha256:2"); got != "b.test c.test, b.test c.test, b.test c.test" {
		t.Error(got)
	}
	bad["b.test"] = transfer.ErrStalled
	if got := asked("") + ", " + asked("") + ", " + asked("sha256:3"); got != "b.test c.test, c.test, c.test" {
		t.Error(got)
	}
}

// TestBrokenTransferIsRepeated checks that an interrupted transfer is started again.
func TestBrokenTransferIsRepeated(t *testing.T) {
	l := newLayout(t, small("edgebake.test/a:1", "a"))
	s := serve(t, l, httptest.NewServer)
	var broken sync.Map
	var count atomic.Int64
	s.fail = func(w http.ResponseWriter, r *http.Request) bool {
		_, digest, ok := strings.Cut(r.URL.Path, "/blobs/")
		raw, err := os.ReadFile(l.blob(digest))
		if !ok || err != nil || raw[0] == '{' {
			return false // fail only for layers
		}
		if _, before := broken.LoadOrStore(digest, true); before {
			return false
		}
		count.Add(1)
		w.Header().Set("Content-Length", fmt.Sprint(len(raw)))
		w.Write(raw[:len(raw)/2])
		return true
	}
	c := newCache(t)
	if _, err := fromRegistry(t, c, s, nil); err != nil || count.Load() != 2 {
		t.Errorf("%d transfers broken: %v", count.Load(), err)
	}
	unpoisoned(t, c)
}

func TestMirrors(t *testing.T) {
	l := newLayout(t, small("edgebake.test/a:1", "a"))
	dead := serve(t, l, httptest.NewServer)
	dead.fail = func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(http.StatusNotFound); return true }
	mirror := serve(t, l, httptest.NewServer)
	o := testOptions()
	o.Registries = []configs.Registry{
		{Host: "registry.invalid", Mirrors: []string{dead.host, mirror.host}},
		{Host: dead.host, Insecure: true}, {Host: mirror.host, Insecure: true},
	}
	r, err := resolveAndBake(t, newCache(t), o, []configs.ContainerImage{{Ref: "registry.invalid/a:1"}})
	if err != nil {
		t.Fatal(err)
	}
	if r.Images[0].Ref != "registry.invalid/a:1" || dead.gets.Load() == 0 || mirror.gets.Load() == 0 {
		t.Errorf("%+v; requests %d and %d", r.Images, dead.gets.Load(), mirror.gets.Load())
	}
	// Name the mirror with a path, as a URL, and as a URL with a path.
	mirror.fail = func(_ http.ResponseWriter, r *http.Request) bool {
		r.URL.Path = strings.Replace(r.URL.Path, "/copies/of/", "/", 1)
		return false
	}
	for _, form := range []string{mirror.host + "/copies/of", "http://" + mirror.host, "https://" + mirror.host + "/copies/of/"} {
		o.Registries[0].Mirrors = []string{form}
		if _, err := resolveAndBake(t, newCache(t), o, []configs.ContainerImage{{Ref: "registry.invalid/a:1"}}); err != nil {
			t.Errorf("%s: %v", form, err)
		}
	}
}

func TestAuthFile(t *testing.T) {
	s := serve(t, newLayout(t, small("edgebake.test/a:1", "a")), httptest.NewServer)
	s.auth = "robot:hunter2"
	helper := filepath.Join(t.TempDir(), "docker-credential-edgebake-test")
	desk.WriteProgram(t, helper, "#!/bin/sh\nread server\n[ \"$server\" = "+s.host+" ] && echo '{\"Username\":\"robot\",\"Secret\":\"hunter2\"}' || { echo 'credentials not found in native keychain'; exit 1; }\n")
	t.Setenv("PATH", filepath.Dir(helper)+":"+os.Getenv("PATH"))
	write := func(doc string) string {
		name := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(name, []byte(doc), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	for _, tt := range []struct{ doc, want string }{
		{`{"auths":{"` + s.host + `":{"username":"robot","password":"hunter2"}}}`, ""},
		{`{"auths":{"` + s.host + `":{"auth":"cm9ib3Q6aHVudGVyMg=="}}}`, ""},
		{`{"auths":{"` + s.host + `":{"auth":"wrong"}}}`, "base64"},
		{`{"auths":{"` + s.host + `":{"auth":"cm9ib3Q="}}}`, "base64 of user:password"},
		{`{"auths":{"https://` + s.host + `/v1/":{"username":"robot","password":"hunter2"}}}`, ""},
		{`{"credHelpers":{"` + s.host + `":"edgebake-test"}}`, ""},
		{`{"credsStore":"edgebake-test"}`, ""},
		{`{"credHelpers":{"` + s.host + `":"edgebake-none"}}`, "the credential helper docker-credential-edgebake-none is not installed"},
		{`{"auths":{}}`, "correct the login of " + s.host + " in auths of /"},
		{`{"auths":{"` + s.host + `":{"username":"robot","password":"other"}}}`, "config.json, or add it there"},
		{`hunter2`, "not a docker config.json"},
	} {
		_, err := fromRegistry(t, newCache(t), s, func(o *Options) { o.Registries[0].AuthFile = write(tt.doc) })
		if tt.want == "" {
			if err != nil {
				t.Errorf("%s: %v", tt.doc, err)
			}
			continue
		}
		wantError(t, err, tt.want)
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("the password is in the message: %v", err)
		}
	}
	// This is a user's configuration as Docker Desktop writes it.
	docker := write(`{"credsStore":"edgebake-none"}`)
	t.Setenv("DOCKER_CONFIG", filepath.Dir(docker))
	_, err := fromRegistry(t, newCache(t), s, func(o *Options) { o.Registries[0].AuthFile = "" })
	wantError(t, err, docker, "docker-credential-edgebake-none, which", "is not installed", "remove credsStore")
	s.auth = "" // without a required login, the missing helper is no error
	if _, err := fromRegistry(t, newCache(t), s, func(o *Options) { o.Registries[0].AuthFile = "" }); err != nil {
		t.Errorf("an anonymous pull: %v", err)
	}
	s.auth = "robot:hunter2"
	_, err = fromRegistry(t, newCache(t), s, func(o *Options) { o.Registries[0].AuthFile = "/nonexistent/auth.json" })
	wantError(t, err, "/nonexistent/auth.json", "correct the path in authFile")
}

// TestUnreachableRegistry uses a registry that does not exist.
func TestUnreachableRegistry(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free := ln.Addr().String()
	ln.Close()
	o := testOptions()
	o.Registries = []configs.Registry{{Host: free, Insecure: true}}
	for ref, want := range map[string]string{free + "/a:1": "check the network", "registry.invalid/a:1": "registry.invalid"} {
		c := newCache(t)
		_, err := Resolve(t.Context(), c, []configs.ContainerImage{{Ref: ref}}, o)
		wantError(t, err, ref, want, "name a mirror")
		unpoisoned(t, c)
	}
}

func TestBlobErrorIsTyped(t *testing.T) {
	s := serve(t, newLayout(t, small("edgebake.test/a:1", "a")), httptest.NewServer)
	s.fail = func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(http.StatusNotFound); return true }
	_, err := fromRegistry(t, newCache(t), s, nil)
	var be *BlobError
	if !errors.As(err, &be) || be.Ref != s.host+"/a:1" || be.What != "manifest" {
		t.Errorf("%v", err)
	}
}
