package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/test/imagetest"
	"github.com/klauspost/compress/zstd"
)

// tarDir packs a directory as a tar.
func tarDir(t *testing.T, dir string) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// dockerSave makes an archive like old versions of `docker save`: layers have names, but no
// digests. One layer is a link to a layer of another image.
func dockerSave(t *testing.T, refs ...string) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := &imagetest.Writer{Writer: tar.NewWriter(&buf)}
	layer := func(name, text string) string {
		var l bytes.Buffer
		lw := &imagetest.Writer{Writer: tar.NewWriter(&l)}
		if err := lw.Put(tar.Header{Name: "etc/" + name, Mode: 0o644}, text); err != nil {
			t.Fatal(err)
		}
		lw.Close()
		return l.String()
	}
	base := layer("base", "base")
	var list []dockerImage
	for n, ref := range refs {
		id := strings.Repeat(string(rune('a'+n)), 64)
		own := layer("own", ref)
		config, err := json.Marshal(map[string]any{"architecture": "amd64", "os": "linux", "rootfs": map[string]any{
			"type": "layers", "diff_ids": []string{"sha256:" + sum(base), "sha256:" + sum(own)}}})
		if err != nil {
			t.Fatal(err)
		}
		put := func(h tar.Header, body string) {
			if err := w.Put(h, body); err != nil {
				t.Fatal(err)
			}
		}
		put(tar.Header{Name: id + ".json", Mode: 0o644}, string(config))
		if n == 0 {
			put(tar.Header{Name: "base/layer.tar", Mode: 0o644}, base)
		} else {
			put(tar.Header{Name: id + "-base/layer.tar", Typeflag: tar.TypeSymlink, Linkname: "../base/layer.tar", Mode: 0o777}, "")
		}
		put(tar.Header{Name: id + "/layer.tar", Mode: 0o644}, own)
		from := "base/layer.tar"
		if n > 0 {
			from = id + "-base/layer.tar"
		}
		list = append(list, dockerImage{Config: id + ".json", RepoTags: []string{ref}, Layers: []string{from, id + "/layer.tar"}})
	}
	raw, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Put(tar.Header{Name: "manifest.json", Mode: 0o644}, string(raw)); err != nil {
		t.Fatal(err)
	}
	w.Close()
	return buf.Bytes()
}

