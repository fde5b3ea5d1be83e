package installer

import (
	"bytes"
	"context"
	"errors"
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
	"github.com/edgebake/edgebake/builder/transfer"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/seekable"
	"github.com/edgebake/edgebake/ondisk/slot"
)

// server serves an image. each is called first and may send the response instead.
func server(t *testing.T, b []byte, each func(n int64, w http.ResponseWriter, r *http.Request) bool) (media.ImageSource, *atomic.Int64) {
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
	r, err := transfer.OpenRemote(t.Context(), s.URL, func(context.Context, time.Duration) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	return media.ImageSource{Name: s.URL, Remote: r, Size: r.Size()}, &n
}

// TestInstallFromServer installs from a server that fails some requests.
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
	r.src.Image = from
	if err := r.run(time.Hour); err != nil || r.ended != "poweroff" {
		t.Fatalf("%v %s\n%s", err, r.ended, strings.Join(r.said, "\n"))
	}
	if i := r.installed(r.disks[0].Path); i.Slot.Site == nil || i.Slot.Site.NodeName != "shop-1" {
		t.Errorf("%+v", i.Slot)
	}
	t.Logf("%d requests for %d bytes", n.Load(), len(b))

	// The slot is changed in transit, which no golden digest detects.
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
	r.src.Image = from
	if err := r.run(5 * time.Minute); !errors.Is(err, errStopped) {
		t.Error(err)
	}
	r.want("FAILED: ")
	r.untouched(r.disks[0].Path)
}

// altered returns two compressed files of an image with other content. The slot of own has the
// golden digest of that content; disguised has the slot of the original image.
func altered(t *testing.T, image string) (own, disguised []byte) {
	t.Helper()
	raw := filepath.Join(t.TempDir(), "altered.raw")
	g, err := media.Open(image)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	s, err := media.ReadImageSlot(media.ImageSource{Name: image})
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
		g, err := media.Open(raw)
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

// TestServerThatShowsTwoImages uses a server that first sends the right slot and then, during the
// installation, another image. Nothing may be written.
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
	r.src.Image = from
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
