package probe

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http2/hpack"
)

// Frame types, flags and settings of RFC 9113.
const (
	frameData         = 0
	frameHeaders      = 1
	frameReset        = 3
	frameSettings     = 4
	framePing         = 6
	frameGoAway       = 7
	frameWindowUpdate = 8
	frameContinuation = 9

	flagEndStream  = 0x1
	flagAck        = 0x1
	flagEndHeaders = 0x4
	flagPadded     = 0x8
	flagPriority   = 0x20

	settingEnablePush    = 2
	settingInitialWindow = 4

	maxFrame = 16 << 10
	window   = 1 << 20
)

const http2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

func (l *Link) preface() error {
	b := []byte(http2Preface)
	b = appendFrame(b, frameSettings, 0, 0, nil)
	b = appendSetting(b, settingEnablePush, 0)
	b = appendSetting(b, settingInitialWindow, window)
	b[len(http2Preface)+2] = 12
	b = appendFrame(b, frameWindowUpdate, 0, 0, binary.BigEndian.AppendUint32(nil, window))
	_, err := l.nc.Write(b)
	return err
}

func appendSetting(b []byte, id uint16, v uint32) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint16(b, id), v)
}

func appendFrame(b []byte, kind, flags byte, stream uint32, payload []byte) []byte {
	n := len(payload)
	b = append(b, byte(n>>16), byte(n>>8), byte(n), kind, flags)
	b = binary.BigEndian.AppendUint32(b, stream)
	return append(b, payload...)
}

// encodeHTTP2 returns the request's header block. It does not use the encoder's dynamic table, so
// that the same block can be sent repeatedly.
func (t *Target) encodeHTTP2(method, path string) []byte {
	var buf bytes.Buffer
	enc := hpack.NewEncoder(&buf)
	enc.SetMaxDynamicTableSize(0)
	for _, f := range [][2]string{{":method", method}, {":scheme", "https"}, {":authority", t.authority()},
		{":path", path}, {"user-agent", "ipvscare"}} {
		enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
	}
	for _, k := range sortedKeys(t.Probe.Headers) {
		enc.WriteField(hpack.HeaderField{Name: strings.ToLower(k), Value: t.Probe.Headers[k]})
	}
	return buf.Bytes()
}

func (l *Link) askHTTP2() error {
	if l.stream == 0 {
		l.stream = 1
	} else {
		l.stream += 2
	}
	body := l.Target.Probe.Body
	flags := byte(flagEndHeaders | flagEndStream)
	if body != "" {
		flags = flagEndHeaders
	}
	l.wbuf = appendFrame(l.wbuf[:0], frameHeaders, flags, l.stream, l.request)
	if body != "" {
		l.wbuf = appendFrame(l.wbuf, frameData, flagEndStream, l.stream, []byte(body))
	}
	return l.write(l.wbuf)
}

func (l *Link) pingHTTP2() error {
	l.Pings++
	l.wbuf = appendFrame(l.wbuf[:0], framePing, 0, 0, nil)
	l.wbuf[2] = 8
	l.wbuf = binary.BigEndian.AppendUint64(l.wbuf, l.Pings)
	return l.write(l.wbuf)
}

func (l *Link) reply(kind, flags byte, stream uint32, payload []byte) error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	l.wbuf = appendFrame(l.wbuf[:0], kind, flags, stream, payload)
	return l.write(l.wbuf)
}

// readHTTP2 turns frames into events until the connection ends.
func (l *Link) readHTTP2(limit int) {
	r := newFrameReader(l, limit)
	for {
		if err := r.next(); err != nil {
			l.deliver(Event{Kind: EventClosed, Err: err})
			return
		}
	}
}

// frameReader turns the frames of one connection into events. Only one request is outstanding at a
// time, so all HEADERS and DATA frames belong to its answer.
type frameReader struct {
	l     *Link
	br    *bufio.Reader
	limit int // bytes kept of a body
	head  [9]byte
	buf   []byte

	dec       *hpack.Decoder
	block     []byte // the header block so far
	lastBlock bool   // no DATA frames follow the block
	answer    Event  // the answer so far
	consumed  int    // bytes of DATA that no WINDOW_UPDATE has acknowledged yet
}

// frame is one frame. Its payload is valid until the next read.
type frame struct {
	kind, flags byte
	stream      uint32
	payload     []byte
}

func (f frame) has(flag byte) bool { return f.flags&flag != 0 }

func newFrameReader(l *Link, limit int) *frameReader {
	r := &frameReader{l: l, br: bufio.NewReaderSize(l.nc, 2<<10), limit: limit, buf: make([]byte, 512)}
	r.dec = hpack.NewDecoder(4096, func(f hpack.HeaderField) {
		switch f.Name {
		case ":status":
			r.answer.Status, _ = strconv.Atoi(f.Value)
		case "date":
			r.answer.date = f.Value
		}
	})
	r.dec.SetMaxStringLength(16 << 10)
	return r
}

