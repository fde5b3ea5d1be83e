package fetch

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"

	"github.com/edgebake/edgebake/builder/transfer"
)

func open(t testing.TB, dir string) *Cache {
	t.Helper()
	c, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// files lists all files below dir, without the lock files and the start file of an open cache.
func files(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && !strings.Contains(p, "/locks/") && d.Name() != startedFile {
			rel, _ := filepath.Rel(dir, p)
			out = append(out, rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestPut(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir)
	data := []byte("content")
	sha, n, err := c.Put(t.Context(), sum(data), bytes.NewReader(data))
	if err != nil || sha != sum(data) || n != int64(len(data)) {
		t.Fatalf("%s %d %v", sha, n, err)
	}
	f, err := c.OpenBlob(sha)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got := make([]byte, len(data))
	if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%q %v", got, err)
	}
	before := files(t, dir)
	var wrong *DigestError
	if _, _, err := c.Put(t.Context(), sum([]byte("other")), bytes.NewReader(data)); !errors.As(err, &wrong) || wrong.Got != sum(data) {
		t.Errorf("a wrong digest: %v", err)
	}
	broken := io.MultiReader(strings.NewReader("half"), errReader{errors.New("cut")})
	if _, _, err := c.Put(t.Context(), "", broken); err == nil {
		t.Error("half a blob was stored")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := c.Put(ctx, "", bytes.NewReader(data)); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if after := files(t, dir); strings.Join(after, " ") != strings.Join(before, " ") {
		t.Errorf("failures left files: %q", after)
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func TestMakeOnce(t *testing.T) {
	dir := t.TempDir()
	var made atomic.Int32
	var wg sync.WaitGroup
	shas := make([]string, 8)
	for i := range shas {
		c := open(t, dir) // a separate cache, as in a separate build
		wg.Go(func() {
			sha, err := c.Make(t.Context(), "recipe", func(_ context.Context, w io.Writer) error {
				made.Add(1)
				time.Sleep(20 * time.Millisecond)
				_, err := io.WriteString(w, "made")
				return err
			})
			if err != nil {
				t.Error(err)
			}
			shas[i] = sha
		})
	}
	wg.Wait()
	if made.Load() != 1 {
		t.Errorf("the recipe ran %d times", made.Load())
	}
	for _, sha := range shas {
		if sha != sum([]byte("made")) {
			t.Errorf("got %s", sha)
		}
	}
	c := open(t, dir)
	if sha, ok := c.Lookup("recipe"); !ok || sha != shas[0] {
		t.Error("Lookup does not find what was made")
	}
	if _, ok := c.Lookup("other"); ok {
		t.Error("Lookup returns a blob for an unknown key")
	}
	// A removed blob is made again.
	if err := os.Remove(c.BlobPath(shas[0])); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Make(t.Context(), "recipe", func(_ context.Context, w io.Writer) error {
		_, err := io.WriteString(w, "made")
		return err
	}); err != nil || !c.Has(shas[0]) {
		t.Errorf("not made again: %v", err)
	}
}

func TestMakeFails(t *testing.T) {
	c := open(t, t.TempDir())
	boom := errors.New("boom")
	_, err := c.Make(t.Context(), "k", func(_ context.Context, w io.Writer) error {
		io.WriteString(w, "half")
		return boom
	})
	if !errors.Is(err, boom) {
		t.Fatalf("%v", err)
	}
	if _, ok := c.Lookup("k"); ok {
		t.Error("a failed recipe has a result")
	}
	// A canceled context ends the wait for another process's recipe.
	other := open(t, c.dir)
	started, end := make(chan bool), make(chan bool)
	done := make(chan error)
	go func() {
		_, err := other.Make(context.Background(), "k", func(context.Context, io.Writer) error {
			close(started)
			<-end
			return nil
		})
		done <- err
	}()
	<-started
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := c.Make(ctx, "k", nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waiting: %v", err)
	}
	close(end)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestKill kills a writer in the middle of a recipe. The next writer must not block: it must run
// the recipe again, and remove the files of the killed process.
func TestKill(t *testing.T) {
	if dir := os.Getenv("EDGEBAKE_TEST_CACHE"); dir != "" {
		c, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.TempDir(); err != nil {
			t.Fatal(err)
		}
		_, err = c.Make(context.Background(), "k", func(_ context.Context, w io.Writer) error {
			io.WriteString(w, strings.Repeat("half", 1<<18))
			fmt.Println("WRITING")
			select {}
		})
		t.Fatal(err)
	}
	dir := t.TempDir()
	for range 3 {
		cmd := exec.Command(os.Args[0], "-test.run", "^TestKill$", "-test.v")
		cmd.Env = append(os.Environ(), "EDGEBAKE_TEST_CACHE="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var said strings.Builder
		for b := make([]byte, 256); !strings.Contains(said.String(), "WRITING"); {
			n, err := out.Read(b)
			if err != nil {
				t.Fatalf("the writer ended: %v\n%s", err, said.String())
			}
			said.Write(b[:n])
		}
		if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
	}
	if left := files(t, filepath.Join(dir, "tmp")); len(left) == 0 {
		t.Error("the killed writer left nothing, so the test checks nothing")
	}
	c := open(t, dir)
	if left := files(t, filepath.Join(dir, "tmp")); len(left) != 0 {
		t.Errorf("leftovers were not removed: %q", left)
	}
	sha, err := c.Make(t.Context(), "k", func(_ context.Context, w io.Writer) error {
		_, err := io.WriteString(w, "whole")
		return err
	})
	if err != nil || sha != sum([]byte("whole")) {
		t.Errorf("%s %v", sha, err)
	}
}

func TestSweepSparesTheLiving(t *testing.T) {
	dir := t.TempDir()
	a := open(t, dir)
	scratch, err := a.TempDir()
	if err != nil {
		t.Fatal(err)
	}
	open(t, dir)
	if _, err := os.Stat(scratch); err != nil {
		t.Errorf("the directory of a running build was removed: %v", err)
	}
}

func TestOpenRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(filepath.Join(file, "cache")); err == nil || !strings.Contains(err.Error(), "EDGEBAKE_CACHE") {
		t.Errorf("%v", err)
	}
}

// quick returns a downloader that waits only briefly.
func quick() downloader {
	return downloader{rounds: 3, pause: time.Millisecond,
		client: &http.Client{Transport: transfer.WithStallTimeout(&http.Transport{DisableCompression: true}, 100*time.Millisecond)}}
}

func TestDownload(t *testing.T) {
	data := bytes.Repeat([]byte("file "), 5000)
	var asked atomic.Int32
	mux := http.NewServeMux()
	mux.HandleFunc("/good", func(w http.ResponseWriter, _ *http.Request) { w.Write(data) })
	mux.HandleFunc("/busy", func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) < 3 {
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		w.Write(data)
	})
	mux.HandleFunc("/down", func(w http.ResponseWriter, _ *http.Request) { asked.Add(1); w.WriteHeader(500) })
	mux.HandleFunc("/toomany", func(w http.ResponseWriter, _ *http.Request) { asked.Add(1); w.WriteHeader(429) })
	mux.HandleFunc("/secret", func(w http.ResponseWriter, _ *http.Request) { asked.Add(1); w.WriteHeader(401) })
	mux.HandleFunc("/cut", func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.Header().Set("Content-Length", fmt.Sprint(len(data)))
		w.Write(data[:100])
	})
	mux.HandleFunc("/stall", func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		w.Write(data[:100])
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	mux.HandleFunc("/hangup", func(http.ResponseWriter, *http.Request) { asked.Add(1); panic(http.ErrAbortHandler) })
	mux.HandleFunc("/other", func(w http.ResponseWriter, _ *http.Request) { asked.Add(1); io.WriteString(w, "another file") })
	srv := httptest.NewServer(mux)
	defer srv.Close()
	local := filepath.Join(t.TempDir(), "local")
	if err := os.WriteFile(local, data, 0o644); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name  string
		urls  []string
		asked int32    // number of failing requests
		err   []string // parts of the error; empty if the download succeeds
	}{
		{name: "plain", urls: []string{"/good"}},
		{name: "local", urls: []string{"file://" + local}},
		{name: "passing trouble", urls: []string{"/busy"}, asked: 3},
		{name: "next mirror at once", urls: []string{"/down", "/good"}, asked: 1},
		{name: "mirror with another file", urls: []string{"/other", "/good"}, asked: 1},
		{name: "down", urls: []string{"/down"}, asked: 3, err: []string{"/down: the server responded with 500"}},
		{name: "too many requests", urls: []string{"/toomany"}, asked: 3, err: []string{"429"}},
		{name: "missing", urls: []string{"/none"}, err: []string{"404", "check version, name and architecture"}},
		{name: "credentials", urls: []string{"/secret"}, asked: 1, err: []string{"401", "user:password@"}},
		{name: "truncated", urls: []string{"/cut"}, asked: 3, err: []string{"the connection ended in the middle of the file"}},
		{name: "hangs up", urls: []string{"/hangup"}, asked: 3, err: []string{"/hangup: the server closed the connection without a response"}},
		{name: "stall", urls: []string{"/stall"}, asked: 3, err: []string{"no data for 100ms"}},
		{name: "another file", urls: []string{"/other"}, asked: 1, err: []string{"sha256 is " + sum([]byte("another file")), "the file on the server is not the expected one"}},
		{name: "all mirrors are named", urls: []string{"/none", "/secret"}, asked: 1, err: []string{"/none: ", "/secret: "}},
		{name: "scheme", urls: []string{"gopher://x/y"}, err: []string{`scheme "gopher"`}},
		{name: "nothing there", urls: []string{"file:///nowhere/at/all"}, err: []string{"no such file"}},
		{name: "nobody listens", urls: []string{"http://127.0.0.1:1/x"}, err: []string{"connection refused"}},
		{name: "no URL", err: []string{"no URL given"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			asked.Store(0)
			dir := t.TempDir()
			c := open(t, dir)
			var urls []string
			for _, u := range tt.urls {
				if strings.HasPrefix(u, "/") {
					u = srv.URL + u
				}
				urls = append(urls, u)
			}
			var done, total int64
			sha, err := quick().fetch(t.Context(), c, urls, sum(data), func(d, n int64) { done, total = d, n })
			if asked.Load() != tt.asked {
				t.Errorf("%d requests, want %d", asked.Load(), tt.asked)
			}
			if tt.err == nil {
				if err != nil || sha != sum(data) || !c.Has(sha) {
					t.Errorf("%s %v", sha, err)
				}
				if done != int64(len(data)) || total >= 0 && total != done {
					t.Errorf("progress ended at %d of %d", done, total)
				}
				return
			}
			for _, want := range tt.err {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("error lacks %q: %v", want, err)
				}
			}
			if left := files(t, dir); len(left) != 0 {
				t.Errorf("the cache has %q", left)
			}
		})
	}
}

// TestHead reads the beginning of a file from a server that sends without end.
func TestHead(t *testing.T) {
	gone := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(gone)
		for r.Context().Err() == nil {
			if _, err := w.Write(make([]byte, 64<<10)); err != nil {
				return
			}
		}
	}))
	defer s.Close()
	c := open(t, t.TempDir())
	sha, err := Head(t.Context(), c, s.URL, 4096)
	if err != nil || sha != sum(make([]byte, 4096)) {
		t.Errorf("%s, %v", sha, err)
	}
	<-gone
}

