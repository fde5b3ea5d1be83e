package carry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"aead.dev/minisign"

	"github.com/edgebake/edgebake/builder/device"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/transfer"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk/artifact"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/edgebake/edgebake/test/disktest"
	"github.com/edgebake/edgebake/test/mediatest"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// server is go-containerregistry's registry, with faults that a test adds.
type server struct {
	*httptest.Server
	t *testing.T

	mu    sync.Mutex
	seen  []string // METHOD PATH [RANGE] of each request
	fault func(w http.ResponseWriter, r *http.Request, inner http.Handler) bool
	blobs int64 // bytes of blobs that were sent
	// round counts the calls of faulty. Responses from an earlier round are not counted in blobs,
	// since their clients have ended.
	round int
}

func serve(t *testing.T, start func(http.Handler) *httptest.Server) *server {
	t.Helper()
	s := &server{t: t}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	s.Server = start(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.seen = append(s.seen, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+r.Header.Get("Range")))
		fault, round := s.fault, s.round
		s.mu.Unlock()
		if fault != nil && fault(w, r, inner) {
			return
		}
		inner.ServeHTTP(counting{w, s, round, r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/sha256:")}, r)
	}))
	t.Cleanup(s.Close)
	return s
}

type counting struct {
	http.ResponseWriter
	s     *server
	round int
	on    bool
}

func (c counting) Write(b []byte) (int, error) {
	n, err := c.ResponseWriter.Write(b)
	if c.on {
		c.s.mu.Lock()
		if c.round == c.s.round {
			c.s.blobs += int64(n)
		}
		c.s.mu.Unlock()
	}
	return n, err
}

func (s *server) faulty(f func(w http.ResponseWriter, r *http.Request, inner http.Handler) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault, s.seen, s.blobs = f, nil, 0
	s.round++
}

func (s *server) requests(prefix string) (out []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.seen {
		if strings.HasPrefix(r, prefix) {
			out = append(out, r)
		}
	}
	return out
}

func (s *server) sent() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.blobs
}

func (s *server) ref(tag string) imageref.Ref {
	s.t.Helper()
	ref, err := imageref.Parse(s.Listener.Addr().String() + "/edge/image" + tag)
	if err != nil {
		s.t.Fatal(err)
	}
	return ref
}

// patience is the time after which a test fails because something hangs. It is long enough for a
// very busy machine.
const patience = 2 * time.Minute

// quick returns options with short waits, and with small parts, so that the test's image has
// several.
func quick(t *testing.T) Options {
	return Options{Insecure: true, RetryWait: time.Millisecond, Stall: patience, partSize: 2 << 20,
		Warn: func(text string) { t.Log("WARNING: " + text) }}
}

// image writes an image with 8 MiB of random data. It builds each kind of image once and copies it.
func image(t *testing.T, name string, key *minisign.PrivateKey) string {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, name)
	made := mediatest.Image{ID: "carried", Data: 16 << 20, FreeRoot: 8 << 20, FreeData: 8 << 20}
	if key != nil {
		made.Sign = func(golden string, info []byte) (string, error) {
			return slot.SignImage(golden, info, *key, mediatest.Date)
		}
		mediatest.Make(t, path, made)
		return path
	}
	built.Lock()
	defer built.Unlock()
	if built.dir == "" {
		var err error
		if built.dir, err = os.MkdirTemp("", "edgebake-carry-"); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"i.raw", "i.raw.zst"} {
			mediatest.Make(t, filepath.Join(built.dir, name), made)
		}
	}
	if err := exec.Command("cp", "--sparse=always", filepath.Join(built.dir, name), path).Run(); err != nil {
		t.Fatal(err)
	}
	return path
}

// built is the directory of the images that were built.
var built struct {
	sync.Mutex
	dir string
}

func TestMain(m *testing.M) {
	code := m.Run()
	if built.dir != "" {
		os.RemoveAll(built.dir)
	}
	os.Exit(code)
}

func pushed(t *testing.T, s *server, path, tag string) *Pushed {
	t.Helper()
	p, err := Push(t.Context(), path, s.ref(tag), quick(t))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func wantError(t *testing.T, err error, words ...string) {
	t.Helper()
	for _, w := range words {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("error lacks %q: %v", w, err)
		}
	}
}

// empty checks that a directory contains no files, not even hidden ones.
func empty(t *testing.T, dir string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil || len(list) > 0 {
		t.Errorf("left behind: %v %v", list, err)
	}
}

