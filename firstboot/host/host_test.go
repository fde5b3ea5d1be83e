package host

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
)

func TestWriteFile(t *testing.T) {
	f := Files{Root: t.TempDir()}
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	if err := f.WriteFile("/a/b/c", []byte("one"), machine.Mode(0o644)); err != nil {
		t.Fatal(err)
	}
	for p, want := range map[string]os.FileMode{"a": 0o755, "a/b": 0o755, "a/b/c": 0o644} {
		st, err := os.Stat(filepath.Join(f.Root, p))
		if err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", p, st.Mode(), err)
		}
	}
	// A file that a power cut left is overwritten, and a link is replaced, not followed.
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(f.Root, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(f.Root, ".link.edgebake-new"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := f.WriteFile("/link", []byte("two"), machine.Mode(0o4755)); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(outside); string(b) != "mine" {
		t.Errorf("the link was followed: %s", b)
	}
	entries, err := os.ReadDir(f.Root)
	if err != nil || len(entries) != 2 {
		t.Errorf("left over: %v, %v", entries, err)
	}
	// A temporary file that is a link is removed, not written through.
	if err := os.Symlink(outside, filepath.Join(f.Root, ".x.edgebake-new")); err != nil {
		t.Fatal(err)
	}
	if err := f.WriteFile("/x", []byte("three"), machine.Mode(0o600)); err != nil {
		t.Error(err)
	}
	if b, _ := os.ReadFile(outside); string(b) != "mine" {
		t.Errorf("the planted link was followed: %s", b)
	}
}

func TestLinksAndRemove(t *testing.T) {
	f := Files{Root: t.TempDir()}
	if err := f.WriteFile("/file", []byte("x"), machine.Mode(0o600)); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time, the links already exist
		if err := f.Symlink("/file", "/sub/link"); err != nil {
			t.Fatal(err)
		}
		if err := f.Link("/file", "/hard"); err != nil {
			t.Fatal(err)
		}
		if err := f.Mkdir("/dir", machine.Mode(0o750)); err != nil {
			t.Fatal(err)
		}
	}
	if to, err := os.Readlink(filepath.Join(f.Root, "sub/link")); err != nil || to != "/file" {
		t.Errorf("%s, %v", to, err)
	}
	if err := f.WriteFile("/dir/in", nil, machine.Mode(0o600)); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"/dir", "/nowhere", "/file/below", "/hard", "/sub/link"} {
		if err := f.Remove(p); err != nil {
			t.Errorf("removing %s: %v", p, err)
		}
	}
	if _, err := os.Stat(filepath.Join(f.Root, "dir/in")); err != nil {
		t.Error("a directory that was not empty is gone")
	}
	if err := f.RemoveAll("/dir"); err != nil {
		t.Error(err)
	}
	if err := f.RemoveAll("/no/where"); err != nil {
		t.Error(err)
	}
}

