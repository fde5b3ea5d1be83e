package transfer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// server serves b. each, if set, is called first, and returns true if it has responded instead.
func server(t *testing.T, b []byte, each func(n int64, w http.ResponseWriter, r *http.Request) bool) (*Remote, *atomic.Int64) {
	t.Helper()
	var n atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if i := n.Add(1); each != nil && each(i, w, r) {
			return
		}
		w.Header().Set("ETag", fmt.Sprintf(`"%d"`, n.Load()%2)) // changes, as if two servers had the same name
		http.ServeContent(w, r, "image", time.Time{}, bytes.NewReader(b))
	}))
	t.Cleanup(s.Close)
	r := &Remote{ctx: t.Context(), http: s.Client(), url: s.URL, sleep: func(context.Context, time.Duration) error { return nil }}
	return r, &n
}

func noise(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

// TestRemote checks that reading continues from the same byte after an interruption, and that
// requests are repeated while the server is down.
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
		case n > 1 && n < 9: // the connection ends after a part
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

// TestRemoteRefuses checks that a response is an error if it has a range that was not requested, or
// if the file has changed.
func TestRemoteRefuses(t *testing.T) {
	b := noise(1 << 10)
	for want, each := range map[string]func(n int64, w http.ResponseWriter, q *http.Request) bool{
		"does not support range requests": func(_ int64, w http.ResponseWriter, _ *http.Request) bool { _, _ = w.Write(b); return true },
		"404 Not Found":                   func(_ int64, w http.ResponseWriter, q *http.Request) bool { http.NotFound(w, q); return true },
		"responded with the range": func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Range", "bytes 5-9/*")
			w.WriteHeader(http.StatusPartialContent)
			return true
		},
		"has changed": func(n int64, w http.ResponseWriter, q *http.Request) bool {
			if n == 1 {
				return false
			}
			http.ServeContent(w, q, "image", time.Time{}, bytes.NewReader(b[1:]))
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
	// If the server stays down, ReadAt fails after patience + 1 requests. The request before them
	// is from find.
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

// answer is a server with one response to the first request, and another to all later requests.
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

// FuzzContentRange reads from a server with any responses. The bytes must be those that the server
// sent for the requested range, and within the size that it reported.
func FuzzContentRange(f *testing.F) {
	f.Add("bytes 0-0/9", "bytes 3-8/9", []byte("abcdef"), int64(3), uint8(6))
	f.Add("bytes 0-0/9", "bytes 2-8/9", []byte("abcdef"), int64(3), uint8(6))
	f.Add("bytes 0-0/9223372036854775807", "bytes 9223372036854775806-/9223372036854775807", []byte("a"), int64(9223372036854775806), uint8(255))
	f.Add("bytes */9", "bytes 0-0/*", []byte(nil), int64(0), uint8(1))
	f.Add("bytes 0-0/-1", "0/1", []byte("a"), int64(-1), uint8(1))
	f.Fuzz(func(t *testing.T, first, then string, body []byte, off int64, want uint8) {
		s := &answer{first, then, body, 0}
		r := &Remote{ctx: t.Context(), http: &http.Client{Transport: s}, url: "http://192.0.2.1/x", sleep: func(context.Context, time.Duration) error { return nil }}
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