// TestDownloadStaysEncrypted checks that a redirect to another server is followed, but not one from
// https to http.
func TestDownloadStaysEncrypted(t *testing.T) {
	asked := atomic.Int32{}
	plain := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { asked.Add(1); io.WriteString(w, "data") }))
	defer plain.Close()
	safe := httptest.NewTLSServer(nil)
	defer safe.Close()
	mux := http.NewServeMux()
	mux.Handle("/down", http.RedirectHandler(plain.URL, http.StatusFound))
	mux.Handle("/twice", http.RedirectHandler("/down", http.StatusFound))
	mux.Handle("/within", http.RedirectHandler("/data", http.StatusFound))
	mux.HandleFunc("/data", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "data") })
	safe.Config.Handler = mux
	d := quick()
	d.client = &http.Client{Transport: StayEncrypted(safe.Client().Transport)}
	for _, path := range []string{"/down", "/twice"} {
		_, err := d.fetch(t.Context(), open(t, t.TempDir()), []string{safe.URL + path}, "", nil)
		if err == nil || !strings.Contains(err.Error(), "redirects from https to http") || asked.Load() != 0 {
			t.Errorf("%s: %d requests without TLS, %v", path, asked.Load(), err)
		}
	}
	if _, err := d.fetch(t.Context(), open(t, t.TempDir()), []string{safe.URL + "/within"}, "", nil); err != nil {
		t.Error(err)
	}
}

