package host

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
)

func TestOpenDevice(t *testing.T) {
	p := filepath.Join(t.TempDir(), "spool")
	if _, err := openDevice(p, false); !os.IsNotExist(err) {
		t.Errorf("a file that is not there: %v", err)
	}
	d, err := openDevice(p, true)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, err := d.WriteAt([]byte("chunk"), 4096); err != nil {
		t.Fatal(err)
	}
	if err := d.Sync(); err != nil {
		t.Error(err)
	}
	if n, err := d.Size(); n != 4101 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if st, err := os.Stat(p); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	link := p + ".link"
	if err := os.Symlink(p, link); err != nil {
		t.Fatal(err)
	}
	if _, err := openDevice(link, true); err == nil {
		t.Error("a link was followed")
	}
	r, err := openDevice(p, false)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := r.WriteAt([]byte("x"), 0); err == nil {
		t.Error("a device that was opened for reading was written")
	}
}

func TestGet(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/" {
			http.Redirect(w, r, "/image", http.StatusFound)
			return
		}
		if r.Header.Get("Range") != "bytes=0-4" {
			t.Errorf("the range is %q", r.Header.Get("Range"))
		}
		w.WriteHeader(http.StatusPartialContent)
		io.WriteString(w, "hello")
	}))
	defer s.Close()
	resp, err := new(downloads).get(t.Context(), s.URL, http.Header{"Range": {"bytes=0-4"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil || string(b) != "hello" || resp.StatusCode != http.StatusPartialContent {
		t.Errorf("%q, %s, %v", b, resp.Status, err)
	}
	if err := resp.Body.Close(); err != nil {
		t.Error(err)
	}
	if _, err := new(downloads).get(t.Context(), "http://127.0.0.1:1/x", nil, nil); err == nil || !strings.Contains(err.Error(), "http://127.0.0.1:1/x") {
		t.Error(err)
	}
}

// TestGetKeepsConnection checks that several ranges of a file come over one connection, also if each
// is read only to its last byte.
func TestGetKeepsConnection(t *testing.T) {
	var opened atomic.Int32
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader("0123456789"))
	}))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			opened.Add(1)
		}
	}
	s.Start()
	defer s.Close()
	var d downloads
	for _, span := range []string{"0-4", "5-9", "2-6"} {
		resp, err := d.get(t.Context(), s.URL, http.Header{"Range": {"bytes=" + span}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 5)
		if _, err := io.ReadFull(resp.Body, b); err != nil || string(b) != "0123456789"[span[0]-'0':][:5] {
			t.Errorf("%s: %q, %v", span, b, err)
		}
		if err := resp.Body.Close(); err != nil {
			t.Error(err)
		}
	}
	if n := opened.Load(); n != 1 {
		t.Errorf("%d connections", n)
	}
}

// TestRedirect checks that a download by HTTPS is not redirected to plain HTTP.
func TestRedirect(t *testing.T) {
	asked := 0
	plain := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked++ }))
	defer plain.Close()
	secure := httptest.NewTLSServer(http.RedirectHandler(plain.URL, http.StatusFound))
	defer secure.Close()
	c := new(downloads).client(nil)
	c.Transport = secure.Client().Transport
	if resp, err := c.Get(secure.URL); !errors.Is(err, errPlain) || !errors.Is(err, machine.ErrRedirect) || asked > 0 {
		t.Errorf("%v, %v; asked %d times", resp, err, asked)
	}
	if resp, err := c.Get(plain.URL); err != nil || resp.Body.Close() != nil || asked != 1 {
		t.Errorf("%v; asked %d times", err, asked)
	}
}

// TestTalking checks that a server that stops in the middle of a response does not block the
// machine forever.
func TestTalking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, w := io.Pipe()
		timer := time.AfterFunc(silence, func() { w.CloseWithError(io.ErrUnexpectedEOF) })
		body := &stallReader{r, timer, func() error { return nil }, func() {}}
		go func() {
			for range 5 {
				time.Sleep(silence * 2 / 3)
				w.Write([]byte("x"))
			}
		}()
		b, err := io.ReadAll(body)
		if string(b) != "xxxxx" || err != io.ErrUnexpectedEOF {
			t.Errorf("%q, %v", b, err)
		}
		body.Close()
	})
}
