package ipvs

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgebake/edgebake/test/desk"
)

// quietPair is both ends of a TCP connection on loopback, the near one quiet.
func quietPair(t *testing.T) (near *quietConn, far *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	f, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); f.Close() })
	q := quiet(c)
	if q == nil {
		t.Fatal("a TCP connection cannot be made quiet")
	}
	return q, f.(*net.TCPConn)
}

func TestQuietConn(t *testing.T) {
	near, far := quietPair(t)
	if _, err := near.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 16)
	if n, err := far.Read(b); err != nil || string(b[:n]) != "ping" {
		t.Fatalf("%q %v", b[:n], err)
	}
	go func() { time.Sleep(20 * time.Millisecond); far.Write([]byte("pong")) }() // it has to wait
	if n, err := near.Read(b); err != nil || string(b[:n]) != "pong" {
		t.Fatalf("%q %v", b[:n], err)
	}

	near.SetReadDeadline(time.Unix(1, 0))
	_, err := near.Read(b)
	if !errors.Is(err, os.ErrDeadlineExceeded) || !strings.HasPrefix(err.Error(), "read tcp 127.0.0.1:") || strings.Contains(err.Error(), "raw") {
		t.Errorf("past the deadline: %v", err)
	}
	near.SetReadDeadline(time.Time{})
	far.CloseWrite()
	if _, err := near.Read(b); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
	near.Close()
	if _, err := near.Read(b); !errors.Is(err, net.ErrClosed) {
		t.Errorf("reading when closed: %v", err)
	}
	if _, err := near.Write(b); !errors.Is(err, net.ErrClosed) {
		t.Errorf("writing when closed: %v", err)
	}
}

func TestQuietConnReset(t *testing.T) {
	near, far := quietPair(t)
	far.SetLinger(0)
	far.Close()
	if _, err := near.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) || !strings.Contains(err.Error(), "connection reset by peer") {
		t.Errorf("%v", err)
	}
}

// TestQuietConnFull: more than the socket takes at once waits for the reader,
// and not longer than it may.
func TestQuietConnFull(t *testing.T) {
	near, far := quietPair(t)
	want := bytes.Repeat([]byte("edgebake"), 4<<20)
	got := make(chan []byte)
	go func() {
		b := make([]byte, len(want))
		io.ReadFull(far, b)
		got <- b
	}()
	if n, err := near.Write(want); n != len(want) || err != nil {
		t.Fatalf("%d bytes, %v", n, err)
	}
	if !bytes.Equal(<-got, want) {
		t.Error("other bytes arrived")
	}
	var err error
	for range 100 { // the kernel holds tens of megabytes
		if _, err = near.Write(want); err != nil {
			break
		}
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("nobody reads: %v", err)
	}
}

func TestPread(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte("0123456789"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 6)
	for _, c := range []struct {
		off  int64
		want string
		err  error
	}{{0, "012345", nil}, {7, "789", nil}, {10, "", io.EOF}, {1 << 40, "", io.EOF}} {
		if n, err := pread(f, b, c.off); string(b[:n]) != c.want || err != c.err {
			t.Errorf("at %d: %q %v", c.off, b[:n], err)
		}
	}
	f.Close()
	if _, err := pread(f, b, 0); err == nil {
		t.Error("a closed file can be read")
	}
}

func TestPreadAllocatesNothing(t *testing.T) {
	f, err := os.Open("/proc/self/stat")
	if err != nil {
		desk.Lacks(t, "no /proc here: %v", err)
	}
	defer f.Close()
	b := make([]byte, 512)
	if n := testing.AllocsPerRun(100, func() { pread(f, b, 0) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