func TestDownloadOnce(t *testing.T) {
	c := open(t, t.TempDir())
	sha, _, err := c.Put(t.Context(), "", strings.NewReader("here"))
	if err != nil {
		t.Fatal(err)
	}
	// Nothing listens at this URL: the file must come from the cache.
	if got, err := Download(t.Context(), c, []string{"http://127.0.0.1:1/x"}, sha, 1<<20, nil); err != nil || got != sha {
		t.Errorf("%s %v", got, err)
	}
}

func TestDownloadCancelled(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer srv.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Download(ctx, open(t, t.TempDir()), []string{srv.URL}, "", 1<<20, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestRedact(t *testing.T) {
	if got := Redact("https://me:hunter2@host/x"); strings.Contains(got, "hunter2") || !strings.Contains(got, "host/x") {
		t.Error(got)
	}
}

func TestUncompressed(t *testing.T) {
	plain := bytes.Repeat([]byte("plain text "), 1000)
	pack := map[string]func(io.Writer) (io.WriteCloser, error){
		"gzip": func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriter(w), nil },
		"zstd": func(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) },
		"xz":   func(w io.Writer) (io.WriteCloser, error) { return xz.NewWriter(w) },
	}
	c := open(t, t.TempDir())
	put := func(b []byte) string {
		sha, _, err := c.Put(t.Context(), "", bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		return sha
	}
	for name, open := range pack {
		var b bytes.Buffer
		w, err := open(&b)
		if err != nil {
			t.Fatal(err)
		}
		w.Write(plain)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if got, err := Uncompressed(t.Context(), c, put(b.Bytes()), 1<<20); err != nil || got != sum(plain) {
			t.Errorf("%s: %s %v", name, got, err)
		}
		bomb := put(append(b.Bytes(), b.Bytes()...)) // two compressed files in one, if the format allows it
		if _, err := Uncompressed(t.Context(), c, bomb, int64(len(plain))); err == nil || !strings.Contains(err.Error(), "more than") {
			t.Errorf("%s, too large: %v", name, err)
		}
		cut := put(b.Bytes()[:b.Len()-3])
		if _, err := Uncompressed(t.Context(), c, cut, 1<<20); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s, truncated: %v", name, err)
		}
	}
	for _, b := range [][]byte{plain, nil, []byte("x")} {
		sha := put(b)
		if got, err := Uncompressed(t.Context(), c, sha, 1); err != nil || got != sha {
			t.Errorf("%d plain bytes: %s %v", len(b), got, err)
		}
	}
}