func (r *frameReader) read() (frame, error) {
	if _, err := io.ReadFull(r.br, r.head[:]); err != nil {
		return frame{}, err
	}
	n := int(r.head[0])<<16 | int(r.head[1])<<8 | int(r.head[2])
	if n > maxFrame {
		return frame{}, fmt.Errorf("frame of %d bytes exceeds the limit", n)
	}
	if n > len(r.buf) {
		r.buf = make([]byte, n)
	}
	f := frame{kind: r.head[3], flags: r.head[4], stream: binary.BigEndian.Uint32(r.head[5:]) &^ (1 << 31), payload: r.buf[:n]}
	_, err := io.ReadFull(r.br, f.payload)
	return f, err
}

// next reads and handles one frame.
func (r *frameReader) next() error {
	f, err := r.read()
	if err != nil {
		return err
	}
	switch f.kind {
	case framePing:
		return r.ping(f)
	case frameSettings:
		if f.has(flagAck) {
			return nil
		}
		return r.l.reply(frameSettings, flagAck, 0, nil)
	case frameGoAway:
		return r.tell(Event{Kind: EventGoAway})
	case frameHeaders:
		return r.headers(f)
	case frameContinuation:
		r.block = append(r.block, f.payload...)
		return r.endBlock(f)
	case frameData:
		return r.data(f)
	case frameReset:
		r.answer.Status = 0 // counts as a server error
		return r.finish()
	}
	return nil // ignore other frames
}

func (r *frameReader) tell(e Event) error {
	if !r.l.deliver(e) {
		return net.ErrClosed
	}
	return nil
}

func (r *frameReader) ping(f frame) error {
	if len(f.payload) != 8 {
		return errors.New("malformed PING")
	}
	if f.has(flagAck) {
		return r.tell(Event{Kind: EventPong, Ping: binary.BigEndian.Uint64(f.payload)})
	}
	return r.l.reply(framePing, flagAck, 0, f.payload)
}

func (r *frameReader) headers(f frame) error {
	fragment, err := unpad(f)
	if err != nil {
		return err
	}
	r.lastBlock = f.has(flagEndStream)
	r.block = append(r.block[:0], fragment...)
	return r.endBlock(f)
}

// endBlock decodes the header block if f is its last frame.
func (r *frameReader) endBlock(f frame) error {
	if !f.has(flagEndHeaders) {
		if len(r.block) > 64<<10 {
			return errors.New("header block is too large")
		}
		return nil
	}
	_, err := r.dec.Write(r.block)
	if err == nil {
		err = r.dec.Close()
	}
	r.block = r.block[:0]
	if err != nil || !r.lastBlock {
		return err
	}
	return r.finish()
}

func (r *frameReader) data(f frame) error {
	body, err := unpad(f)
	if err != nil {
		return err
	}
	// The body of a successful answer is not needed.
	wanted := r.answer.Status != 200 || r.limit > BodyLimit
	if room := r.limit - len(r.answer.Body); wanted && room > 0 {
		r.answer.Body = append(r.answer.Body, body[:min(len(body), room)]...)
	}
	if err := r.credit(f); err != nil {
		return err
	}
	if f.has(flagEndStream) {
		return r.finish()
	}
	return nil
}

// credit sends a WINDOW_UPDATE for the consumed bytes once they are at least half a window.
func (r *frameReader) credit(f frame) error {
	if r.consumed += len(f.payload); r.consumed < window/2 {
		return nil
	}
	n := binary.BigEndian.AppendUint32(nil, uint32(r.consumed))
	r.consumed = 0
	err := r.l.reply(frameWindowUpdate, 0, 0, n)
	if err == nil && !f.has(flagEndStream) {
		err = r.l.reply(frameWindowUpdate, 0, f.stream, n)
	}
	return err
}

// finish delivers the answer.
func (r *frameReader) finish() error {
	r.answer.Kind = EventResponse
	err := r.tell(r.answer)
	r.answer = Event{}
	return err
}

// unpad removes padding and, in HEADERS, the priority fields.
func unpad(f frame) ([]byte, error) {
	p := f.payload
	if f.has(flagPadded) {
		if len(p) == 0 || int(p[0]) >= len(p) {
			return nil, errors.New("malformed padding")
		}
		p = p[1 : len(p)-int(p[0])]
	}
	if f.kind == frameHeaders && f.has(flagPriority) {
		if len(p) < 5 {
			return nil, errors.New("malformed HEADERS")
		}
		p = p[5:]
	}
	return p, nil
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
