package update

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/edgebake/edgebake/builder/carry"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/firstboot/host"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk/artifact"
	"github.com/edgebake/edgebake/ondisk/order"
)

// fakeRegistry is go-containerregistry's registry with an image, and a handler in front of it.
type fakeRegistry struct {
	*httptest.Server
	t     *testing.T
	inner http.Handler
	mu    sync.Mutex
	seen  []string
	front func(w http.ResponseWriter, r *http.Request, inner http.Handler)
}

func newRegistry(t *testing.T) *fakeRegistry {
	t.Helper()
	s := &fakeRegistry{t: t, inner: registry.New(registry.Logger(log.New(io.Discard, "", 0)))}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		front := s.front
		s.seen = append(s.seen, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+r.Header.Get("Range")))
		s.mu.Unlock()
		if front == nil {
			s.inner.ServeHTTP(w, r)
			return
		}
		front(w, r, s.inner)
	}))
	t.Cleanup(s.Close)
	return s
}

const (
	repository = "edge/my-edge"
	registryOf = "oci://%s/" + repository + ":1"
)

func (s *fakeRegistry) host() string  { return s.Listener.Addr().String() }
func (s *fakeRegistry) image() string { return fmt.Sprintf(registryOf, s.host()) }

// inParts pushes an image in this many parts, and returns the digest of its manifest.
func (s *fakeRegistry) inParts(name string, parts int) string {
	s.t.Helper()
	makeImages(s.t)
	file, err := os.ReadFile(imagePath(name))
	if err != nil {
		s.t.Fatal(err)
	}
	send := func(method, path, contentType string, b []byte) {
		req, err := http.NewRequestWithContext(s.t.Context(), method, s.URL+"/v2/"+repository+path, bytes.NewReader(b))
		if err != nil {
			s.t.Fatal(err)
		}
		req.Header.Set("Content-Type", contentType)
		resp, err := http.DefaultClient.Do(req)
		if err != nil || resp.StatusCode != http.StatusCreated {
			s.t.Fatal(resp, err)
		}
		resp.Body.Close()
	}
	blob := func(mediaType string, b []byte) artifact.Descriptor {
		sum := sha256.Sum256(b)
		d := artifact.Descriptor{MediaType: mediaType, Digest: imageref.DigestOf(sum[:]), Size: int64(len(b))}
		send(http.MethodPost, "/blobs/uploads/?digest="+string(d.Digest), "application/octet-stream", b)
		return d
	}
	m := artifact.Manifest{SchemaVersion: 2, MediaType: artifact.ManifestType, ArtifactType: artifact.Type, Config: blob(artifact.ConfigType, []byte("{}"))}
	size := len(file)/parts + 1
	for len(file) > 0 {
		n := min(size, len(file))
		m.Layers = append(m.Layers, blob(artifact.PartType, file[:n]))
		file = file[n:]
	}
	b, err := json.Marshal(m)
	if err != nil {
		s.t.Fatal(err)
	}
	send(http.MethodPut, "/manifests/1", artifact.ManifestType, b)
	sum := sha256.Sum256(b)
	return string(imageref.DigestOf(sum[:]))
}

// from updates the box from a registry, over real HTTP connections.
func (b *box) from(image string, o Options) error {
	e := b.env()
	e.Get = host.New(io.Discard).Get
	o.Image = image
	return Update(b.t.Context(), e, o, func(s run.Step) { b.steps = append(b.steps, s.Name+" "+s.Status+" "+s.Detail) })
}

// TestRegistry checks that an image that edgebake has pushed, in one part or several, can be
// installed.
func TestRegistry(t *testing.T) {
	b, s := newBox(t), newRegistry(t)
	ref, err := order.ParseRegistry(s.image())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := carry.Push(t.Context(), imagePath("new.raw.zst"), ref, carry.Options{Insecure: true}); err != nil {
		t.Fatal(err)
	}
	if err := b.from(s.image(), Options{MaxBytes: 8 << 20}); err != nil {
		t.Fatal(err)
	}
	b.updated()
	b = newBox(t)
	digest := s.inParts("new.raw.zst", 7)
	s.seen = nil
	if err := b.from("oci://"+s.host()+"/"+repository+"@"+digest, Options{MaxBytes: 8 << 20}); err != nil {
		t.Fatal(err)
	}
	b.updated()
	for _, r := range s.seen {
		if !strings.Contains(r, "/manifests/") && !strings.Contains(r, "bytes=") {
			t.Errorf("%s: not a range", r)
		}
	}
}

