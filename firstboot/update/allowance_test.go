package update

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk/order"
	format "github.com/edgebake/edgebake/ondisk/update"
)

// spoil returns a server that damages the second chunk of each answer, so that the chunk and the
// image's description are requested again each time.
func spoil(t *testing.T, l *slowLine) func(context.Context, string, http.Header, []string) (*http.Response, error) {
	t.Helper()
	image, err := format.Open(bytes.NewReader(l.image), int64(len(l.image)))
	if err = errors.Join(err, image.Decode()); err != nil {
		t.Fatal(err)
	}
	ends := map[int64]int64{}
	for i := range image.Index.Parts {
		p := &image.Index.Parts[i]
		for k := range p.Chunks {
			x := image.Place(p, k)
			ends[x.From] = x.To
		}
	}
	good := l.image
	return func(ctx context.Context, u string, h http.Header, p []string) (*http.Response, error) {
		var from, to int64
		l.image = good
		if _, err := fmt.Sscanf(h.Get("Range"), "bytes=%d-%d", &from, &to); err == nil {
			if end, ok := ends[from]; ok && end < to {
				l.image = bytes.Clone(good)
				l.image[(end+ends[end])/2] ^= 0xff
			}
		}
		return l.get(ctx, u, h, p)
	}
}

// TestMaxBytes checks that the update downloads at most --max-bytes, whatever the server does. The
// image's description counts each time, and so do requests and answers that are not read to their
// end.
func TestMaxBytes(t *testing.T) {
	for most := int64(256 << 10); most <= 64<<20; most *= 2 {
		b := newBox(t)
		l := newLine(b, "new.raw.zst")
		e := b.env()
		e.Get = spoil(t, l)
		err := Update(t.Context(), e, Options{Image: imageURL, MaxBytes: most}, func(run.Step) {})
		if l.sent > most {
			t.Errorf("of %d bytes %d were sent in %d requests: %v", most, l.sent, l.requests, err)
		}
		if tooDamaged := errors.Is(err, errDamaged); tooDamaged != (most >= 16<<20) || !tooDamaged && !strings.Contains(err.Error(), "--max-bytes allows") {
			t.Errorf("%d bytes: %v", most, err)
		}
	}
}

// TestMaxBytesSurvivesPowerCuts checks that an order's limit applies to all of its attempts
// together, even after power cuts. The record never shows less than was downloaded.
func TestMaxBytesSurvivesPowerCuts(t *testing.T) {
	b := newOrdered(t)
	b.give("max-bytes=100M")
	b.must()
	all, whole := b.effects, b.images.sent
	cuts := 12
	if testing.Short() {
		cuts = 4
	}
	for i := 1; i <= cuts; i++ {
		b := newOrdered(t)
		most := (whole + whole/8) / 1000 * 1000
		b.give(fmt.Sprintf("max-bytes=%dk", most/1000))
		recorded := func() int64 {
			var r orderRecord
			if err := json.Unmarshal([]byte(b.get(OrderFile)), &r); err != nil {
				t.Fatal(err)
			}
			return r.Fetched
		}
		for range 2 * maxTries {
			b.effects, b.cut, b.rebooted = 0, max(3, all*i/cuts-i%2), false
			err := b.run()
			b.cut = 0
			if s := recorded(); s < b.images.sent || s > most {
				t.Errorf("cut at %d of %d: %d bytes are recorded, %d were sent of %d", all*i/cuts, all, s, b.images.sent, most)
			}
			os.RemoveAll(filepath.Join(b.root, "run"))
			b.put("run/x", "")
			b.bootable()
			if err == nil {
				break
			}
		}
		if b.images.sent > most {
			t.Errorf("cut at %d of %d: %d bytes were sent of %d", all*i/cuts, all, b.images.sent, most)
		}
	}
}

// TestMaxBytesAfterOneCut checks that an order can use the rest of its limit after a power cut,
// minus one reservation.
func TestMaxBytesAfterOneCut(t *testing.T) {
	b := newOrdered(t)
	b.give("max-bytes=8M")
	b.cut = 40
	_ = b.run()
	b.cut, b.effects = 0, 0
	if b.entry() || b.images.sent == 0 {
		t.Fatalf("%d bytes were sent", b.images.sent)
	}
	os.RemoveAll(filepath.Join(b.root, "run"))
	b.put("run/x", "")
	b.must()
	b.updated()
	b.says(order.StateRestarting, "")
}

// TestMaxBytesOfAWithdrawnOrder checks that an order that is withdrawn or halted and then given again keeps its
// limit: what was fetched before still counts.
func TestMaxBytesOfAWithdrawnOrder(t *testing.T) {
	b := newOrdered(t)
	for range 6 {
		b.give("hold", "max-bytes=8M")
		b.must()
		delete(b.annotations, order.AnnotationOrder)
		b.must()
		b.says(order.StateWithdrawn, "withdrawn or changed")
	}
	var r orderRecord
	if err := json.Unmarshal([]byte(b.get(OrderFile)), &r); err != nil || r.Fetched < b.images.sent {
		t.Errorf("%d bytes are recorded, %d were sent, %v", r.Fetched, b.images.sent, err)
	}
}