// TestPushAndPull pushes and pulls an image in each format.
func TestPushAndPull(t *testing.T) {
	s := serve(t, httptest.NewServer)
	zst, raw := image(t, "i.raw.zst", nil), image(t, "i.raw", nil)
	first := pushed(t, s, zst, ":zst")
	if first.Parts < 3 || first.Had != 0 || first.Sent < first.Stored/2 {
		t.Errorf("%+v", first)
	}
	second := pushed(t, s, raw, ":raw")
	if second.Digest != first.Digest || second.Had == 0 || second.Sent != 0 || second.Golden != first.Golden {
		t.Errorf("the raw image and the compressed image give different artifacts: %+v, %+v", second, first)
	}
	for _, out := range []string{"o.raw.zst", "o.raw"} {
		for _, tag := range []string{":zst", "@" + first.Digest} {
			path := filepath.Join(t.TempDir(), out)
			p, err := Pull(t.Context(), s.ref(tag), path, PullOptions{Options: quick(t)})
			if err != nil {
				t.Fatal(err)
			}
			if p.Digest != first.Digest || p.Golden != first.Golden || p.Stored != first.Stored || p.Had != 0 {
				t.Errorf("%+v", p)
			}
			want := zst
			if out == "o.raw" {
				want = raw
			}
			if disktest.Sum(t, path) != disktest.Sum(t, want) {
				t.Errorf("%s, pulled from %s, differs", out, tag)
			}
			if st, err := os.Stat(path); err != nil || out == "o.raw" && st.Sys().(*syscall.Stat_t).Blocks*512 > st.Size()*3/4 {
				t.Errorf("the pulled file has no holes: %v %v", st, err)
			}
			if err := media.Verify(t.Context(), path, nil); err != nil {
				t.Error(err)
			}
			if list, err := os.ReadDir(filepath.Dir(path)); err != nil || len(list) != 1 {
				t.Errorf("left behind: %v %v", list, err)
			}
			_, err = Pull(t.Context(), s.ref(tag), path, PullOptions{Options: quick(t)})
			wantError(t, err, "exists", "--force")
			if _, err = Pull(t.Context(), s.ref(tag), path, PullOptions{Options: quick(t), Force: true}); err != nil {
				t.Error(err)
			}
		}
	}
}

// abort ends a connection.
func abort() { panic(http.ErrAbortHandler) }

// cutAt interrupts blobs after some bytes, for a number of requests.
func cutAt(bytes int, times int) func(http.ResponseWriter, *http.Request, http.Handler) bool {
	var mu sync.Mutex
	return func(w http.ResponseWriter, r *http.Request, inner http.Handler) bool {
		mu.Lock()
		defer mu.Unlock()
		if times == 0 || r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/sha256:") {
			return false
		}
		rec := httptest.NewRecorder()
		inner.ServeHTTP(rec, r)
		if rec.Body.Len() < bytes {
			return false
		}
		times--
		for k, v := range rec.Header() {
			w.Header()[k] = v
		}
		w.WriteHeader(rec.Code)
		w.Write(rec.Body.Bytes()[:bytes])
		w.(http.Flusher).Flush()
		abort()
		return true
	}
}

// TestPullGoesOnInTheSameRun checks that only one part is fetched again after a failed transfer.
func TestPullGoesOnInTheSameRun(t *testing.T) {
	s := serve(t, httptest.NewServer)
	zst := image(t, "i.raw.zst", nil)
	before := pushed(t, s, zst, ":1")
	s.faulty(cutAt(1<<20, 2))
	path := filepath.Join(t.TempDir(), "o.raw.zst")
	o := quick(t)
	var warned []string
	o.Warn = func(text string) { warned = append(warned, text) }
	if _, err := Pull(t.Context(), s.ref(":1"), path, PullOptions{Options: o}); err != nil {
		t.Fatal(err)
	}
	if disktest.Sum(t, path) != disktest.Sum(t, zst) {
		t.Error("the pulled file differs")
	}
	// sent includes the config, but not interrupted responses.
	if got := s.sent(); got > before.Stored+64<<10 {
		t.Errorf("%d bytes were sent again", got-before.Stored)
	}
	if len(warned) != 2 || !strings.HasSuffix(warned[0], "; fetching that part again") {
		t.Errorf("warnings: %q", warned)
	}
}

