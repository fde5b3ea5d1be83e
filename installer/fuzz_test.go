package installer

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/edgebake/edgebake/builder/disk/gpt"
	"github.com/edgebake/edgebake/builder/media"
)

// answer is a server of two answers: one for the first byte, one for all after it.
type answer struct {
	first, then string
	body        []byte
	asked       int
}

func (a *answer) RoundTrip(*http.Request) (*http.Response, error) {
	a.asked++
	span := a.then
	if a.asked == 1 {
		span = a.first
	}
	return &http.Response{
		StatusCode: http.StatusPartialContent, Header: http.Header{"Content-Range": {span}},
		Body: io.NopCloser(bytes.NewReader(a.body)),
	}, nil
}

// FuzzContentRange reads from a server with answers of any content: what is read is what
// the server sent for the place that was asked for, and within the size that it named.
func FuzzContentRange(f *testing.F) {
	f.Add("bytes 0-0/9", "bytes 3-8/9", []byte("abcdef"), int64(3), uint8(6))
	f.Add("bytes 0-0/9", "bytes 2-8/9", []byte("abcdef"), int64(3), uint8(6))
	f.Add("bytes 0-0/9223372036854775807", "bytes 9223372036854775806-/9223372036854775807", []byte("a"), int64(9223372036854775806), uint8(255))
	f.Add("bytes */9", "bytes 0-0/*", []byte(nil), int64(0), uint8(1))
	f.Add("bytes 0-0/-1", "0/1", []byte("a"), int64(-1), uint8(1))
	f.Fuzz(func(t *testing.T, first, then string, body []byte, off int64, want uint8) {
		s := &answer{first, then, body, 0}
		r := &remote{ctx: t.Context(), http: &http.Client{Transport: s}, url: "http://192.0.2.1/x", sleep: func(context.Context, time.Duration) error { return nil }}
		if err := r.find(); err != nil {
			return
		}
		if r.size <= 0 || off < 0 {
			if r.size <= 0 {
				t.Errorf("a size of %d from %q", r.size, first)
			}
			return
		}
		p := make([]byte, want)
		n, err := r.ReadAt(p, off)
		if int64(n) > max(0, r.size-off) {
			t.Errorf("%d bytes at %d of %d", n, off, r.size)
		}
		if n == len(p) && n > 0 && err == nil && !strings.HasPrefix(string(body), string(p)) && s.asked == 2 {
			t.Errorf("%q was read of %q", p, body)
		}
		if s.asked > patience+3 {
			t.Errorf("asked %d times", s.asked)
		}
	})
}

// FuzzVolume reads the name of an ISO 9660 volume from a device of any content.
func FuzzVolume(f *testing.F) {
	head := append([]byte("\x01CD001\x01\x00"+strings.Repeat(" ", 32)+"EDGEBAKE_0123456789ABCDEF"), bytes.Repeat([]byte(" "), 7)...)
	f.Add(head)
	f.Add(append(bytes.Clone(head), make([]byte, 2048)...))
	f.Add([]byte("\x01CD001"))
	f.Add([]byte{})
	dev := filepath.Join(f.TempDir(), "sr0")
	f.Fuzz(func(t *testing.T, descriptor []byte) {
		if err := os.WriteFile(dev, append(make([]byte, 16*2048), descriptor...), 0o600); err != nil {
			t.Fatal(err)
		}
		name := volumeOf(dev)
		if len(name) > 32 || strings.HasSuffix(name, " ") || name != "" && (len(descriptor) < 2048 || !bytes.Contains(descriptor, []byte(name))) {
			t.Errorf("%q", name)
		}
	})
}

// FuzzBootNext has the firmware show variables of any content: the installer starts what
// it has written, and changes no entry that was there.
func FuzzBootNext(f *testing.F) {
	found := media.Found{ESPNumber: 1, ESP: gpt.Partition{GUID: "0fc63daf-8483-4772-8e79-3d69d8477de4", Start: 1 << 20, Size: 64 << 20}, Sector: 512}
	option, err := loadOption(found, "amd64")
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte("\x07\x00\x00\x00\x01"), append([]byte{7, 0, 0, 0}, option...))
	f.Add([]byte{}, []byte{7})
	f.Fuzz(func(t *testing.T, first, second []byte) {
		dir := t.TempDir()
		name := func(v string) string { return filepath.Join(dir, v+"-"+efiGlobal) }
		for v, b := range map[string][]byte{"Boot0000": first, "Boot0001": second} {
			if err := os.WriteFile(name(v), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := bootNext(dir, "amd64", found); err != nil {
			t.Fatal(err)
		}
		next, err := os.ReadFile(name("BootNext"))
		if err != nil || len(next) != 6 || next[4] > 2 || next[5] != 0 {
			t.Fatalf("%x %v", next, err)
		}
		entry, err := os.ReadFile(name("Boot000" + string('0'+rune(next[4]))))
		if err != nil || len(entry) < 4 || !bytes.Equal(entry[4:], option) {
			t.Errorf("started is %x %v", entry, err)
		}
		for v, b := range map[string][]byte{"Boot0000": first, "Boot0001": second} {
			if now, err := os.ReadFile(name(v)); err != nil || !bytes.Equal(now, b) {
				t.Errorf("%s was %x, is %x %v", v, b, now, err)
			}
		}
	})
}

// FuzzGUID: a GUID is sixteen bytes, whatever its text.
func FuzzGUID(f *testing.F) {
	f.Add("0fc63daf-8483-4772-8e79-3d69d8477de4")
	f.Add("-")
	f.Fuzz(func(t *testing.T, s string) {
		if b, err := efiGUID(s); err == nil && len(b) != 16 {
			t.Errorf("%x", b)
		}
		if b := ucs2(s); len(b)%2 != 0 || len(b) < 2 || utf8.ValidString(s) && len(b) < 2*utf8.RuneCountInString(s)+2 {
			t.Errorf("%x", b)
		}
	})
}
