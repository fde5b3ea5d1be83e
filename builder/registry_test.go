package builder

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/imagetest"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// TestOCIBaseFromRegistry uses a base from a registry that requires a login. The registry runs in
// this process.
func TestOCIBaseFromRegistry(t *testing.T) {
	var requests atomic.Int64
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		if u, p, _ := r.BasicAuth(); u+":"+p != "robot:hunter2" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	host := strings.TrimPrefix(srv.URL, "http://")
	push := func(entries []buildtest.Entry) (digest string) {
		t.Helper()
		dir := t.TempDir()
		if _, err := imagetest.WriteLayout(dir, imagetest.Image{Ref: "example.test/base:1", Layers: []imagetest.Layer{{Tar: func(w *imagetest.Writer) error {
			for _, e := range entries {
				if err := w.Put(e.Header, e.Body); err != nil {
					return err
				}
			}
			return nil
		}}}}); err != nil {
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
		img, err := index.Image(m.Manifests[0].Digest)
		if err != nil {
			t.Fatal(err)
		}
		ref, err := name.ParseReference(host+"/os/base:1", name.Insecure)
		if err != nil {
			t.Fatal(err)
		}
		if err := remote.Write(ref, img, remote.WithAuth(&authn.Basic{Username: "robot", Password: "hunter2"}), remote.WithContext(t.Context())); err != nil {
			t.Fatal(err)
		}
		return m.Manifests[0].Digest.String()
	}
	digest := push(buildtest.Base())

	project := func(t *testing.T, password, pin string) *project {
		p := newProject(t, buildtest.Base(), func(s string) string {
			s = strings.Replace(s, "  tar:\n    file: base.tar\n", fmt.Sprintf("  oci: {ref: %q, digest: %q}\n", host+"/os/base:1", pin), 1)
			s = strings.ReplaceAll(s, `, digest: ""`, "")
			return s + fmt.Sprintf("registries:\n  - host: %q\n    insecure: true\n    authFile: auth.json\n", host)
		})
		auth := fmt.Sprintf(`{"auths":{%q:{"username":"robot","password":%q}}}`, host, password)
		if err := os.WriteFile(filepath.Join(p.dir, "auth.json"), []byte(auth), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}

	out := t.TempDir()
	for _, tt := range []struct {
		name, password, pin string
		want                []string
	}{
		{"no entry", "hunter3", "", []string{"base.oci: ", host + "/os/base:1", "correct the login of " + host, "auth.json"}},
		{"wrong digest", "hunter2", "sha256:" + strings.Repeat("ab", 32), []string{"base.oci: ", host + "/os/base:1", strings.Repeat("ab", 32)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := project(t, tt.password, tt.pin)
			_, err := p.build(t, filepath.Join(out, "x.raw"))
			for _, w := range tt.want {
				if err == nil || !strings.Contains(err.Error(), w) {
					t.Errorf("error lacks %q: %v", w, err)
				}
			}
			if err != nil && strings.Contains(err.Error(), "hunter") {
				t.Errorf("the password is in the message: %v", err)
			}
			if left, _ := os.ReadDir(out); len(left) > 0 {
				t.Errorf("a failed build left %v", left)
			}
		})
	}

	p := project(t, "hunter2", "")
	first, err := p.build(t, filepath.Join(out, "x.raw"))
	if err != nil {
		t.Fatal(err)
	}
	if in := first.Plan.Inputs[inputBase]; in.Digest != digest {
		t.Errorf("the plan has the base %s, pushed was %s", in.Digest, digest)
	}
	pinned := project(t, "hunter2", digest)
	if _, err := pinned.build(t, filepath.Join(out, "pinned.raw")); err != nil {
		t.Errorf("with the digest in the Image: %v", err)
	}

	// The tag moves. A locked build still uses the locked digest: from the registry if the cache is
	// empty, otherwise from the cache.
	push(append(buildtest.Base(), buildtest.Base()[0]))
	raw, err := first.Plan.Lock().Encode()
	if err != nil {
		t.Fatal(err)
	}
	o := p.options(filepath.Join(out, "x.raw"))
	o.Locked, o.Force = true, true
	if o.Lock, err = plan.DecodeLock(raw); err != nil {
		t.Fatal(err)
	}
	warm := o.Cache
	if o.Cache, err = fetch.Open(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	defer o.Cache.Close()
	for _, c := range []*fetch.Cache{o.Cache, warm} {
		before := requests.Load()
		o.Cache = c
		again, err := Build(t.Context(), p.image(t), o)
		if err != nil {
			t.Fatal(err)
		}
		if again.Report.Golden != first.Report.Golden {
			t.Error("the locked build is another image")
		}
		if c == warm && requests.Load() != before {
			t.Errorf("%d requests for blobs that are in the cache", requests.Load()-before)
		}
		if c != warm && requests.Load() == before {
			t.Error("the registry got no request, so the test checks nothing")
		}
	}
}
