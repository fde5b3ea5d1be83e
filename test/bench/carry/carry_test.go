// Package carry compares push and pull with copying: go-containerregistry's client sends the same
// bytes through the same registry. It uses loopback and a connection of 1 Gbit/s, and also measures
// the cost of a connection that breaks in the middle. Results go to test/bench/results.
//
//	EDGEBAKE_BENCH_RUNS   number of runs of each, 3 by default
//	EDGEBAKE_BENCH_DIR    directory of the image, by default that for temporary files
package carry

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/carry"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/test/bench"
	"github.com/edgebake/edgebake/test/mediatest"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const results = "../results/carry.md"

// promised is the minimum speed of push and pull, as a fraction of the speed of copying.
const promised = 0.9

// gigabit is the payload of 1 Gbit/s, in bytes per second.
const gigabit = 117 << 20

// line is a listener that limits the total rate of its connections in each direction, in bytes per
// second; 0 means no limit.
type line struct {
	net.Listener
	up, down *pace
}

type pace struct {
	rate int
	mu   sync.Mutex
	free time.Time // when the line is free again
}

// buffered is the time by which a line may be ahead: a quarter of the data that Linux buffers for a
// connection at this speed.
const buffered = 10 * time.Millisecond

func (p *pace) wait(n int) {
	if p.rate == 0 {
		return
	}
	p.mu.Lock()
	// While the program was late, the kernels have sent the data in their buffers.
	if now := time.Now(); p.free.Before(now.Add(-buffered)) {
		p.free = now.Add(-buffered)
	}
	p.free = p.free.Add(time.Duration(n) * time.Second / time.Duration(p.rate))
	until := p.free
	p.mu.Unlock()
	time.Sleep(time.Until(until))
}

func (l line) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return slow{c, l}, err
}

type slow struct {
	net.Conn
	line
}

func (s slow) Read(p []byte) (int, error) {
	n, err := s.Conn.Read(p[:min(len(p), 256<<10)])
	s.up.wait(n)
	return n, err
}

func (s slow) Write(p []byte) (done int, err error) {
	for len(p) > 0 && err == nil {
		n := 0
		n, err = s.Conn.Write(p[:min(len(p), 256<<10)])
		s.down.wait(n)
		done, p = done+n, p[n:]
	}
	return done, err
}

func (s slow) Close() error   { return s.Conn.Close() }
func (s slow) Addr() net.Addr { return s.Listener.Addr() }

// serve starts an empty registry. cut(n) breaks the first longer response after n bytes; cut(0)
// breaks none.
func serve(b *testing.B, rate int) (host string, cut func(at int64)) {
	b.Helper()
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	var mu sync.Mutex
	var left int64
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		at := left
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/sha256:") {
			left = 0
		}
		mu.Unlock()
		if at > 0 && r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/sha256:") {
			w = &cutting{w, at}
		}
		inner.ServeHTTP(w, r)
	}))
	s.Listener = line{s.Listener, &pace{rate: rate}, &pace{rate: rate}}
	s.Start()
	b.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://"), func(at int64) {
		mu.Lock()
		defer mu.Unlock()
		left = at
	}
}

type cutting struct {
	http.ResponseWriter
	left int64
}

func (c *cutting) Write(p []byte) (int, error) {
	if int64(len(p)) > c.left {
		c.ResponseWriter.Write(p[:c.left])
		panic(http.ErrAbortHandler)
	}
	c.left -= int64(len(p))
	return c.ResponseWriter.Write(p)
}

// file is the whole image as one blob.
type file struct {
	path string
	hash v1.Hash
	size int64
}

func (f *file) Digest() (v1.Hash, error)             { return f.hash, nil }
func (f *file) DiffID() (v1.Hash, error)             { return f.hash, nil }
func (f *file) Size() (int64, error)                 { return f.size, nil }
func (f *file) MediaType() (types.MediaType, error)  { return types.OCILayer, nil }
func (f *file) Uncompressed() (io.ReadCloser, error) { return os.Open(f.path) }
func (f *file) Compressed() (io.ReadCloser, error)   { return os.Open(f.path) }

// copyIn pushes a file unchanged. The registry requires its digest first.
func copyIn(ctx context.Context, host, path string) (*file, error) {
	in, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	h := sha256.New()
	n, err := io.Copy(h, in)
	if err != nil {
		return nil, err
	}
	f := &file{path, v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(h.Sum(nil))}, n}
	repo, err := name.NewRepository(host+"/copy", name.Insecure)
	if err != nil {
		return nil, err
	}
	return f, remote.WriteLayer(repo, f, remote.WithContext(ctx))
}