// locked makes the registry require a token from a login server, which must be renewed after
// some requests. Blobs are on another server, which must not see the token.
func (s *fakeRegistry) locked(scheme string) (tokens *int) {
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			s.t.Error("the token was sent to the blob server")
		}
		r.URL.RawQuery = ""
		s.inner.ServeHTTP(w, r)
	}))
	s.t.Cleanup(store.Close)
	tokens = new(int)
	left := 0
	s.front = func(w http.ResponseWriter, r *http.Request, inner http.Handler) {
		user, password, _ := r.BasicAuth()
		allowed := user == "robot" && password == "hunter2"
		token := fmt.Sprintf("Bearer t%d", *tokens)
		switch {
		case r.URL.Path == "/token":
			if !allowed {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			if q := r.URL.Query(); q.Get("service") != "reg" || q.Get("scope") != "repository:"+repository+":pull" {
				s.t.Errorf("asked for a token by %s", r.URL)
			}
			*tokens++
			left = 5
			fmt.Fprintf(w, `{"token":"t%d"}`, *tokens)
		case scheme == "basic" && !allowed, scheme == "bearer" && (r.Header.Get("Authorization") != token || left == 0):
			w.Header().Add("WWW-Authenticate", map[string]string{
				"basic": `Basic realm="reg"`, "bearer": `Bearer realm="` + s.URL + `/token",service="reg",scope="repository:` + repository + `:pull"`,
			}[scheme])
			w.WriteHeader(http.StatusUnauthorized)
		case strings.Contains(r.URL.Path, "/blobs/"):
			left--
			http.Redirect(w, r, store.URL+r.URL.Path+"?signature=x", http.StatusTemporaryRedirect)
		default:
			inner.ServeHTTP(w, r)
		}
	}
	return tokens
}

func TestRegistryLogin(t *testing.T) {
	for _, scheme := range []string{"basic", "bearer"} {
		s := newRegistry(t)
		s.inParts("new.raw.zst", 3)
		b := newBox(t)
		tokens := s.locked(scheme)
		err := b.from(s.image(), Options{})
		if err == nil || !strings.Contains(err.Error(), "401") {
			t.Errorf("%s, no login: %v", scheme, err)
		}
		b.put(LoginsFile, `{"auths":{"`+s.host()+`":{"username":"robot","password":"wrong"}}}`)
		if err := b.from(s.image(), Options{}); err == nil || !strings.Contains(err.Error(), "401") {
			t.Errorf("%s, wrong password: %v", scheme, err)
		}
		b.put(LoginsFile, `{"auths":{"`+s.host()+`":{"auth":"cm9ib3Q6aHVudGVyMg=="}}}`)
		if err := b.from(s.image(), Options{MaxBytes: 8 << 20}); err != nil {
			t.Errorf("%s: %v", scheme, err)
			continue
		}
		b.updated()
		if scheme == "bearer" && *tokens < 2 {
			t.Errorf("%d tokens: none was renewed", *tokens)
		}
		b.put(LoginsFile, `{"auths":{"`+s.host()+`":{"auth":"cm9ib3Q6\naHVudGVyMg=="}}}`)
		if err := b.from(s.image(), Options{}); err == nil || !strings.Contains(err.Error(), "on one line") || strings.Contains(err.Error(), "cm9ib3Q6") {
			t.Errorf("%s, a login on two lines: %v", scheme, err)
		}
		b.put(LoginsFile, `{"auths":{hunter2`)
		if err := b.from(s.image(), Options{}); err == nil || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), LoginsFile) {
			t.Errorf("%s, a damaged file: %v", scheme, err)
		}
	}
}