// TestUncompressedTarWithAMagicName checks that a tar is not uncompressed because the name of its
// first file looks like compressed data. The same holds for a text that begins like bzip2.
func TestUncompressedTarWithAMagicName(t *testing.T) {
	c := open(t, t.TempDir())
	for _, name := range []string{"BZhome", "BZh91AY&SY", "\x1f\x8b\x08", "\x28\xb5\x2f\xfd", "\xfd7zXZ"} {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := errors.Join(w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Format: tar.FormatGNU}), w.Close()); err != nil {
			t.Fatal(err)
		}
		sha, _, err := c.Put(t.Context(), "", &b)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := Uncompressed(t.Context(), c, sha, 1<<20); err != nil || got != sha {
			t.Errorf("%q: %s, %v", name, got, err)
		}
	}
	sha, _, err := c.Put(t.Context(), "", strings.NewReader("BZh is how a bzip2 file begins"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := Uncompressed(t.Context(), c, sha, 1<<20); err != nil || got != sha {
		t.Errorf("a text: %s, %v", got, err)
	}
	for packed, want := range map[string]string{"425a683917724538509000000000": "", "425a68393141592653591d5e59d5000000c1000010006020002198198461772453850901d5e59d50": "hi\n"} { // as bzip2 writes them
		b, err := hex.DecodeString(packed)
		if err != nil {
			t.Fatal(err)
		}
		sha, _, err := c.Put(t.Context(), "", bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := Uncompressed(t.Context(), c, sha, 1<<20); err != nil || got != sum([]byte(want)) {
			t.Errorf("bzip2 of %q: %s, %v", want, got, err)
		}
	}
}

// TestUncompressedWindow checks that a small header cannot make the reader allocate gigabytes.
func TestUncompressedWindow(t *testing.T) {
	var packed bytes.Buffer
	w, err := xz.NewWriter(&packed)
	if err != nil {
		t.Fatal(err)
	}
	w.Write([]byte("text"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	dictionary := packed.Bytes()
	at := bytes.Index(dictionary, []byte{0x21, 1}) + 2 // property byte of LZMA2
	dictionary[at] = 40                                // 4 GiB
	c := open(t, t.TempDir())
	for name, b := range map[string][]byte{
		"xz":   dictionary,
		"zstd": {0x28, 0xb5, 0x2f, 0xfd, 0, 20 << 3, 1, 0, 0}, // a window of 1 GiB, and an empty last block
	} {
		sha, _, err := c.Put(t.Context(), "", bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Uncompressed(t.Context(), c, sha, 1<<20); err == nil || !strings.Contains(err.Error(), "more than 512 MiB of memory") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzUncompressed checks that the stored bytes are the uncompressed input, and at most as many as
// the limit.
func FuzzUncompressed(f *testing.F) {
	for _, open := range []func(io.Writer) (io.WriteCloser, error){
		func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriter(w), nil },
		func(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) },
		func(w io.Writer) (io.WriteCloser, error) { return xz.NewWriter(w) },
	} {
		var b bytes.Buffer
		w, err := open(&b)
		if err != nil {
			f.Fatal(err)
		}
		w.Write(make([]byte, 70<<10))
		if err := w.Close(); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	f.Add([]byte("BZh9\x17\x72\x45\x38\x50\x90\x00\x00\x00\x00"))
	f.Add([]byte("plain"))
	c := open(f, f.TempDir())
	f.Fuzz(func(t *testing.T, b []byte) {
		const limit = 64 << 10
		sha, _, err := c.Put(t.Context(), "", bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		defer os.Remove(c.BlobPath(sha))
		got, err := Uncompressed(t.Context(), c, sha, limit)
		if err != nil || got == sha {
			return
		}
		defer os.Remove(c.BlobPath(got))
		if fi, err := os.Stat(c.BlobPath(got)); err != nil || fi.Size() > limit {
			t.Errorf("stored: %v, %v", fi, err)
		}
	})
}

func TestCacheFull(t *testing.T) {
	c := open(t, t.TempDir())
	_, _, err := c.Put(t.Context(), "", errReader{syscall.ENOSPC})
	if err == nil || !strings.Contains(err.Error(), "--cache") {
		t.Errorf("%v", err)
	}
}

// TestCacheSourceFails checks that Put returns an error of its source unchanged.
func TestCacheSourceFails(t *testing.T) {
	c := open(t, t.TempDir())
	want := errors.New("the source says why")
	if _, _, err := c.Put(t.Context(), "", errReader{want}); err != want {
		t.Errorf("%v", err)
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestUnknownHost checks that the error names the unknown host, but not the name server.
func TestUnknownHost(t *testing.T) {
	c, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d := downloader{rounds: 1, client: &http.Client{Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: &net.DNSError{Err: "no such host", Name: r.URL.Hostname(), Server: "192.0.2.53:53", IsNotFound: true}}
	})}}
	_, err = d.fetch(t.Context(), c, []string{"https://mirror.example.com/file"}, "", func(int64, int64) {})
	if want := "fetching https://mirror.example.com/file: mirror.example.com is not found in DNS; check its spelling, and the network"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

// TestCacheInARelativeDirectory checks that programs with another working directory find the cache.
// Otherwise, apt would use this computer's own package lists.
func TestCacheInARelativeDirectory(t *testing.T) {
	here := t.TempDir()
	t.Chdir(here)
	c, err := Open("cache")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	dir, err := c.TempDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir("/")
	for _, path := range []string{c.Dir(), dir} {
		if fi, err := os.Stat(path); err != nil || !fi.IsDir() || !strings.HasPrefix(path, here) {
			t.Errorf("%s from elsewhere: %v", path, err)
		}
	}
}
