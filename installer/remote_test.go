package installer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// server shows bytes; each may answer in place of it.
func server(t *testing.T, b []byte, each func(n int64, w http.ResponseWriter, r *http.Request) bool) (*remote, *atomic.Int64) {
	t.Helper()
	var n atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if i := n.Add(1); each != nil && each(i, w, r) {
			return
		}
		w.Header().Set("ETag", `"one"`)
		http.ServeContent(w, r, "image", time.Time{}, bytes.NewReader(b))
	}))
	t.Cleanup(s.Close)
	r := &remote{ctx: t.Context(), http: s.Client(), url: s.URL, sleep: func(context.Context, time.Duration) error { return nil }}
	return r, &n
}

func noise(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

// A range that breaks off is asked for from there; a server that is away is
// asked again.
func TestRemote(t *testing.T) {
	b := noise(1 << 20)
	asked := int64(0)
	r, _ := server(t, b, func(n int64, w http.ResponseWriter, q *http.Request) bool {
		var from, to int64
		if _, err := fmt.Sscanf(q.Header.Get("Range"), "bytes=%d-%d", &from, &to); err != nil {
			t.Error(err)
		}
		asked += to - from + 1
		switch {
		case n > 1 && n%3 == 0:
			w.WriteHeader(http.StatusServiceUnavailable)
			return true
		case n > 1 && n < 9: // it hangs up after a part
			w.Header().Set("ETag", `"one"`)
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to, len(b)))
			w.Header().Set("Content-Length", fmt.Sprint(to-from+1))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(b[from : from+(to-from+1)/8])
			panic(http.ErrAbortHandler)
		}
		return false
	})
	if err := r.find(); err != nil || r.size != 1<<20 {
		t.Fatal(r.size, err)
	}
	got := make([]byte, 1<<20)
	if n, err := r.ReadAt(got, 0); n != len(got) || err != nil || !bytes.Equal(got, b) {
		t.Errorf("%d %v", n, err)
	}
	if n, err := r.ReadAt(got[:100], 1<<20-10); n != 10 || err != io.EOF || !bytes.Equal(got[:10], b[1<<20-10:]) {
		t.Errorf("at the end: %d %v", n, err)
	}
	if n, err := r.ReadAt(got, 1<<20); n != 0 || err != io.EOF {
		t.Errorf("behind the end: %d %v", n, err)
	}
}