// TestRegistryRejected checks that problems of a registry or its image are reported with a reason,
// and nothing is changed.
func TestRegistryRejected(t *testing.T) {
	for name, c := range map[string]struct {
		image, want string
		front       func(w http.ResponseWriter, r *http.Request, inner http.Handler)
	}{
		"no ranges": {want: "does not support ranges", front: func(w http.ResponseWriter, r *http.Request, inner http.Handler) {
			r.Header.Del("Range")
			inner.ServeHTTP(w, r)
		}},
		"no such tag":  {image: strings.Replace(registryOf, ":1", ":2", 1), want: "404"},
		"no tag":       {image: strings.Replace(registryOf, ":1", "", 1), want: "has no tag"},
		"another hash": {image: strings.Replace(registryOf, ":1", "@sha256:"+strings.Repeat("ab", 32), 1), want: "404"},
		"a changed manifest": {image: strings.Replace(registryOf, ":1", "@sha256:"+strings.Repeat("ab", 32), 1), want: "does not match the digest", front: func(w http.ResponseWriter, r *http.Request, inner http.Handler) {
			r.URL.Path = strings.Replace(r.URL.Path, "sha256:"+strings.Repeat("ab", 32), "1", 1)
			inner.ServeHTTP(w, r)
		}},
		"a container image": {want: "a container image", front: func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			io.WriteString(w, `{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json"}}`)
		}},
		"endless": {want: "more than 262144 bytes", front: func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			w.Write(bytes.Repeat([]byte(" "), 1<<20))
		}},
		"a login server in the clear": {image: "oci://secure.example.com/a/b:1", want: "no usable realm (URL of its login server): it must be https", front: func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://login.example.com/token"`)
			w.WriteHeader(http.StatusUnauthorized)
		}},
		"a login server without a token": {want: "sends no token", front: func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			if r.URL.Path == "/token" {
				io.WriteString(w, "{}")
				return
			}
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+r.Host+`/token"`)
			w.WriteHeader(http.StatusUnauthorized)
		}},
		"a token with a line break": {want: "a token that has a blank, a line break", front: func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			if r.URL.Path == "/token" {
				io.WriteString(w, `{"token":"a\nb"}`)
				return
			}
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+r.Host+`/token"`)
			w.WriteHeader(http.StatusUnauthorized)
		}},
		"a login that is none": {want: "401", front: func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
			w.Header().Set("WWW-Authenticate", "Negotiate")
			w.WriteHeader(http.StatusUnauthorized)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newRegistry(t)
			s.inParts("new.raw.zst", 2)
			s.front = c.front
			b := newBox(t)
			image := s.image()
			if c.image != "" {
				image = strings.Replace(c.image, "%s", s.host(), 1)
			}
			e := b.env()
			get := host.New(io.Discard).Get
			e.Get = func(ctx context.Context, url string, header http.Header, proxy []string) (*http.Response, error) {
				return get(ctx, strings.Replace(url, "https://secure.example.com", s.URL, 1), header, proxy)
			}
			began := b.now
			err := Update(t.Context(), e, Options{Image: image}, func(run.Step) {})
			if err == nil || !strings.Contains(err.Error(), c.want) || b.now != began {
				t.Errorf("%v after %s", err, b.now.Sub(began))
			}
			if _, err := os.Stat(b.root + "/" + entryB); err == nil || e.Exists(planFile) {
				t.Error("the machine was changed")
			}
		})
	}
}

// TestOrderFromRegistry checks that an order may name an image in a registry.
func TestOrderFromRegistry(t *testing.T) {
	b, s := newOrdered(t), newRegistry(t)
	s.inParts("new.raw.zst", 3)
	b.annotations[order.AnnotationOrder] = s.image() + "@sha256:" + goldenOf(t, "new.raw.zst") + " max-bytes=8M"
	e := b.env()
	e.GetRemote = host.New(io.Discard).Get // the registry is on this computer
	if err := CarryOutOrder(t.Context(), e, func(run.Step) {}); err != nil {
		t.Fatal(err)
	}
	b.says(order.StateRestarting, "")
	b.updated()
}

// TestSlowManifest checks that a registry that sends a byte a minute does not hold an update, and with it all
// other changes of the machine, for months.
func TestSlowManifest(t *testing.T) {
	b := newBox(t)
	e := b.env()
	e.Get = func(context.Context, string, http.Header, []string) (*http.Response, error) {
		body := &slowBody{l: &slowLine{b: b, rate: 1.0 / 59, piece: 1}, r: bytes.NewReader(bytes.Repeat([]byte(" "), 200<<10)), began: b.now}
		return &http.Response{StatusCode: http.StatusOK, Body: body}, nil
	}
	began := b.now
	err := Update(t.Context(), e, Options{Image: "oci://registry.example.com/edge/my-edge:1"}, func(run.Step) {})
	if took := b.now.Sub(began); err == nil || !strings.Contains(err.Error(), "has not sent it in 5m0s") || took > time.Hour {
		t.Errorf("after %s: %v", took, err)
	}
}

func TestRegistryURL(t *testing.T) {
	for image, want := range map[string]string{
		"oci://registry.example.com/edge/my-edge:1": "https://registry.example.com/v2/edge/my-edge",
		"oci://[::1]:5000/e:1":                      "http://[::1]:5000/v2/e",
		"oci://localhost:5000/e:1":                  "http://localhost:5000/v2/e",
		"oci://10.0.0.1:5000/e:1":                   "https://10.0.0.1:5000/v2/e",
		"oci://docker.io/shop/e:1":                  "https://registry-1.docker.io/v2/shop/e",
	} {
		ref, err := order.ParseRegistry(image)
		if err != nil {
			t.Fatal(err)
		}
		if got := registryURL(ref); got != want {
			t.Errorf("%s: %s, want %s", image, got, want)
		}
	}
}