func compressed(t *testing.T, b []byte, how string) []byte {
	t.Helper()
	var out bytes.Buffer
	var w io.WriteCloser
	var err error
	switch how {
	case "gzip":
		w = gzip.NewWriter(&out)
	case "zstd":
		w, err = zstd.NewWriter(&out)
	default:
		return b
	}
	if err == nil {
		_, err = w.Write(b)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestArchivesAsSources(t *testing.T) {
	dir, _ := writeLayout(t, small("edgebake.test/a:1", "a"), small("edgebake.test/b:1", "b"))
	for kind, raw := range map[string][]byte{
		"oci":    tarDir(t, dir),
		"docker": dockerSave(t, "edgebake.test/a:1", "edgebake.test/b:1"),
	} {
		var before string
		for _, how := range []string{"", "gzip", "zstd"} {
			t.Run(kind+how, func(t *testing.T) {
				name := filepath.Join(t.TempDir(), "images.tar")
				if err := os.WriteFile(name, compressed(t, raw, how), 0o644); err != nil {
					t.Fatal(err)
				}
				o := testOptions()
				o.Dir = filepath.Dir(name)
				c := newCache(t)
				r := mustBake(t, c, o, []configs.ContainerImage{
					{Ref: "edgebake.test/a:1", Archive: "images.tar"}, {Ref: "edgebake.test/b:1", Archive: "images.tar"}})
				if _, err := store.Verify(store.NodeFiles(r.Nodes, c), store.Root); err != nil {
					t.Error(err)
				}
				if r.Report.Layers != 3 {
					t.Errorf("%d layers, want 3: one shared and two others", r.Report.Layers)
				}
				got := render(t, r)
				if before != "" && got != before {
					t.Error("the archive's compression changes the result")
				}
				before = got
			})
		}
	}
}

// rewritten is an archive that changes before it is read for the third time. The first time, its
// compression is detected; the second time, its digest is computed.
type rewritten struct {
	*os.File
	reads int
	write func()
}

func (f *rewritten) ReadAt(p []byte, off int64) (int, error) {
	if f.reads++; f.reads == 3 {
		f.write()
	}
	return f.File.ReadAt(p, off)
}

// TestArchiveChangesWhileRead checks that it is an error if an archive changes while it is
// uncompressed, and that its new content is not cached under the old digest.
func TestArchiveChangesWhileRead(t *testing.T) {
	for _, how := range []string{"gzip", "zstd"} {
		t.Run(how, func(t *testing.T) {
			o, c := testOptions(), newCache(t)
			o.Dir = t.TempDir()
			name := filepath.Join(o.Dir, "images.tar")
			write := func(ref string) {
				if err := os.WriteFile(name, compressed(t, dockerSave(t, ref), how), 0o644); err != nil {
					t.Error(err)
				}
			}
			pin := func(c *fetch.Cache) []Pinned {
				t.Helper()
				write("edgebake.test/a:1")
				pinned, err := Resolve(t.Context(), c, []configs.ContainerImage{{Ref: "edgebake.test/a:1", Archive: "images.tar"}}, o)
				if err != nil {
					t.Fatal(err)
				}
				return pinned
			}
			write("edgebake.test/a:1")
			f, err := os.Open(name)
			if err != nil {
				t.Fatal(err)
			}
			src, err := openTar(t.Context(), c, &rewritten{File: f, write: func() { write("edgebake.test/b:1") }}, name, sizeLimit{layer: 1 << 30})
			if err == nil {
				src.Close()
			}
			wantError(t, err, "the file changes while it is read")
			if got, want := pin(c), pin(newCache(t)); !reflect.DeepEqual(got, want) {
				t.Errorf("the pinned images are %+v, want %+v", got, want)
			}
		})
	}
}

func TestBadArchives(t *testing.T) {
	dir, _ := writeLayout(t, small("edgebake.test/a:1", "a"))
	whole := tarDir(t, dir)
	for name, tt := range map[string]struct {
		raw  []byte
		want string
	}{
		"cut off":       {whole[:len(whole)/2], "truncated"},
		"cut off, gzip": {compressed(t, whole, "gzip")[:200], "unexpected EOF; the archive is truncated"},
		"cut off, zstd": {compressed(t, whole, "zstd")[:200], "unexpected EOF"},
		"empty":         {nil, "docker save"},
		"other tar":     {tarDir(t, filepath.Join(dir, "blobs")), "docker save"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "images.tar")
			if err := os.WriteFile(file, tt.raw, 0o644); err != nil {
				t.Fatal(err)
			}
			c := newCache(t)
			_, err := Resolve(t.Context(), c, []configs.ContainerImage{{Ref: "edgebake.test/a:1", Archive: file}}, testOptions())
			wantError(t, err, "edgebake.test/a:1", file, tt.want)
			unpoisoned(t, c)
		})
	}
	file := filepath.Join(t.TempDir(), "saved.tar")
	if err := os.WriteFile(file, dockerSave(t, "edgebake.test/a:1"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := Resolve(t.Context(), newCache(t), []configs.ContainerImage{{Ref: "edgebake.test/z:1", Archive: file}}, testOptions())
	wantError(t, err, "edgebake.test/z:1", "edgebake.test/a:1")
}

func TestModeImport(t *testing.T) {
	_, imgs := writeLayout(t, small("edgebake.test/pause:1", "p"), small("edgebake.test/a:1", "a"))
	c := newCache(t)
	o := testOptions()
	o.Sandbox = "edgebake.test/pause:1"
	pinned, err := Resolve(t.Context(), c, imgs, o)
	if err != nil {
		t.Fatal(err)
	}
	r, err := fetchAndArchive(t.Context(), c, pinned, o)
	if err != nil {
		t.Fatal(err)
	}
	f := store.NodeFiles(r.Nodes, c)
	dir := strings.TrimPrefix(ondisk.ImportImageDir, "/")
	in, err := f.Open(dir + "/" + ondisk.ImportIndexFile)
	if err != nil {
		t.Fatal(err)
	}
	var index ondisk.ImportIndex
	if err := json.NewDecoder(in).Decode(&index); err != nil || len(index.Archives) != 2 {
		t.Fatalf("%+v, %v", index, err)
	}
	// The generated archive is complete, so it can be baked.
	out := t.TempDir()
	var again []configs.ContainerImage
	for _, a := range index.Archives {
		in, err := f.Open(dir + "/" + a.File)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := io.ReadAll(in)
		if err != nil || int64(len(raw)) != a.Size || sum(string(raw)) != a.SHA256 || a.Platform != "linux/amd64" {
			t.Errorf("%+v: %d bytes, %v", a, len(raw), err)
		}
		if len(a.Names) != 1 || a.Names[0] != strings.TrimSuffix(a.Ref, ":1")+"@"+a.Digest {
			t.Errorf("names %q", a.Names)
		}
		if a.Labels[store.LabelPinned] != "pinned" {
			t.Errorf("labels %v", a.Labels)
		}
		if err := os.WriteFile(filepath.Join(out, a.File), raw, 0o644); err != nil {
			t.Fatal(err)
		}
		again = append(again, configs.ContainerImage{Ref: a.Ref, Archive: filepath.Join(out, a.File), Digest: a.Digest})
	}
	mustBake(t, newCache(t), o, again)
	for _, n := range r.Nodes {
		if !fs.ValidPath(n.Path) {
			t.Errorf("path %q", n.Path)
		}
	}
}

const manifests = `
apiVersion: v1
kind: ConfigMap
metadata: {name: c}
data: {image: "not/an:image"}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: agent}
spec:
  template:
    spec:
      initContainers: [{name: i, image: edgebake.test/init:1}]
      containers:
      - name: c
        image: edgebake.test/agent:1
      - {name: d, image: edgebake.test/agent:1}
---
apiVersion: v1
kind: List
items:
- kind: Pod
  metadata: {name: p}
  spec:
    containers: [{image: pod:1}]
    ephemeralContainers: [{image: edgebake.test/debug:1}]
- kind: CronJob
  metadata: {name: j}
  spec: {jobTemplate: {spec: {template: {spec: {containers: [{image: edgebake.test/job:1}]}}}}}
- kind: StatefulSet
  spec: {template: {spec: {containers: [{image: edgebake.test/set:1}]}}}
- kind: Job
  spec: {template: {spec: {containers: [{image: edgebake.test/once:1}]}}}
- {kind: Deployment, spec: {template: {spec: {containers: [{image: edgebake.test/web:1}]}}}}
`

func TestImagesfromManifests(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("all.yaml", manifests)
	write("one.json", `{"kind":"Pod","metadata":{"name":"j"},"spec":{"containers":[{"image":"edgebake.test/json:1"}]}}`)
	m, err := fromManifests(dir, []string{"*.yaml", "one.json", "all.yaml"})
	if err != nil {
		t.Fatal(err)
	}
	found := m.run
	if len(m.mentions) != 1 || m.mentions[0].Where != "all.yaml:5: ConfigMap c" || m.mentions[0].Text != "not/an:image" {
		t.Errorf("mentions %+v", m.mentions)
	}
	var refs []string
	for _, f := range found {
		refs = append(refs, f.Ref.String())
	}
	want := []string{"docker.io/library/pod:1", "edgebake.test/agent:1", "edgebake.test/debug:1", "edgebake.test/init:1", "edgebake.test/job:1",
		"edgebake.test/json:1", "edgebake.test/once:1", "edgebake.test/set:1", "edgebake.test/web:1"}
	if !slices.Equal(refs, want) {
		t.Errorf("got  %q\nwant %q", refs, want)
	}
	if found[1].Where != "all.yaml:16: DaemonSet agent" {
		t.Errorf("where: %s", found[1].Where)
	}

	write("bad.yaml", "kind: Pod\nmetadata: {name: x}\nspec: {containers: [{image: untagged}, {image: 'A B'}]}\n")
	write("broken.yaml", "kind: [")
	write("bomb.yaml", "kind: List\nitems: &x [{kind: List, items: *x}]\n")
	_, err = fromManifests(dir, []string{"b*.yaml", "none/*.yaml"})
	wantError(t, err, "bad.yaml:3: Pod x", "untagged:1.2.3", `"A B"`, "broken.yaml", "no file matches", "bomb.yaml: line 2: the alias *x")

	// A failed kubectl leaves an empty file, and so does a cluster without pods.
	write("empty.yaml", "")
	write("text.yaml", "The connection to the server localhost:8080 was refused")
	write("list.yaml", "apiVersion: v1\nkind: List\nitems: []\n")
	for _, name := range []string{"empty.yaml", "text.yaml", "list.yaml", "[elt]*t*.yaml"} {
		_, err := fromManifests(dir, []string{"all.yaml", name})
		wantError(t, err, fmt.Sprintf("imagesFrom[1]: %q: no matching file has a manifest that runs a container image", name))
	}
	if _, err := fromManifests(dir, []string{"*l*.yaml"}); err != nil {
		t.Errorf("with another file that runs images: %v", err)
	}
}

func TestListAddsWhatIsNeeded(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "m.yaml"), []byte(manifests), 0o644); err != nil {
		t.Fatal(err)
	}
	img := &configs.Image{
		Kubernetes: configs.Kubernetes{Version: "v1.36.3"},
		Containerd: configs.Containerd{Sandbox: "edgebake.test/pause:1"},
		Yurthub:    &configs.Yurthub{Form: "staticPod", Image: &configs.ContainerImage{Ref: "edgebake.test/yurthub:1", Layout: "y"}},
		Images:     []configs.ContainerImage{{Ref: "edgebake.test/pause:1", Layout: "l"}, {Ref: "edgebake.test/web:1", Layout: "l"}},
		ImagesFrom: []string{"m.yaml"},
	}
	listing, err := List(img, dir)
	if err != nil {
		t.Fatal(err)
	}
	list, notes := listing.Images, listing.Notes
	sources := map[string]string{}
	for _, i := range list {
		sources[i.Ref] += i.Layout + ";"
	}
	if len(list) != 2+1+7 || sources["edgebake.test/pause:1"] != "l;" || sources["edgebake.test/web:1"] != "l;" || sources["edgebake.test/yurthub:1"] != "y;" {
		t.Errorf("%v", sources)
	}
	if len(notes) != 2 || !strings.Contains(notes[0].Msg, "docker.io/not/an:image was found but not baked") || !strings.Contains(notes[1].Msg, "kube-proxy:v1.36.3") {
		t.Errorf("notes %q", notes)
	}
}

func FuzzImagesOf(f *testing.F) {
	f.Add([]byte(manifests))
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, _ := scanManifests("fuzz", b)
		for _, i := range append(m.run, m.mentions...) {
			if _, err := imageref.Parse(i.Ref.String()); err != nil {
				t.Errorf("%q: %v", i.Ref, err)
			}
		}
	})
}