// TestLastByteNeverComes checks that pull ends with an error if the last byte of every response is
// missing.
func TestLastByteNeverComes(t *testing.T) {
	s := serve(t, httptest.NewServer)
	pushed(t, s, image(t, "i.raw.zst", nil), ":1")
	s.faulty(func(w http.ResponseWriter, r *http.Request, inner http.Handler) bool {
		if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/sha256:") {
			return false
		}
		rec := httptest.NewRecorder()
		if inner.ServeHTTP(rec, r); rec.Body.Len() < 1<<20 { // only the config is so small
			w.Write(rec.Body.Bytes())
			return true
		}
		w.Header().Set("Content-Length", strconv.Itoa(rec.Body.Len()))
		w.Write(rec.Body.Bytes()[:rec.Body.Len()-1])
		w.(http.Flusher).Flush()
		abort()
		return true
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	o := quick(t)
	o.Warn = nil
	_, err := Pull(ctx, s.ref(":1"), filepath.Join(t.TempDir(), "o.raw.zst"), PullOptions{Options: o})
	wantError(t, err, "part 2 of 10", s.Listener.Addr().String(), "run the same command again to continue")
	if n := len(s.requests("GET")); n > 20 {
		t.Errorf("%d requests", n)
	}
}

// TestPullGoesOnInTheNextRun checks that a run does not fetch again what an earlier run has stored.
func TestPullGoesOnInTheNextRun(t *testing.T) {
	s := serve(t, httptest.NewServer)
	zst, raw := image(t, "i.raw.zst", nil), image(t, "i.raw", nil)
	before := pushed(t, s, zst, ":1")
	for _, out := range []string{"o.raw.zst", "o.raw"} {
		for _, damage := range []string{"", "zeros", "another image", "longer"} {
			if out == "o.raw" && damage != "" && damage != "zeros" {
				continue // both formats have the same partial file
			}
			t.Run(out+" "+damage, func(t *testing.T) {
				path := filepath.Join(t.TempDir(), out)
				partial := filepath.Join(filepath.Dir(path), "."+out+".partial")
				ctx, cancel := context.WithCancel(t.Context())
				o := quick(t)
				o.Progress = func(_ string, done, _ int64) {
					if done > before.Stored*2/3 {
						cancel()
					}
				}
				_, err := Pull(ctx, s.ref(":1"), path, PullOptions{Options: o})
				var left *InterruptedError
				if !errors.As(err, &left) || left.Partial != partial || left.Done < before.Stored/2 || left.Total != before.Stored {
					t.Fatalf("%v", err)
				}
				wantError(t, err, "run the same command again to continue")
				if _, err := os.Stat(path); err == nil {
					t.Fatal("the output exists after a failure")
				}
				f, err := os.OpenFile(partial, os.O_RDWR, 0)
				if err != nil {
					t.Fatal(err)
				}
				switch damage {
				case "zeros": // a power cut may leave zeros
					_, err = f.WriteAt(make([]byte, 1<<20), 9<<20)
				case "another image":
					_, err = f.WriteAt(bytes.Repeat([]byte{7}, int(left.Done)), 0)
				case "longer":
					err = f.Truncate(before.Stored + 5)
				}
				if err := errors.Join(err, f.Close()); err != nil {
					t.Fatal(err)
				}
				s.faulty(nil)
				p, err := Pull(t.Context(), s.ref(":1"), path, PullOptions{Options: quick(t)})
				if err != nil {
					t.Fatal(err)
				}
				if damage == "" && (p.Had != left.Done || s.sent() > before.Stored-p.Had+1<<20) {
					t.Errorf("%d of %d bytes were reused, %d were sent", p.Had, p.Stored, s.sent())
				}
				want := zst
				if out == "o.raw" {
					want = raw
				}
				if disktest.Sum(t, path) != disktest.Sum(t, want) {
					t.Error("the pulled file differs")
				}
				if list, err := os.ReadDir(filepath.Dir(path)); err != nil || len(list) != 1 {
					t.Errorf("left behind: %v %v", list, err)
				}
			})
		}
	}
}

// TestTwoPulls checks that a second pull to the same file fails and leaves the first pull's data
// intact.
func TestTwoPulls(t *testing.T) {
	s := serve(t, httptest.NewServer)
	pushed(t, s, image(t, "i.raw.zst", nil), ":1")
	path := filepath.Join(t.TempDir(), "o.raw.zst")
	o := quick(t)
	tried := false
	o.Progress = func(string, int64, int64) {
		if !tried {
			tried = true
			_, err := Pull(t.Context(), s.ref(":1"), path, PullOptions{Options: quick(t)})
			wantError(t, err, "another program is writing it")
		}
	}
	if _, err := Pull(t.Context(), s.ref(":1"), path, PullOptions{Options: o}); err != nil || !tried {
		t.Error(err)
	}
}

// artifact pushes a manifest with this config and these parts under a tag, as a hostile client
// could.
func (s *server) artifact(tag string, config any, parts ...[]byte) {
	s.t.Helper()
	put := func(method, path, contentType string, b []byte) {
		req, err := http.NewRequestWithContext(s.t.Context(), method, s.URL+path, bytes.NewReader(b))
		if err != nil {
			s.t.Fatal(err)
		}
		req.Header.Set("Content-Type", contentType)
		resp, err := s.Client().Do(req)
		if err != nil {
			s.t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusCreated {
			s.t.Fatalf("%s %s: %s", method, path, resp.Status)
		}
	}
	b, err := json.Marshal(config)
	if err != nil {
		s.t.Fatal(err)
	}
	m := artifact.Manifest{SchemaVersion: 2, MediaType: artifact.ManifestType, ArtifactType: artifact.Type, Config: artifact.Descriptor{MediaType: artifact.ConfigType, Digest: digestOf(b), Size: int64(len(b))}}
	for _, p := range append([][]byte{b}, parts...) {
		put(http.MethodPost, "/v2/edge/image/blobs/uploads/?digest="+string(digestOf(p)), "application/octet-stream", p)
	}
	for _, p := range parts {
		m.Layers = append(m.Layers, artifact.Descriptor{MediaType: artifact.PartType, Digest: digestOf(p), Size: int64(len(p))})
	}
	if b, err = json.Marshal(m); err != nil {
		s.t.Fatal(err)
	}
	put(http.MethodPut, "/v2/edge/image/manifests/"+tag, artifact.ManifestType, b)
}

// configOf returns the config and the bytes of an image.
func configOf(t *testing.T, path string) (config, []byte) {
	t.Helper()
	g, err := media.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	desc, err := g.Descriptor()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	ends := g.Frames()
	return config{Version: 1, Descriptor: desc, Stored: int64(len(b)), Table: b[ends[len(ends)-1]:]}, b
}

// TestPullRejects checks that an image that does not match its config is rejected and leaves no
// file.
func TestPullRejects(t *testing.T) {
	s := serve(t, httptest.NewServer)
	public, private, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	other, _, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	signed := image(t, "i.raw.zst", &private)
	pushed(t, s, signed, ":signed")
	pushed(t, s, image(t, "i.raw.zst", nil), ":unsigned")
	good, content := configOf(t, signed)

	stamped := filepath.Join(t.TempDir(), "s.raw.zst")
	if _, err := media.Stamp(t.Context(), signed, site(t),
		media.StampOptions{Output: stamped, Now: mediatest.Date}); err != nil {
		t.Fatal(err)
	}
	tokens, err := os.ReadFile(stamped)
	if err != nil {
		t.Fatal(err)
	}
	withSite := good
	withSite.Table = tokens[good.Stored-int64(len(good.Table)):]
	s.artifact("stamped", withSite, tokens)

	another := filepath.Join(t.TempDir(), "another.raw.zst")
	mediatest.Make(t, another, mediatest.Image{ID: "another", Data: 16 << 20, FreeRoot: 8 << 20, FreeData: 8 << 20})
	c, foreign := configOf(t, another)
	claims := good
	claims.Stored, claims.Table = c.Stored, c.Table
	s.artifact("other-content", claims, foreign)

	lies := c
	lies.Golden = good.Golden
	s.artifact("wrong-golden", lies, foreign)
	s.artifact("not-an-image", config{Version: 1, Descriptor: good.Descriptor, Stored: 100, Table: []byte("12345678901234567")}, make([]byte, 100))
	s.artifact("wrong-size", config{Version: 1, Descriptor: good.Descriptor, Stored: 99, Table: []byte("1")}, make([]byte, 100))
	s.artifact("newer", config{Version: 2}, []byte("x"))
	s.artifact("no-parts", good)
	// The digest of this part is correct, but a frame cannot be decompressed.
	spoilt := slices.Clone(content)
	copy(spoilt[len(spoilt)/2:], bytes.Repeat([]byte{7}, 1000))
	s.artifact("spoilt", good, spoilt)

	swapped := func(w http.ResponseWriter, r *http.Request, inner http.Handler) bool {
		if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/sha256:") {
			return false
		}
		rec := httptest.NewRecorder()
		inner.ServeHTTP(rec, r)
		b := rec.Body.Bytes()
		if len(b) > 1<<20 {
			b[len(b)/2] ^= 1
		}
		w.Write(b)
		return true
	}
	page := func(w http.ResponseWriter, r *http.Request, inner http.Handler) bool {
		if !strings.Contains(r.URL.Path, "/manifests/") {
			return false
		}
		io.WriteString(w, "<html>log in</html>")
		return true
	}
	for name, test := range map[string]struct {
		ref   string
		keys  []string
		fault func(http.ResponseWriter, *http.Request, http.Handler) bool
		words []string
		small bool // no part must be downloaded
	}{
		"unknown tag":     {ref: ":none", words: []string{"answered 404", "check repository, tag and digest"}, small: true},
		"unknown digest":  {ref: "@sha256:" + strings.Repeat("0", 64), words: []string{"answered 404"}, small: true},
		"unsigned":        {ref: ":unsigned", keys: []string{public.String()}, words: []string{"has no signature", "nothing was downloaded"}, small: true},
		"another key":     {ref: ":signed", keys: []string{other.String()}, words: []string{"is signed by key", "nothing was downloaded"}, small: true},
		"newer":           {ref: ":newer", words: []string{"a newer edgebake pushed this image", "version 2", "use the edgebake that pushed it"}, small: true},
		"sizes":           {ref: ":wrong-size", words: []string{"parts have 100 bytes, but the config lists 99"}, small: true},
		"no parts":        {ref: ":no-parts", words: []string{"names no parts"}, small: true},
		"no image":        {ref: ":not-an-image", words: []string{"the image's config is damaged", "push the image again"}, small: true},
		"a page":          {ref: ":signed", fault: page, words: []string{"login page"}, small: true},
		"a Site":          {ref: ":stamped", keys: []string{public.String()}, words: []string{"not a golden image", "join token"}},
		"other content":   {ref: ":other-content", keys: []string{public.String()}, words: []string{"the image does not match its config"}},
		"wrong golden":    {ref: ":wrong-golden", words: []string{"the image does not match its config"}},
		"a bad frame":     {ref: ":spoilt", words: []string{"decompressing frame"}},
		"a swapped blob":  {ref: ":signed", fault: swapped, words: []string{"part ", "sent bytes that do not match digest sha256:"}},
		"a key that fits": {ref: ":signed", keys: []string{other.String(), public.String()}},
		"none asked for":  {ref: ":unsigned"},
		"a config swapped": {ref: ":signed", fault: func(w http.ResponseWriter, r *http.Request, inner http.Handler) bool {
			rec := httptest.NewRecorder()
			inner.ServeHTTP(rec, r)
			if !bytes.HasPrefix(rec.Body.Bytes(), []byte(`{"version"`)) {
				return false
			}
			io.WriteString(w, strings.Replace(rec.Body.String(), good.Golden[:6], "000000", 1))
			return true
		}, words: []string{"fetching the config", "sent bytes that do not match"}, small: true},
	} {
		t.Run(name, func(t *testing.T) {
			s.faulty(test.fault)
			defer s.faulty(nil)
			dir := t.TempDir()
			path := filepath.Join(dir, "o.raw.zst")
			p, err := Pull(t.Context(), s.ref(test.ref), path, PullOptions{Options: quick(t), Keys: test.keys})
			if len(test.words) == 0 {
				if err != nil || (p.Key == "") != (len(test.keys) == 0) {
					t.Errorf("%+v %v", p, err)
				}
				return
			}
			wantError(t, err, append(test.words, "pulling "+s.ref(test.ref).String())...)
			if _, err := os.Stat(path); err == nil {
				t.Error("the output exists after a failure")
			}
			if name != "a swapped blob" {
				empty(t, dir)
			}
			if test.small && s.sent() > 1<<20 {
				t.Errorf("%d bytes were downloaded", s.sent())
			}
		})
	}
}

// TestPullOfSomethingElse checks that the error describes an artifact that is not an image.
func TestPullOfSomethingElse(t *testing.T) {
	for doc, words := range map[string][]string{
		`{"schemaVersion":2,"manifests":[{}]}`: {"a container image"},
		`garbage`:                              {"not an image manifest"},
	} {
		_, err := readManifest([]byte(doc))
		wantError(t, err, words...)
	}
}

// flash writes an image to a file that is larger than the image by the given number of bytes.
func flash(t *testing.T, image, to string, by int64) {
	t.Helper()
	fi, err := os.Stat(image)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(to, fi.Size()+by); err != nil {
		t.Fatal(err)
	}
	d, err := device.Open(to)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	f, err := media.PrepareFlash(image, media.FlashOptions{Size: d.Size, Random: [16]byte{1}})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(t.Context(), d); err != nil {
		t.Fatal(err)
	}
}

// larger appends old data of the given size to an image, starting with the text before.
func larger(t *testing.T, image string, by int, before string) {
	t.Helper()
	f, err := os.OpenFile(image, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, by)
	copy(b, before)
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
}

// site returns a Site that images of package mediatest support.
func site(t *testing.T) media.Site {
	t.Helper()
	doc, err := configs.ParseSite("site.yaml", []byte("apiVersion: edgebake.io/v1alpha1\nkind: Site\nmasters: [192.0.2.11:6443]\nunsafeSkipCAVerification: true\ncredentials: {token: abcdef.0123456789abcdef}\n"))
	if err != nil {
		t.Fatal(err)
	}
	return media.Site{Doc: doc}
}

// TestPushRejects checks that an image that is not golden is rejected before anything is sent.
func TestPushRejects(t *testing.T) {
	s := serve(t, httptest.NewServer)
	stamped := image(t, "i.raw", nil)
	if _, err := media.Stamp(t.Context(), stamped, site(t),
		media.StampOptions{Now: mediatest.Date}); err != nil {
		t.Fatal(err)
	}
	damaged := image(t, "i.raw", nil)
	deleted := image(t, "i.raw", nil)
	other := image(t, "i.raw", nil)
	for path, at := range map[string]string{damaged: "slot", deleted: "token: abcdef.0123456789abcdef\n", other: `"passwordHash":"$6$salt$hash"`} {
		i, err := media.Inspect(path)
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if at == "slot" {
			_, err = f.WriteAt(make([]byte, 1<<20), i.Partitions[1].Start)
		} else {
			_, err = f.WriteAt([]byte(at), i.Partitions[1].Start+i.Partitions[1].Size-512)
		}
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	flashed := filepath.Join(t.TempDir(), "flashed.raw")
	flash(t, image(t, "i.raw", nil), flashed, 32<<20)
	copied := image(t, "i.raw", nil)
	larger(t, copied, 512, "token")
	for path, words := range map[string][]string{
		flashed: {"this is a flashed disk", "use the image that was written to this disk"},
		copied:  {"the image is on a larger disk", "use the image that was written to this disk"},
		stamped: {"stamped with the Site node-{{.MAC}}, which has a join token", "golden image that it was made from"},
		damaged: {"slot cannot be read"},
		deleted: {"a Site was deleted"},
		other:   {"a file was deleted from the slot"},
	} {
		_, err := Push(t.Context(), path, s.ref(":1"), quick(t))
		wantError(t, err, append(words, "pushing image "+path)...)
	}
	good := image(t, "i.raw.zst", nil)
	stamping, err := os.Open(good)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(stamping.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	_, err = Push(t.Context(), good, s.ref(":1"), quick(t))
	wantError(t, err, "another program has locked the file")
	if err := stamping.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = Push(t.Context(), good, s.ref("@sha256:"+strings.Repeat("0", 64)), quick(t))
	wantError(t, err, "name a tag")
	if got := s.requests(""); len(got) > 0 {
		t.Errorf("asked: %v", got)
	}
}

// TestDamagedImageGetsNoName checks that an image that does not match its golden digest is not
// tagged.
func TestDamagedImageGetsNoName(t *testing.T) {
	s := serve(t, httptest.NewServer)
	path := image(t, "i.raw", nil)
	i, err := media.Inspect(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt([]byte("damage"), i.Partitions[2].Start+20<<20)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	o := quick(t)
	o.Progress = func(step string, done, total int64) {
		if step == "push" && done >= total {
			t.Error("Push returned no error, but the image is incomplete")
		}
	}
	_, err = Push(t.Context(), path, s.ref(":1"), o)
	wantError(t, err, "the golden digest of the image is")
	if got := s.requests("PUT /v2/edge/image/manifests"); len(got) > 0 {
		t.Errorf("the damaged image got a tag: %v", got)
	}
}

// TestPushGoesOn checks that push continues with the part in which the connection ended.
func TestPushGoesOn(t *testing.T) {
	zst := image(t, "i.raw.zst", nil)
	undisturbed := serve(t, httptest.NewServer)
	pushed(t, undisturbed, zst, ":1")
	usual := len(undisturbed.requests("PATCH"))
	t.Run("by part", func(t *testing.T) {
		s := serve(t, httptest.NewServer)
		cuts := 3
		s.faulty(func(w http.ResponseWriter, r *http.Request, inner http.Handler) bool {
			if r.Method == http.MethodPatch && cuts > 0 && r.ContentLength > 2<<20 {
				cuts--
				io.CopyN(io.Discard, r.Body, 1<<20)
				abort()
			}
			return false
		})
		pushed(t, s, zst, ":1")
	})
	t.Run("in the next run", func(t *testing.T) {
		s := serve(t, httptest.NewServer)
		ctx, cancel := context.WithCancel(t.Context())
		o := quick(t)
		o.Progress = func(step string, done, total int64) {
			if done > total*2/3 {
				cancel()
			}
		}
		if _, err := Push(ctx, zst, s.ref(":1"), o); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if p := pushed(t, s, zst, ":1"); p.Had == 0 || p.Had == p.Parts {
			t.Errorf("%+v", p)
		}
	})
	t.Run("a lost answer", func(t *testing.T) {
		s := serve(t, httptest.NewServer)
		var once sync.Once
		s.faulty(func(w http.ResponseWriter, r *http.Request, inner http.Handler) bool {
			if r.Method == http.MethodPut && r.URL.Query().Has("digest") {
				once.Do(func() {
					inner.ServeHTTP(httptest.NewRecorder(), r)
					abort()
				})
			}
			return false
		})
		pushed(t, s, zst, ":1")
		if got := len(s.requests("PATCH")); got != usual {
			t.Errorf("the part was sent again: %v", s.requests("PATCH"))
		}
	})
	t.Run("for ever", func(t *testing.T) {
		s := serve(t, httptest.NewServer)
		s.faulty(func(_ http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if r.Method == http.MethodPatch {
				abort()
			}
			return false
		})
		_, err := Push(t.Context(), zst, s.ref(":1"), quick(t))
		wantError(t, err, "sending part ", s.Listener.Addr().String())
	})
	t.Run("too large for a proxy", func(t *testing.T) {
		s := serve(t, httptest.NewServer)
		s.faulty(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if r.Method == http.MethodPatch {
				io.Copy(io.Discard, r.Body)
				w.WriteHeader(http.StatusRequestEntityTooLarge)
			}
			return r.Method == http.MethodPatch
		})
		_, err := Push(t.Context(), zst, s.ref(":1"), quick(t))
		wantError(t, err, "answered 413", "client_max_body_size")
	})
}

// TestSilentRegistry checks that push and pull end with an error if the registry sends nothing.
func TestSilentRegistry(t *testing.T) {
	zst := image(t, "i.raw.zst", nil)
	s := serve(t, httptest.NewServer)
	pushed(t, s, zst, ":1")
	o := quick(t)
	o.Stall = 200 * time.Millisecond
	s.faulty(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		large := r.Method == http.MethodPatch || strings.Contains(r.URL.Path, "/blobs/sha256:") && r.Method == http.MethodGet
		if large {
			<-r.Context().Done()
		}
		return large
	})
	_, err := Pull(t.Context(), s.ref(":1"), filepath.Join(t.TempDir(), "o.raw.zst"), PullOptions{Options: o})
	wantError(t, err, "sent nothing for 200ms", "check the network")
	other := serve(t, httptest.NewServer)
	block := make(chan struct{})
	defer close(block)
	other.faulty(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		if r.Method == http.MethodPatch {
			<-block // the server does not read the request's body
		}
		return r.Method == http.MethodPatch
	})
	_, err = Push(t.Context(), zst, other.ref(":1"), o)
	wantError(t, err, "sent nothing for 200ms")
}

// TestAccess checks that TLS, plain HTTP and logins work as they do in builds.
func TestAccess(t *testing.T) {
	zst := image(t, "i.raw.zst", nil)
	secure, plain := serve(t, httptest.NewTLSServer), serve(t, httptest.NewServer)
	o := quick(t)
	pushed(t, secure, zst, ":1")
	o.Insecure = false
	_, err := Push(t.Context(), zst, secure.ref(":1"), o)
	wantError(t, err, "certificate that cannot be verified", "add --insecure")
	_, err = Push(t.Context(), zst, plain.ref(":1"), o)
	wantError(t, err, "plain HTTP", "add --insecure if it uses plain HTTP")
	if got := plain.requests(""); len(got) > 0 {
		t.Errorf("requests without TLS: %v", got)
	}
	o.Insecure = true
	locked := serve(t, httptest.NewServer)
	locked.faulty(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		if u, p, _ := r.BasicAuth(); u+p != "robothunter2" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}
		return false
	})
	_, err = Push(t.Context(), zst, locked.ref(":1"), o)
	wantError(t, err, "answered 401", "--auth-file")
	o.AuthFile = filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(o.AuthFile, []byte(`{"auths":{"`+locked.Listener.Addr().String()+`":{"username":"robot","password":"hunter2"}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err = Push(t.Context(), zst, locked.ref(":1"), o); err != nil {
		t.Error(err)
	}
	if _, err = Pull(t.Context(), locked.ref(":1"), filepath.Join(t.TempDir(), "o.raw"), PullOptions{Options: o}); err != nil {
		t.Error(err)
	}
	gone, err := imageref.Parse("127.0.0.1:1/a:1")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err = Pull(ctx, gone, filepath.Join(t.TempDir(), "o.raw"), PullOptions{Options: Options{Insecure: true, RetryWait: time.Millisecond}})
	wantError(t, err, "cannot be reached", "check the network")
	if ctx.Err() != nil {
		t.Error("Pull did not give up before its context ended")
	}
}

// TestPullOntoAFullDisk runs itself again in a namespace, in which it can mount a small file
// system. After a full disk, the next pull continues with the stored data.
func TestPullOntoAFullDisk(t *testing.T) {
	disktest.Mounted(t, `mount -t tmpfs -o size=40m none "$0"`, func(t *testing.T, dir string) {
		s := serve(t, httptest.NewServer)
		zst := image(t, "i.raw.zst", nil)
		p := pushed(t, s, zst, ":1")
		ballast := filepath.Join(dir, "ballast")
		fill := func(n int64) {
			if err := os.WriteFile(ballast, make([]byte, n), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for _, out := range []string{"o.raw.zst", "o.raw"} {
			path := filepath.Join(dir, out)
			fill(40<<20 - p.Stored/2)
			_, err := Pull(t.Context(), s.ref(":1"), path, PullOptions{Options: quick(t)})
			wantError(t, err, "no space left", "make room")
			if list, err := os.ReadDir(dir); err != nil || len(list) != 1 {
				t.Errorf("the directory has unexpected files, so the download began before the space was checked: %v", list)
			}
			// Another program fills the disk during the pull.
			fill(40<<20 - p.Stored - 1<<20)
			o := quick(t)
			var once sync.Once
			o.Progress = func(string, int64, int64) { once.Do(func() { fill(40<<20 - p.Stored/2) }) }
			_, err = Pull(t.Context(), s.ref(":1"), path, PullOptions{Options: o})
			wantError(t, err, "no space left", "make room", "run the same command again")
			if _, err := os.Stat(path); err == nil {
				t.Error("the output exists after a failure")
			}
			if err := os.Remove(ballast); err != nil {
				t.Fatal(err)
			}
			s.faulty(nil)
			if out == "o.raw" {
				// The disk is too small for both files.
				_, err = Pull(t.Context(), s.ref(":1"), path, PullOptions{Options: quick(t)})
				wantError(t, err, "no space left", "make room")
				continue
			}
			got, err := Pull(t.Context(), s.ref(":1"), path, PullOptions{Options: quick(t)})
			if err != nil || got.Had == 0 {
				t.Errorf("%+v %v", got, err)
			}
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// FuzzManifest checks that any manifest is accepted or rejected, but causes no crash.
func FuzzManifest(f *testing.F) {
	f.Add([]byte(`{"artifact.Type":"`+artifact.Type+`","config":{"digest":"sha256:aa","size":5}}`), []byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, doc, conf []byte) {
		m, err := readManifest(doc)
		if err != nil {
			return
		}
		c, err := readConfig(conf, m)
		if err != nil {
			return
		}
		if chunks, err := media.NewChunks(bytes.NewReader(nil), c.Stored, c.Table); err == nil {
			chunks.Close()
		}
	})
}

// TestRetryAfter checks that a request is repeated only after the pause that the registry demands.
func TestRetryAfter(t *testing.T) {
	s := serve(t, httptest.NewServer)
	o := quick(t)
	r, err := openRepo(t.Context(), s.ref(":1"), transport.PullScope, &o)
	if err != nil {
		t.Fatal(err)
	}
	s.faulty(func(w http.ResponseWriter, _ *http.Request, _ http.Handler) bool {
		w.Header().Set("Retry-After", "7")
		w.WriteHeader(http.StatusTooManyRequests)
		return true
	})
	_, err = r.request(t.Context(), http.MethodGet, r.url("/manifests/1"), nil, nil, 0, http.StatusOK)
	if pause := transfer.AskedPause(err); pause != 7*time.Second || !mayBeTemporary(err) {
		t.Errorf("the pause is %v: %v", pause, err)
	}
}
