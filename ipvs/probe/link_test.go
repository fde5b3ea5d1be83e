package probe

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// scripted is a connection that returns the given bytes and discards writes.
type scripted struct {
	io.Reader
	wrote bytes.Buffer
}

func (c *scripted) Write(b []byte) (int, error)      { return c.wrote.Write(b) }
func (c *scripted) Close() error                     { return nil }
func (c *scripted) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (c *scripted) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (c *scripted) SetDeadline(time.Time) error      { return nil }
func (c *scripted) SetReadDeadline(time.Time) error  { return nil }
func (c *scripted) SetWriteDeadline(time.Time) error { return nil }

// hear runs the reader over data and returns its events.
func hear(data []byte, h2 bool) ([]Event, *scripted) {
	c := &scripted{Reader: bytes.NewReader(data)}
	l := &Link{nc: c, HTTP2: h2, Events: make(chan Event, 1), done: make(chan struct{})}
	if h2 {
		go l.readHTTP2(BodyLimit)
	} else {
		go l.readHTTP1(BodyLimit)
	}
	var all []Event
	for e := range l.Events {
		all = append(all, e)
		if e.Kind == EventClosed || e.Kind == EventGoAway && !h2 {
			return all, c
		}
	}
	return all, c
}

func FuzzHTTP2(f *testing.F) {
	var b bytes.Buffer
	fr := http2.NewFramer(&b, nil)
	fr.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1 << 14})
	fr.WritePing(true, [8]byte{})
	fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0x88}, EndHeaders: true, PadLength: 3})
	fr.WriteDataPadded(1, true, []byte("ok"), []byte{0})
	fr.WriteGoAway(1, 0, nil)
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		all, _ := hear(data, true)
		for _, e := range all {
			if len(e.Body) > BodyLimit {
				t.Fatalf("%d bytes of body", len(e.Body))
			}
		}
	})
}

func FuzzHTTP1(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.0 503 No\r\n\r\nno"))
	f.Add([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		all, _ := hear(data, false)
		for _, e := range all {
			if len(e.Body) > BodyLimit {
				t.Fatalf("%d bytes of body", len(e.Body))
			}
		}
	})
}

// TestHTTP1Bodies checks that a body is read completely, or up to the limit, even if it arrives in
// parts, and that the connection stays open if another response can follow.
func TestHTTP1Bodies(t *testing.T) {
	const chunked = "HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n"
	long := strings.Repeat("x", BodyLimit)
	for _, tt := range []struct {
		name, data, body string
		last             bool
		err              string
	}{
		{name: "a length", data: "HTTP/1.1 500 No\r\nContent-Length: 11\r\n\r\n[-]shutdown", body: "[-]shutdown"},
		{name: "no length", data: "HTTP/1.1 500 No\r\n\r\n[-]shutdown", body: "[-]shutdown", last: true},
		{name: "no length, too long", data: "HTTP/1.1 500 No\r\n\r\n" + long + "y", body: long, last: true},
		{name: "chunks", data: chunked + "7\r\n[-]shut\r\n4;a=b\r\ndown\r\n0\r\nTrailer: x\r\n\r\n", body: "[-]shutdown"},
		{name: "no chunk", data: chunked + "0\r\n\r\n"},
		{name: "as many as kept", data: chunked + "1000\r\n" + long + "\r\n0\r\n\r\n", body: long},
		{name: "a chunk too many", data: chunked + "1000\r\n" + long + "\r\n1\r\ny\r\n0\r\n\r\n", body: long, last: true},
		{name: "a chunk that is too long", data: chunked + "fffff\r\n" + long + "yyy", body: long, last: true},
		{name: "broken in a chunk", data: chunked + "7\r\n[-]", err: "EOF"},
		{name: "broken between chunks", data: chunked + "3\r\n[-]\r\n", err: "EOF"},
		{name: "no size", data: chunked + "x\r\n", err: "malformed chunk"},
		{name: "a negative size", data: chunked + "-1\r\n", err: "malformed chunk"},
		{name: "a chunk without an end", data: chunked + "1\r\nab\r\n", err: "malformed chunk"},
	} {
		next := ""
		if !tt.last && tt.err == "" {
			next = "HTTP/1.1 204 No Content\r\n\r\n"
		}
		br := bufio.NewReader(iotest.OneByteReader(strings.NewReader(tt.data + next)))
		resp, last, err := readResponse(br, "GET", BodyLimit)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s: got %v, want %s", tt.name, err, tt.err)
			}
			continue
		}
		if err != nil || resp.Status != 500 || string(resp.Body) != tt.body || last != tt.last {
			t.Errorf("%s: status %d, body %.40q (%d bytes), last %v, %v", tt.name, resp.Status, resp.Body, len(resp.Body), last, err)
		}
		if next == "" {
			continue
		}
		if resp, _, err := readResponse(br, "GET", BodyLimit); err != nil || resp.Status != 204 {
			t.Errorf("%s: the next response: %d, %v", tt.name, resp.Status, err)
		}
	}
}