// copyOut pulls the file to path.
func copyOut(ctx context.Context, host string, f *file, path string) error {
	repo, err := name.NewRepository(host+"/copy", name.Insecure)
	if err != nil {
		return err
	}
	l, err := remote.Layer(repo.Digest(f.hash.String()), remote.WithContext(ctx))
	if err != nil {
		return err
	}
	r, err := l.Compressed()
	if err != nil {
		return err
	}
	defer r.Close()
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer out.Close()
	if _, err := io.Copy(out, r); err != nil {
		return err
	}
	return out.Sync()
}

type row struct {
	name, line, base string
	times            []float64
}

func (r *row) median() float64 { return bench.Median(r.times) }

func BenchmarkCarry(b *testing.B) {
	runs := bench.Runs(b, 3)
	dir, err := os.MkdirTemp(cmp.Or(os.Getenv("EDGEBAKE_BENCH_DIR"), os.TempDir()), "edgebake-bench-")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	zst := filepath.Join(dir, "g.raw.zst")
	mediatest.Make(b, zst, mediatest.Image{ID: "bench", Data: 400 << 20, FreeRoot: 256 << 20, FreeData: 512 << 20})
	st, err := os.Stat(zst)
	if err != nil {
		b.Fatal(err)
	}
	var rows []*row
	timed := func(what, over, base string, do func() error) {
		b.Helper()
		i := slices.IndexFunc(rows, func(r *row) bool { return r.name == what && r.line == over })
		if i < 0 {
			i = len(rows)
			rows = append(rows, &row{name: what, line: over, base: base})
		}
		begun := time.Now()
		if err := do(); err != nil {
			b.Fatalf("%s over %s: %v", what, over, err)
		}
		rows[i].times = append(rows[i].times, time.Since(begun).Seconds())
	}
	for range runs {
		for _, l := range []struct {
			name string
			rate int
		}{{"loopback", 0}, {"1 Gbit/s", gigabit}} {
			host, cut := serve(b, l.rate)
			ref, err := imageref.Parse(host + "/edge/image:1")
			if err != nil {
				b.Fatal(err)
			}
			o := carry.Options{Insecure: true}
			var f *file
			timed("copy in", l.name, "copy in", func() (err error) { f, err = copyIn(b.Context(), host, zst); return err })
			timed("push", l.name, "copy in", func() error { _, err := carry.Push(b.Context(), zst, ref, o); return err })
			timed("push, all parts there", l.name, "copy in", func() error { _, err := carry.Push(b.Context(), zst, ref, o); return err })
			out := filepath.Join(dir, "out.raw.zst")
			fresh := func() { os.Remove(out) }
			pull := func() error {
				_, err := carry.Pull(b.Context(), ref, out, carry.PullOptions{Options: o})
				return err
			}
			fresh()
			timed("copy out", l.name, "copy out", func() error { return copyOut(b.Context(), host, f, out) })
			fresh()
			timed("pull, golden digest verified", l.name, "copy out", pull)
			fresh()
			cut(64 << 20)
			timed("pull, cut after 64 MiB", l.name, "copy out", pull)
		}
	}
	var text strings.Builder
	fmt.Fprintf(&text, "# Push and pull\n\nMade by `make bench` (test/bench/carry). %d runs each, in turns, %d processors, go-containerregistry's registry in the same process, all in memory.\n"+
		"Load average at the end: %s.\nA compressed image of %d MiB. Copying sends and fetches the same file as one blob with go-containerregistry's client, its digest and a sync to the disk included; "+
		"promised is %.1f of its speed. Push also verifies the image, and pull decompresses it and verifies its golden digest: on loopback, where registry and client share the processors with that, this shows; on a line it is done beside, with one processor left to the line.\n\n"+
		"| | over | seconds (median) | speed, × copying |\n|---|---|---|---|\n",
		runs, runtime.NumCPU(), bench.Load(), st.Size()>>20, promised)
	for _, r := range rows {
		base := rows[slices.IndexFunc(rows, func(x *row) bool { return x.name == r.base && x.line == r.line })]
		fmt.Fprintf(&text, "| %s | %s | %.2f | %.2f |\n", r.name, r.line, r.median(), base.median()/r.median())
	}
	b.Log("\n" + text.String())
	if err := os.WriteFile(results, []byte(text.String()), 0o644); err != nil {
		b.Fatal(err)
	}
}
