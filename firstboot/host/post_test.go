package host

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestGetKeepsSecrets checks that the error of a download contains neither the URL of a redirect,
// whose query may be a secret, nor the query of the requested URL.
func TestGetKeepsSecrets(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "http://127.0.0.1:1/bucket/x.raw.zst?X-Amz-Signature=SECRET", http.StatusFound)
	}))
	defer s.Close()
	for _, address := range []string{s.URL + "/x.raw.zst?key=SECRET", "http://127.0.0.1:1/x.raw.zst?key=SECRET", "http://a:SECRET@127.0.0.1:1/x.raw.zst"} {
		_, err := new(downloads).get(t.Context(), address, http.Header{}, nil)
		if err == nil || strings.Contains(err.Error(), "SECRET") || !strings.Contains(err.Error(), "/x.raw.zst: ") {
			t.Errorf("%s: %v", address, err)
		}
	}
}

// TestGetLargeHeader checks that a download rejects a response with a large header.
func TestGetLargeHeader(t *testing.T) {
	size := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X", strings.Repeat("x", size))
	}))
	defer s.Close()
	var d downloads
	for _, size = range []int{maxHeader / 2, 2 * maxHeader} {
		resp, err := d.get(t.Context(), s.URL, http.Header{}, nil)
		if (err == nil) != (size < maxHeader) {
			t.Errorf("a header of %d bytes: %v", size, err)
		}
		if err == nil {
			resp.Body.Close()
		}
	}
}

// TestPostKeepsSecrets checks that the error of sending a report contains neither the URL of a
// redirect nor the query of the requested URL.
func TestPostKeepsSecrets(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/leads":
			http.Redirect(w, r, "https://127.0.0.1:1/x?key=SECRET", http.StatusFound)
		default:
			w.WriteHeader(http.StatusTeapot)
		}
	}))
	defer s.Close()
	for _, address := range []string{s.URL + "/leads?key=SECRET", s.URL + "/rejects?key=SECRET", "https://127.0.0.1:1/x?key=SECRET", "http://a:SECRET@127.0.0.1:1/x", "https://%zz?key=SECRET"} {
		err := post(t.Context(), *s.Client(), address, nil)
		if err == nil || strings.Contains(err.Error(), "SECRET") || !strings.HasPrefix(err.Error(), "sending to ") {
			t.Errorf("%s: %v", address, err)
		}
	}
}