// TestFrames checks that the reader parses frames of golang.org/x/net, and that x/net parses frames
// of this package.
func TestFrames(t *testing.T) {
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, h := range [][2]string{{":status", "500"}, {"date", "Sat, 01 Jan 2000 00:00:05 GMT"}, {"x", strings.Repeat("y", 100)}} {
		enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	var b bytes.Buffer
	fr := http2.NewFramer(&b, nil)
	fr.WriteSettings()
	fr.WritePing(false, [8]byte{1, 2, 3, 4, 5, 6, 7, 8})
	fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes()[:10], PadLength: 7,
		Priority: http2.PriorityParam{StreamDep: 3, Weight: 9}})
	fr.WriteContinuation(1, true, block.Bytes()[10:])
	fr.WriteDataPadded(1, false, []byte("[-]shut"), make([]byte, 9))
	fr.WriteData(1, true, []byte("down failed"))
	fr.WritePing(true, [8]byte{})
	fr.WriteRSTStream(3, http2.ErrCodeInternal)
	fr.WriteGoAway(1, http2.ErrCodeNo, []byte("bye"))
	all, c := hear(b.Bytes(), true)
	var kinds []eventKind
	for _, e := range all {
		kinds = append(kinds, e.Kind)
	}
	if want := []eventKind{EventResponse, EventPong, EventResponse, EventGoAway, EventClosed}; len(kinds) != len(want) {
		t.Fatalf("got %v, want %v", kinds, want)
	}
	if e := all[0]; e.Status != 500 || string(e.Body) != "[-]shutdown failed" || e.date != "Sat, 01 Jan 2000 00:00:05 GMT" {
		t.Errorf("%+v", e)
	}
	if c := (&Spec{}).Judge(all[0], Skew{}); c != Draining {
		t.Errorf("the outcome is %s", c)
	}
	if c := (&Spec{}).Judge(all[2], Skew{}); c != ServerError {
		t.Errorf("the outcome of a reset stream is %s", c)
	}
	// The reader acknowledges SETTINGS and PING.
	r := http2.NewFramer(nil, &c.wrote)
	if f, err := r.ReadFrame(); err != nil || !f.(*http2.SettingsFrame).IsAck() {
		t.Errorf("%v %v", f, err)
	}
	if f, err := r.ReadFrame(); err != nil || !f.(*http2.PingFrame).IsAck() || f.(*http2.PingFrame).Data != [8]byte{1, 2, 3, 4, 5, 6, 7, 8} {
		t.Errorf("%v %v", f, err)
	}

	// golang.org/x/net reads frames of this package.
	c = &scripted{}
	l := &Link{nc: c, HTTP2: true, Target: Target{Addr: netip.MustParseAddrPort("10.0.0.1:6443"), Probe: Spec{Method: "GET", Path: "/readyz", Headers: map[string]string{"X-A": "b"}}}}
	l.encodeRequest("GET", "/readyz")
	if err := l.preface(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := l.Ask(); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Ping(); err != nil {
		t.Fatal(err)
	}
	preface := make([]byte, len(http2.ClientPreface))
	if io.ReadFull(&c.wrote, preface); string(preface) != http2.ClientPreface {
		t.Fatalf("the preface is %q", preface)
	}
	r = http2.NewFramer(nil, &c.wrote)
	r.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	var got []string
	for {
		f, err := r.ReadFrame()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch f := f.(type) {
		case *http2.MetaHeadersFrame:
			got = append(got, "GET "+f.PseudoValue("path")+" "+f.PseudoValue("authority"))
			if f.StreamID != uint32(len(got)*2-5) || !f.StreamEnded() || len(f.RegularFields()) != 2 {
				t.Errorf("%v", f)
			}
		case *http2.SettingsFrame:
			if v, ok := f.Value(http2.SettingEnablePush); !ok || v != 0 {
				t.Error("SETTINGS does not disable server push")
			}
			got = append(got, "SETTINGS")
		case *http2.WindowUpdateFrame:
			got = append(got, "WINDOW")
		case *http2.PingFrame:
			if binary.BigEndian.Uint64(f.Data[:]) != 1 {
				t.Errorf("%v", f.Data)
			}
			got = append(got, "PING")
		}
	}
	if want := "SETTINGS,WINDOW,GET /readyz 10.0.0.1:6443,GET /readyz 10.0.0.1:6443,PING"; strings.Join(got, ",") != want {
		t.Errorf("got %s, want %s", strings.Join(got, ","), want)
	}
}

// TestSteadyLink checks that a PING allocates no memory.
func TestSteadyLink(t *testing.T) {
	c := &scripted{}
	c.wrote.Grow(1 << 20)
	l := &Link{nc: c, HTTP2: true}
	if err := l.Ping(); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() { l.Ping() }); n != 0 {
		t.Errorf("%v allocations for a PING", n)
	}
}