// What does not answer a range, or another image than before, is an error.
func TestRemoteRefuses(t *testing.T) {
	b := noise(1 << 10)
	for want, each := range map[string]func(n int64, w http.ResponseWriter, q *http.Request) bool{
		"does not answer ranges": func(_ int64, w http.ResponseWriter, _ *http.Request) bool { _, _ = w.Write(b); return true },
		"404 Not Found":          func(_ int64, w http.ResponseWriter, q *http.Request) bool { http.NotFound(w, q); return true },
		"answers with the range": func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Range", "bytes 5-9/*")
			w.WriteHeader(http.StatusPartialContent)
			return true
		},
		"has changed": func(n int64, w http.ResponseWriter, q *http.Request) bool {
			if n == 1 {
				return false
			}
			w.Header().Set("ETag", `"two"`)
			http.ServeContent(w, q, "image", time.Time{}, bytes.NewReader(b))
			return true
		},
	} {
		r, n := server(t, b, each)
		err := r.find()
		if err == nil {
			_, err = r.ReadAt(make([]byte, 10), 0)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
		if n.Load() > 2 {
			t.Errorf("%s: asked %d times", want, n.Load())
		}
	}
	// A server that never comes back is given up for this time.
	r, n := server(t, b, func(n int64, w http.ResponseWriter, _ *http.Request) bool {
		if n > 1 {
			w.WriteHeader(http.StatusBadGateway)
		}
		return n > 1
	})
	if err := r.find(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.ReadAt(make([]byte, 10), 0); err == nil || n.Load() != 2+patience {
		t.Errorf("%v after %d", err, n.Load())
	}
	r.sleep = func(context.Context, time.Duration) error { return context.Canceled }
	if _, err := r.ReadAt(make([]byte, 10), 0); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// An image on a server is installed as one on a stick.
func TestInstallFromServer(t *testing.T) {
	r := newRoom(t, inventoryText, 8*gb)
	b, err := os.ReadFile(r.src.Image.Name)
	if err != nil {
		t.Fatal(err)
	}
	from, n := server(t, b, func(n int64, w http.ResponseWriter, _ *http.Request) bool {
		if n%5 == 0 {
			w.WriteHeader(http.StatusBadGateway)
		}
		return n%5 == 0
	})
	if err := from.find(); err != nil {
		t.Fatal(err)
	}
	r.src.Image = media.Source{Name: from.url, Remote: from, Size: from.size}
	if err := r.run(time.Hour); err != nil || r.ended != "poweroff" {
		t.Fatalf("%v %s\n%s", err, r.ended, strings.Join(r.said, "\n"))
	}
	if i := r.installed(r.disks[0].Path); i.Slot.Site == nil || i.Slot.Site.NodeName != "shop-1" {
		t.Errorf("%+v", i.Slot)
	}
	t.Logf("%d requests for %d bytes", n.Load(), len(b))

	// Somebody on the way changes the slot, which no golden digest covers.
	i, err := media.Inspect(r.disks[0].Path)
	if err != nil {
		t.Fatal(err)
	}
	r = newRoom(t, siteText, 8*gb)
	if b, err = os.ReadFile(r.src.Image.Name); err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(b, []byte("berlin-7")) // frames of the slot are stored raw
	if at < 0 {
		t.Fatalf("no Site in the file; the slot was %+v", i.Slot)
	}
	b[at] = 'B'
	from, _ = server(t, b, nil)
	if err := from.find(); err != nil {
		t.Fatal(err)
	}
	r.src.Image = media.Source{Name: from.url, Remote: from, Size: from.size}
	if err := r.run(5 * time.Minute); !errors.Is(err, errStopped) {
		t.Error(err)
	}
	r.want("FAILED: ")
	r.untouched(r.disks[0].Path)
}

// altered is an image with another content and the golden digest of that, as a
// compressed file with its own slot and one with the slot of the first.
func altered(t *testing.T, image string) (own, disguised []byte) {
	t.Helper()
	raw := filepath.Join(t.TempDir(), "altered.raw")
	g, err := media.OpenGolden(image)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	s, err := media.ReadImageSlot(media.Source{Name: image})
	if err != nil {
		t.Fatal(err)
	}
	i, err := media.Inspect(image)
	if err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(image)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	z, err := seekable.Open(in, g.Stored())
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	f, err := os.Create(raw)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	put := func(b []byte, off int64) {
		if _, err := f.WriteAt(b, off); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Truncate(i.Size); err != nil {
		t.Fatal(err)
	}
	for n := range z.Frames() {
		b, zero, err := z.Decode(n, nil)
		if err != nil {
			t.Fatal(err)
		}
		if !zero {
			put(b, z.Entry(n).Start)
		}
	}
	slotAt := int64(0)
	for _, p := range i.Partitions {
		switch p.Label {
		case ondisk.LabelRootA:
			put([]byte("something else"), p.Start+p.Size-4096)
		case ondisk.LabelSlot:
			slotAt = p.Start
		}
	}
	digest, err := disk.Digests(t.Context(), disk.Source{Read: func(buf []byte, off, n int64) ([]byte, bool, error) {
		_, err := f.ReadAt(buf[:n], off)
		return buf[:n], false, err
	}}, i.Image.Partitions)
	if err != nil {
		t.Fatal(err)
	}
	pack := func() []byte {
		g, err := media.OpenGolden(raw)
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		out := filepath.Join(t.TempDir(), "packed.raw.zst")
		w, err := os.Create(out)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		if err := g.Pack(t.Context(), w, nil); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	disguised = pack()
	s.Info.Golden, s.Info.Parts = digest.Golden, digest.Parts
	img, err := slot.Make(slot.Contents{Info: s.Info, Files: s.Files, Time: time.Unix(s.Info.Stamped, 0)})
	if err != nil {
		t.Fatal(err)
	}
	put(img, slotAt)
	return pack(), disguised
}

// A server that shows the right slot when it is looked at, and another image
// when that is written, is found out before anything is written.
func TestServerThatShowsTwoImages(t *testing.T) {
	r := newRoom(t, inventoryText, 8*gb)
	own, disguised := altered(t, r.src.Image.Name)
	if len(own) != len(disguised) {
		t.Fatalf("%d and %d bytes", len(own), len(disguised))
	}
	looking := true
	from, _ := server(t, disguised, func(_ int64, w http.ResponseWriter, q *http.Request) bool {
		if !looking {
			w.Header().Set("ETag", `"one"`)
			http.ServeContent(w, q, "image", time.Time{}, bytes.NewReader(own))
		}
		return !looking
	})
	if err := from.find(); err != nil {
		t.Fatal(err)
	}
	r.src.Image = media.Source{Name: from.url, Remote: from, Size: from.size}
	r.each = func(line string) {
		if strings.HasPrefix(line, "installing ") {
			looking = false
		}
	}
	if err := r.run(5 * time.Minute); !errors.Is(err, errStopped) {
		t.Errorf("%v %s\n%s", err, r.ended, strings.Join(r.said, "\n"))
	}
	r.want("FAILED: ", "the image is not the one that this installer was made for")
	r.untouched(r.disks[0].Path)
}
