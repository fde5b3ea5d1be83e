package fetch

import (
	"bytes"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

// TestEndlessDownload checks that a mirror that sends without end does not fill the disk, and that
// the next mirror is tried.
func TestEndlessDownload(t *testing.T) {
	const limit = 1 << 20
	good := bytes.Repeat([]byte("x"), limit)
	var sent atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("/endless", func(w http.ResponseWriter, _ *http.Request) {
		for b := make([]byte, 64<<10); ; {
			n, err := w.Write(b)
			if sent.Add(int64(n)); err != nil {
				return
			}
		}
	})
	mux.HandleFunc("/announced", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "99999999999")
		w.WriteHeader(http.StatusOK)
	})
	mux.HandleFunc("/longer", func(w http.ResponseWriter, _ *http.Request) { w.Write(append(good[:limit:limit], 'y')) })
	mux.HandleFunc("/good", func(w http.ResponseWriter, _ *http.Request) { w.Write(good) })
	srv := httptest.NewServer(mux)
	defer srv.Close()
	for path, want := range map[string]string{
		"/endless":   "the file is too large (more than 1 MiB)",
		"/announced": "the file is too large (95367.4 MiB, and the limit is 1 MiB)",
		"/longer":    "the file is too large (more than 1 MiB)",
		"/good":      "",
	} {
		dir := t.TempDir()
		c := open(t, dir)
		_, err := Download(t.Context(), c, []string{srv.URL + path}, sum(good), limit, nil)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", path, err)
		}
		kept := int64(0)
		_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, _ error) error {
			if i, err := d.Info(); err == nil && i.Mode().IsRegular() {
				kept += i.Size()
			}
			return nil
		})
		if want != "" && kept > 4096 {
			t.Errorf("%s: the cache has %d bytes", path, kept)
		}
	}
	if n := sent.Load(); n > 64<<20 {
		t.Errorf("%d MiB were taken", n>>20)
	}
	c := open(t, t.TempDir())
	if sha, err := Download(t.Context(), c, []string{srv.URL + "/endless", srv.URL + "/good"}, sum(good), limit, nil); err != nil || sha != sum(good) {
		t.Errorf("the next mirror: %v", err)
	}
}