func TestRun(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), machine.Cmd{Args: []string{"sh", "-c", "echo $A; echo err >&2"}, Env: []string{"A=b"}, Output: &out}); err != nil || out.String() != "b\nerr\n" {
		t.Errorf("%q, %v", out.String(), err)
	}
	err := run(t.Context(), machine.Cmd{Args: []string{"sh", "-c", "echo why >&2; exit 3"}})
	if err == nil || !strings.Contains(err.Error(), "exit status 3: why") {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := run(ctx, machine.Cmd{Args: []string{"sleep", "60"}}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestBoot(t *testing.T) {
	if at := initRecord("6,339,5140900,-;Run /init as init process\n"); at != 5.1409 {
		t.Errorf("it was run at %v", at)
	}
	for _, other := range []string{"6,340,5140900,-;Run /init\n", "6;Run /init as init process", "", "6,1,x,-;Run /init as init process"} {
		if at := initRecord(other); at != 0 {
			t.Errorf("%q: %v", other, at)
		}
	}
	if at := kernelReady(filepath.Join(t.TempDir(), "none")); at != 0 {
		t.Errorf("without a log: %v", at)
	}
	if got := boot(24.1, 4, 6.1); got != "up for 24.1 s (kernel 4.0, initrd 2.1, system 18.0)" {
		t.Error(got)
	}
	if got := boot(24.1, 0, 6.1); got != "up for 24.1 s" {
		t.Error(got)
	}
}

// TestReadClock reads properties as systemd's manager prints them.
func TestReadClock(t *testing.T) {
	said := map[string]string{
		"FirmwareTimestampMonotonic": "@t 4093210", "LoaderTimestampMonotonic": "@t 513370", "KernelTimestamp": "@t 1767225600000000",
		"InitRDTimestampMonotonic": "@t 0", "UserspaceTimestampMonotonic": "@t 6100000", "FinishTimestampMonotonic": "@t 24000000",
	}
	var c ondisk.BootClock
	if err := readClock(func(name string) (string, error) { return said[name], nil }, &c); err != nil {
		t.Fatal(err)
	}
	if want := (ondisk.BootClock{Firmware: 4093210, Loader: 513370, Kernel: 1767225600000000, Userspace: 6100000, Finish: 24000000}); c != want {
		t.Errorf("%+v", c)
	}
	said["LoaderTimestampMonotonic"] = "soon"
	if err := readClock(func(name string) (string, error) { return said[name], nil }, &c); err == nil || !strings.Contains(err.Error(), `LoaderTimestampMonotonic: unexpected answer "soon"`) {
		t.Errorf("%v", err)
	}
}

func TestFSUUID(t *testing.T) {
	img := make([]byte, 4096)
	img[1024+0x38], img[1024+0x39] = 0x53, 0xef
	copy(img[1024+0x68:], "0123456789abcdef")
	p := filepath.Join(t.TempDir(), "fs")
	if err := os.WriteFile(p, img, 0o600); err != nil {
		t.Fatal(err)
	}
	if u, err := fsUUID(p); err != nil || string(u[:]) != "0123456789abcdef" {
		t.Errorf("%q, %v", u, err)
	}
	if err := os.WriteFile(p, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := fsUUID(p); err == nil {
		t.Error("zeros were read as an ext4 file system")
	}
}

// TestPost sends reports to a server on loopback as first boot does.
func TestPost(t *testing.T) {
	var got []string
	mux := http.NewServeMux()
	srv := httptest.NewTLSServer(mux)
	defer srv.Close()
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	mux.HandleFunc("POST /nodes", func(_ http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		got = append(got, r.Header.Get("Content-Type")+" "+string(b))
	})
	mux.Handle("/moved", http.RedirectHandler("/nodes", http.StatusTemporaryRedirect))
	mux.Handle("/plain", http.RedirectHandler("http://127.0.0.1:1/nodes", http.StatusTemporaryRedirect))
	mux.Handle("/round", http.RedirectHandler("/round", http.StatusTemporaryRedirect))
	mux.HandleFunc("/broken", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusInternalServerError) })

	body := []byte(`{"result":"done"}`)
	for _, c := range []struct {
		name, url string
		client    *http.Client
		want      string // of the error; empty: it arrives
	}{
		{"it arrives", srv.URL + "/nodes", srv.Client(), ""},
		{"the server has moved", srv.URL + "/moved", srv.Client(), ""},
		{"the server is broken", srv.URL + "/broken", srv.Client(), "it answered 500"},
		{"in the clear", "http://127.0.0.1:1/", srv.Client(), "only https"},
		{"led into the clear", srv.URL + "/plain", srv.Client(), "only https"},
		{"led in a circle", srv.URL + "/round", srv.Client(), "more than ten redirects"},
		{"a stranger's certificate", srv.URL + "/nodes", &http.Client{}, "certificate"},
	} {
		got = nil
		err := post(t.Context(), *c.client, c.url, body)
		if c.want != "" {
			if err == nil || !strings.Contains(err.Error(), c.want) || len(got) > 0 {
				t.Errorf("%s: %v, the server got %q", c.name, err, got)
			}
			continue
		}
		if err != nil || !slices.Equal(got, []string{"application/json " + string(body)}) {
			t.Errorf("%s: %v, the server got %q", c.name, err, got)
		}
	}
}

// TestPostTrusts checks that with report.caCert only its certificates are trusted, and an invalid
// one prevents the report.
func TestPostTrusts(t *testing.T) {
	srv := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer srv.Close()
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	own := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}))
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	other := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	for _, c := range []struct{ name, ca, want string }{{"its own", own, ""}, {"another", other, "certificate"}, {"none", "", "certificate"}, {"junk", "x", "caCert"}} {
		err := New(io.Discard).Post(t.Context(), srv.URL, c.ca, []byte("{}"), nil)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestPostThroughTheProxy checks that reports go through the Site's proxy, unless its exceptions
// include the server.
func TestPostThroughTheProxy(t *testing.T) {
	got := 0
	srv := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { got++ }))
	defer srv.Close()
	var asked []string
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.Host)
		up, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Error(err)
			return
		}
		defer up.Close()
		// Written by hand: with net/http, a part of the header may
		// follow after the connection was hijacked.
		down, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer down.Close()
		if _, err := io.WriteString(down, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
			t.Error(err)
			return
		}
		go func() { _, _ = io.Copy(up, down) }() // ends with the connection
		_, _ = io.Copy(down, up)
	}))
	defer proxy.Close()
	env := []string{"HTTPS_PROXY=" + proxy.URL, "NO_PROXY=localhost,.shop.example,192.0.2.0/24"}
	tr := through(env)
	tr.TLSClientConfig = srv.Client().Transport.(*http.Transport).TLSClientConfig
	if err := post(t.Context(), http.Client{Transport: tr}, "https://example.com/nodes", []byte("{}")); err != nil {
		t.Fatal(err)
	}
	if got != 1 || !slices.Equal(asked, []string{"CONNECT example.com:443"}) {
		t.Errorf("%d reports, the proxy was asked for %s", got, asked)
	}
	for target, direct := range map[string]bool{"https://report.shop.example/": true, "https://192.0.2.9/": true, "https://198.51.100.9/": false} {
		req := httptest.NewRequest(http.MethodPost, target, nil)
		if u, err := through(env).Proxy(req); err != nil || (u == nil) != direct {
			t.Errorf("%s: by way of %v, %v", target, u, err)
		}
	}
	if u, err := through(nil).Proxy(httptest.NewRequest(http.MethodPost, "https://example.com/", nil)); u != nil || err != nil {
		t.Errorf("without a proxy: %v, %v", u, err)
	}
}

// TestSlotFile checks that a file is read from a slot in which its blocks need not be contiguous.
func TestSlotFile(t *testing.T) {
	img, err := slot.Make(slot.Contents{Info: ondisk.SlotInfo{Version: 1}, Files: map[string][]byte{ondisk.SlotSite: bytes.Repeat([]byte("site: text\n"), 900)}})
	if err != nil {
		t.Fatal(err)
	}
	dev := filepath.Join(t.TempDir(), "stick")
	if err := os.WriteFile(dev, img, 0o600); err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if err := slotFile(dev, ondisk.SlotSite, &got); err != nil || got.String() != strings.Repeat("site: text\n", 900) {
		t.Errorf("%v: %d bytes", err, got.Len())
	}
	if err := slotFile(dev, "none", &got); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
}

// TestFreeSpaceNamesThePath checks that an error names the directory whose file system was queried.
func TestFreeSpaceNamesThePath(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none")
	for name, query := range map[string]func(string) (int64, error){"size": fsSize, "free": fsFree} {
		if _, err := query(none); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), none) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
