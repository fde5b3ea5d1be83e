package host

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot/machine"
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

// TestGetRemote checks that a URL that is not trusted leads to no loopback or link-local address,
// directly, by a name or by a redirect.
func TestGetRemote(t *testing.T) {
	asked := 0
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked++ }))
	defer s.Close()
	port := s.Listener.Addr().(*net.TCPAddr).Port
	remote := &downloads{remote: true}
	for _, host := range []string{"127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]", "169.254.169.254", "[fe80::1]", "[fe80::1%25lo]"} {
		for _, proxy := range [][]string{nil, {"HTTP_PROXY=http://192.0.2.1:3128"}} {
			_, err := remote.get(t.Context(), fmt.Sprintf("http://%s:%d/x", host, port), http.Header{}, proxy)
			if !errors.Is(err, machine.ErrLocal) || !strings.Contains(err.Error(), "loopback and link-local addresses are rejected") {
				t.Errorf("%s, proxy %v: %v", host, proxy, err)
			}
		}
	}
	if asked > 0 {
		t.Errorf("%d requests arrived", asked)
	}
	// The Site's proxy may be on the machine.
	resp, err := remote.get(t.Context(), "http://images.example.com/x", http.Header{}, []string{"HTTP_PROXY=" + s.URL})
	if err != nil || resp.Body.Close() != nil || asked != 1 {
		t.Errorf("through the proxy: %v", err)
	}
	redirect := httptest.NewServer(http.RedirectHandler("http://169.254.169.254/latest", http.StatusFound))
	defer redirect.Close()
	if _, err := remote.get(t.Context(), "http://images.example.com/x", http.Header{}, []string{"HTTP_PROXY=" + redirect.URL}); !errors.Is(err, machine.ErrLocal) {
		t.Errorf("a redirect: %v", err)
	}
}

// TestRedirectAuthorization checks that a redirect to another port gets no Authorization, and one to the
// same server does.
func TestRedirectAuthorization(t *testing.T) {
	got := ""
	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r.Header.Get("Authorization") }))
	defer other.Close()
	var first *httptest.Server
	first = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/other":
			http.Redirect(w, r, other.URL, http.StatusFound)
		case "/own":
			http.Redirect(w, r, first.URL+"/end", http.StatusFound)
		case "/end":
			got = r.Header.Get("Authorization")
		}
	}))
	defer first.Close()
	for path, want := range map[string]string{"/other": "", "/own": "Bearer SECRET"} {
		got = "none"
		resp, err := new(downloads).get(t.Context(), first.URL+path, http.Header{"Authorization": {"Bearer SECRET"}}, nil)
		if err != nil || resp.Body.Close() != nil || got != want {
			t.Errorf("%s: %q, %v", path, got, err)
		}
	}
}
