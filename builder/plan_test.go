package builder

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/disktest"
	"github.com/edgebake/edgebake/test/imagetest"
)

// inFile encodes and decodes a plan, as if another computer read it from a file.
func inFile(t *testing.T, p *plan.Plan) *plan.Plan {
	t.Helper()
	data, err := p.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if p, err = plan.Decode(data); err != nil {
		t.Fatal(err)
	}
	return p
}

// execute builds the image of a plan.
func execute(ctx context.Context, p *plan.Plan, o Options) (*Result, error) {
	var r *Result
	err := BuildEach(ctx, []Job{{Plan: p, Options: o}}, func(_ int, one *Result) error { r = one; return nil })
	return r, err
}

// TestExecute builds from a plan in a file with an empty cache. The image must equal a direct
// build, and the plan must not change.
func TestExecute(t *testing.T) {
	conflist := `{"cniVersion":"1.0.0","name":"site","plugins":[{"type":"bridge"}]}`
	for name, edit := range map[string]func(string) string{
		"tar":    nil,
		"debian": toDebian,
		"oci": func(s string) string {
			return strings.Replace(s, "  tar:\n    file: base.tar\n", "  oci:\n    layout: base\n", 1)
		},
		"import, and a network of the user's": func(s string) string {
			return strings.Replace(s, "cni: {config: bridge, podCIDR: 10.244.0.0/16}", "cni: {config: site.conflist}\nimageStore: {mode: import}", 1)
		},
		"a template in a file": func(s string) string {
			return strings.Replace(s, "    source: notes.txt\n", "    source: notes.txt\n    template: true\n", 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProject(t, buildtest.Base(), edit)
			standIn(t, p)
			if name == "oci" {
				writeOCIBase(t, filepath.Join(p.dir, "base"))
			}
			for file, text := range map[string]string{"site.conflist": conflist, "notes.txt": `{{.Name}} {{"{{"}}.Arch}}`, "overlay/opt/cni/bin/bridge": buildtest.Program("amd64")} {
				if err := os.MkdirAll(filepath.Dir(filepath.Join(p.dir, file)), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(p.dir, file), []byte(text), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			pl, err := Resolve(t.Context(), p.image(t), p.options(""))
			if err != nil {
				t.Fatal(err)
			}
			pl = inFile(t, pl)
			before, err := json.Marshal(pl)
			if err != nil {
				t.Fatal(err)
			}
			o := p.options(filepath.Join(t.TempDir(), "plan.raw"))
			if o.Cache, err = fetch.Open(t.TempDir()); err != nil {
				t.Fatal(err)
			}
			defer o.Cache.Close()
			got, err := execute(t.Context(), pl, o)
			if err != nil {
				t.Fatal(err)
			}
			direct := filepath.Join(t.TempDir(), "direct.raw")
			want, err := p.build(t, direct)
			if err != nil {
				t.Fatal(err)
			}
			if got.Report.Golden != want.Report.Golden || disktest.Sum(t, o.Output) != disktest.Sum(t, direct) {
				t.Errorf("golden digest %s, of a direct build %s", got.Report.Golden, want.Report.Golden)
			}
			if after, err := json.Marshal(pl); err != nil || string(after) != string(before) {
				t.Errorf("the plan has changed: %v\n%s\n%s", err, before, after)
			}
			// The plan that the first build returned has all digests and can be executed again.
			o.Force = true
			if again, err := execute(t.Context(), inFile(t, got.Plan), o); err != nil || again.Report.Golden != want.Report.Golden {
				t.Errorf("the complete plan: %v", err)
			}
		})
	}
}

// TestExecuteRefuses checks that a plan is rejected if it cannot be executed exactly.
func TestExecuteRefuses(t *testing.T) {
	for name, tt := range map[string]struct {
		spoil func(t *testing.T, p *project, pl *plan.Plan)
		want  string
	}{
		"a program has changed": {func(t *testing.T, p *project, _ *plan.Plan) {
			if err := os.WriteFile(filepath.Join(p.dir, "programs/kubelet"), []byte("other"), 0o755); err != nil {
				t.Fatal(err)
			}
		}, "kubernetes.source: input kubelet: reading "},
		"an overlay has changed": {func(t *testing.T, p *project, _ *plan.Plan) {
			if err := os.WriteFile(filepath.Join(p.dir, "overlay/more"), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}, "overlays[0].dir: input overlay 0: made "},
		"a container image is gone": {func(t *testing.T, p *project, _ *plan.Plan) {
			if err := os.RemoveAll(filepath.Join(p.dir, "images")); err != nil {
				t.Fatal(err)
			}
		}, "images[0]: OCI layout "},
		"another edgebake": {func(_ *testing.T, _ *project, pl *plan.Plan) { pl.Rendered = strings.Repeat("0", 64) }, "this edgebake (test) would render other files"},
		"another document": {func(_ *testing.T, _ *project, pl *plan.Plan) { pl.Config = json.RawMessage(`{"colour":"red"}`) }, "reading the plan: config: "},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProject(t, buildtest.Base(), nil)
			pl, err := Resolve(t.Context(), p.image(t), p.options(""))
			if err != nil {
				t.Fatal(err)
			}
			tt.spoil(t, p, pl)
			o := p.options(filepath.Join(t.TempDir(), "x.raw"))
			if o.Cache, err = fetch.Open(t.TempDir()); err != nil {
				t.Fatal(err)
			}
			defer o.Cache.Close()
			if _, err := execute(t.Context(), pl, o); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
			if _, err := os.Stat(o.Output); err == nil {
				t.Error("there is an image")
			}
		})
	}
}

// writeOCIBase writes the base as a container image with one layer.
func writeOCIBase(t *testing.T, dir string) {
	t.Helper()
	_, err := imagetest.WriteLayout(dir, imagetest.Image{Ref: "example.test/base:1", Layers: []imagetest.Layer{{Tar: func(w *imagetest.Writer) error {
		for _, e := range buildtest.Base() {
			if err := w.Put(e.Header, e.Body); err != nil {
				return err
			}
		}
		return nil
	}}}})
	if err != nil {
		t.Fatal(err)
	}
}
