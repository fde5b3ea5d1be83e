package ipvs

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2/hpack"
)

// link is one held connection to a master: HTTP/2 where the master speaks it,
// HTTP/1.1 otherwise. It is a client for exactly what sensing needs, because
// net/http would cost half of the memory that ipvscare may use. Frames as in
// RFC 9113.
//
// One goroutine owns the link; another, started by dialLink, reads and
// delivers events.
type link struct {
	nc net.Conn
	// quiet is the connection under nc, if it is such a one.
	quiet *quietConn

	h2     bool
	skew   skew
	target target

	events chan event
	done   chan struct{}
	once   sync.Once

	wmu     sync.Mutex // the reader acknowledges, the owner asks
	wbuf    []byte
	stream  uint32
	request []byte // HPACK block or HTTP/1.1 text of the probe
	pings   uint64
}

// skew is a certificate that is right in all but time.
type skew struct {
	off      bool // it does not fit this node's clock
	early    bool // because it is not valid yet
	notAfter time.Time
}

// target is what a link connects to and how it proves itself.
type target struct {
	addr   netip.AddrPort
	name   string // master's DNS name, or its address
	sni    string
	probe  Probe
	roots  *roots // nil: nobody can be verified yet
	client *tls.Certificate
	// heard, if set, becomes true with the first byte from the master. Its
	// kernel alone shakes hands over TCP, even for a stopped program; bytes
	// come from the program.
	heard *atomic.Bool
	// dial opens the connection; net.Dialer by default.
	dial func(ctx context.Context, addr netip.AddrPort) (net.Conn, error)
}

// event is news from a link. Only one of the kinds is set.
type event struct {
	kind   eventKind
	status int
	date   string
	body   []byte
	err    error
}

type eventKind int

const (
	evPong eventKind = iota
	evResponse
	evGoAway
	evClosed
)

// bodyLimit bounds the bytes kept of a response: enough for the list of
// failed checks of /readyz, and for a ConfigMap with as many masters as may be
// learned.
const (
	bodyLimit     = 4 << 10
	bodyLimitLong = 256 << 10
)

// identityError means that the master could not prove to be one.
type identityError struct{ err error }

func (e *identityError) Error() string { return e.err.Error() }
func (e *identityError) Unwrap() error { return e.err }

// errNotTLS: something answers, but not with TLS.
var errNotTLS = errors.New("it does not speak TLS")

// dialLink connects, shakes hands and verifies. The context bounds all of it.
func dialLink(ctx context.Context, t target, limit int) (*link, error) {
	if t.dial == nil {
		t.dial = func(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
			d := net.Dialer{KeepAlive: -1} // PINGs do it
			return d.DialContext(ctx, "tcp", addr.String())
		}
	}
	nc, err := t.dial(ctx, t.addr)
	if err != nil {
		return nil, err
	}
	q := quiet(nc)
	if q != nil {
		nc = q
	}
	if t.heard != nil {
		nc = &hearing{nc, t.heard}
	}
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	l := &link{nc: nc, quiet: q, target: t, events: make(chan event, 16), done: make(chan struct{})}
	err = l.handshake(ctx)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	l.encodeRequest(t.probe.Method, t.probe.Path)
	if l.h2 {
		go l.readHTTP2(limit)
	} else {
		go l.readHTTP1(limit)
	}
	return l, nil
}

// hearing notes that something was read.
type hearing struct {
	net.Conn
	heard *atomic.Bool
}

func (c *hearing) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.heard.Store(true)
	}
	return n, err
}

func (l *link) handshake(ctx context.Context) error {
	t := &l.target
	if t.probe.Plain {
		return nil
	}
	var alien error // is worth more than what becomes of the handshake then
	cfg := &tls.Config{
		ServerName: t.sni,
		NextProtos: []string{"h2", "http/1.1"},
		// Verified below, so that a wrong clock can be told from a wrong
		// identity.
		InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			if t.probe.Unsafe || t.roots == nil {
				return nil
			}
			var err error
			if l.skew, err = t.roots.verify(cs.PeerCertificates, t.names(), time.Now()); err != nil {
				alien = &identityError{err}
			}
			return alien
		},
		SessionTicketsDisabled: true,
		// Without the post-quantum keys, which need a second packet each way:
		// nothing said here is worth hiding for decades, and where packets are
		// lost, each one counts.
		CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP256, tls.CurveP384},
		MinVersion:       tls.VersionTLS12,
	}
	if t.client != nil {
		cfg.Certificates = []tls.Certificate{*t.client}
	}
	tc := tls.Client(l.nc, cfg)
	if err := tc.HandshakeContext(ctx); err != nil {
		if alien != nil {
			return alien
		}
		var rec tls.RecordHeaderError
		if errors.As(err, &rec) {
			return fmt.Errorf("%w: %w", errNotTLS, err)
		}
		return err
	}
	l.nc = tc
	l.h2 = tc.ConnectionState().NegotiatedProtocol == "h2"
	if l.h2 {
		return l.preface()
	}
	return nil
}

// names are those of which the certificate must carry one.
func (t *target) names() []string {
	names := []string{t.name, t.addr.Addr().String(), certName}
	if t.sni != "" && t.sni != certName {
		names = append(names, t.sni)
	}
	return names
}

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

func (l *link) preface() error {
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

// encodeRequest makes the request once; it is sent again and again. The
// encoder's dynamic table is off, so that the bytes do not depend on what was
// sent before.
func (l *link) encodeRequest(method, path string) {
	t := &l.target
	authority := t.sni
	if authority == "" {
		authority = t.addr.String()
	}
	if !l.h2 {
		var b strings.Builder
		fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: ipvscare\r\n", method, path, authority)
		for _, k := range sortedKeys(t.probe.Headers) {
			fmt.Fprintf(&b, "%s: %s\r\n", k, t.probe.Headers[k])
		}
		if t.probe.Body != "" {
			fmt.Fprintf(&b, "Content-Length: %d\r\n", len(t.probe.Body))
		}
		b.WriteString("\r\n" + t.probe.Body)
		l.request = []byte(b.String())
		return
	}
	var buf bytes.Buffer
	enc := hpack.NewEncoder(&buf)
	enc.SetMaxDynamicTableSize(0)
	for _, f := range [][2]string{{":method", method}, {":scheme", "https"}, {":authority", authority},
		{":path", path}, {"user-agent", "ipvscare"}} {
		enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
	}
	for _, k := range sortedKeys(t.probe.Headers) {
		enc.WriteField(hpack.HeaderField{Name: strings.ToLower(k), Value: t.probe.Headers[k]})
	}
	l.request = buf.Bytes()
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// ask sends the prepared request; the answer comes as an event.
func (l *link) ask() error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if !l.h2 {
		return l.write(l.request)
	}
	if l.stream == 0 {
		l.stream = 1
	} else {
		l.stream += 2
	}
	body := l.target.probe.Body
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

// exhausted reports that the link has no stream ids left to speak of.
func (l *link) exhausted() bool { return l.stream > 1<<30 }

// ping asks for a sign of life. Over HTTP/1.1 that is the request itself.
func (l *link) ping() error {
	if !l.h2 {
		return l.ask()
	}
	l.wmu.Lock()
	defer l.wmu.Unlock()
	l.pings++
	l.wbuf = appendFrame(l.wbuf[:0], framePing, 0, 0, nil)
	l.wbuf[2] = 8
	l.wbuf = binary.BigEndian.AppendUint64(l.wbuf, l.pings)
	return l.write(l.wbuf)
}

// writeTime is how long a write may wait: a full socket buffer is as good as no
// answer.
const writeTime = 2 * time.Second

func (l *link) write(b []byte) error {
	if l.quiet == nil { // which keeps to writeTime by itself, without a timer
		l.nc.SetWriteDeadline(time.Now().Add(writeTime))
	}
	_, err := l.nc.Write(b)
	return err
}

// close ends the link and its reader. It is safe to call more than once.
func (l *link) close() {
	l.once.Do(func() {
		close(l.done)
		// A polite TLS close_notify could block on a dead peer.
		if tc, ok := l.nc.(*tls.Conn); ok {
			tc.NetConn().Close()
			return
		}
		l.nc.Close()
	})
}

func (l *link) deliver(e event) bool {
	select {
	case l.events <- e:
		return true
	case <-l.done:
		return false
	}
}

// readHTTP2 turns frames into events until the connection ends.
func (l *link) readHTTP2(limit int) {
	err := l.frames(limit)
	l.deliver(event{kind: evClosed, err: err})
}

func (l *link) frames(limit int) error {
	br := bufio.NewReaderSize(l.nc, 2<<10)
	var head [9]byte
	buf := make([]byte, 512)
	var block []byte // header block in progress
	var resp event
	consumed := 0
	dec := hpack.NewDecoder(4096, func(f hpack.HeaderField) {
		switch f.Name {
		case ":status":
			resp.status, _ = strconv.Atoi(f.Value)
		case "date":
			resp.date = f.Value
		}
	})
	dec.SetMaxStringLength(16 << 10)
	finish := func() bool {
		resp.kind = evResponse
		ok := l.deliver(resp)
		resp = event{}
		return ok
	}
	headers := func(flags byte) error {
		if flags&flagEndHeaders == 0 {
			if len(block) > 64<<10 {
				return errors.New("header block is too large")
			}
			return nil
		}
		_, err := dec.Write(block)
		if err == nil {
			err = dec.Close()
		}
		block = block[:0]
		return err
	}
	endStream := false
	for {
		if _, err := io.ReadFull(br, head[:]); err != nil {
			return err
		}
		n := int(head[0])<<16 | int(head[1])<<8 | int(head[2])
		kind, flags := head[3], head[4]
		stream := binary.BigEndian.Uint32(head[5:]) &^ (1 << 31)
		if n > maxFrame {
			return fmt.Errorf("frame of %d bytes exceeds the limit", n)
		}
		if n > len(buf) {
			buf = make([]byte, n)
		}
		p := buf[:n]
		if _, err := io.ReadFull(br, p); err != nil {
			return err
		}
		switch kind {
		case framePing:
			if n != 8 {
				return errors.New("malformed PING")
			}
			if flags&flagAck == 0 {
				if err := l.reply(framePing, flagAck, 0, p); err != nil {
					return err
				}
			} else if !l.deliver(event{kind: evPong}) {
				return net.ErrClosed
			}
		case frameSettings:
			if flags&flagAck == 0 {
				if err := l.reply(frameSettings, flagAck, 0, nil); err != nil {
					return err
				}
			}
		case frameGoAway:
			if !l.deliver(event{kind: evGoAway}) {
				return net.ErrClosed
			}
		case frameHeaders, frameData:
			body, err := unpad(kind, flags, p)
			if err != nil {
				return err
			}
			if kind == frameHeaders {
				endStream = flags&flagEndStream != 0
				block = append(block[:0], body...)
				if err := headers(flags); err != nil {
					return err
				}
				if flags&flagEndHeaders != 0 && endStream && !finish() {
					return net.ErrClosed
				}
				break
			}
			if room := limit - len(resp.body); room > 0 && (resp.status != 200 || limit > bodyLimit) {
				resp.body = append(resp.body, body[:min(len(body), room)]...)
			}
			if consumed += n; consumed >= window/2 {
				credit := binary.BigEndian.AppendUint32(nil, uint32(consumed))
				if err := l.reply(frameWindowUpdate, 0, 0, credit); err != nil {
					return err
				}
				if flags&flagEndStream == 0 {
					if err := l.reply(frameWindowUpdate, 0, stream, credit); err != nil {
						return err
					}
				}
				consumed = 0
			}
			if flags&flagEndStream != 0 && !finish() {
				return net.ErrClosed
			}
		case frameContinuation:
			block = append(block, p...)
			if err := headers(flags); err != nil {
				return err
			}
			if flags&flagEndHeaders != 0 && endStream && !finish() {
				return net.ErrClosed
			}
		case frameReset:
			resp.status = 0 // counts as a server error
			if !finish() {
				return net.ErrClosed
			}
		}
	}
}

// unpad strips padding and, of HEADERS, the priority fields.
func unpad(kind, flags byte, p []byte) ([]byte, error) {
	if flags&flagPadded != 0 {
		if len(p) == 0 || int(p[0]) >= len(p) {
			return nil, errors.New("malformed padding")
		}
		p = p[1 : len(p)-int(p[0])]
	}
	if kind == frameHeaders && flags&flagPriority != 0 {
		if len(p) < 5 {
			return nil, errors.New("malformed HEADERS")
		}
		p = p[5:]
	}
	return p, nil
}

func (l *link) reply(kind, flags byte, stream uint32, payload []byte) error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	l.wbuf = appendFrame(l.wbuf[:0], kind, flags, stream, payload)
	return l.write(l.wbuf)
}

// readHTTP1 turns responses into events until the connection ends.
func (l *link) readHTTP1(limit int) {
	br := bufio.NewReaderSize(l.nc, 4<<10)
	for {
		resp, last, err := readResponse(br, limit)
		if err != nil {
			l.deliver(event{kind: evClosed, err: err})
			return
		}
		if !l.deliver(resp) {
			return
		}
		if last {
			// The server said that it would close: no news about its health.
			l.deliver(event{kind: evGoAway})
			return
		}
	}
}

// readResponse reads one HTTP/1.1 response. last means that no other follows.
func readResponse(br *bufio.Reader, limit int) (resp event, last bool, err error) {
	line, err := readLine(br)
	if err != nil {
		return resp, false, err
	}
	proto, rest, _ := strings.Cut(line, " ")
	code, _, _ := strings.Cut(rest, " ")
	resp.kind = evResponse
	if resp.status, err = strconv.Atoi(code); err != nil || !strings.HasPrefix(proto, "HTTP/1.") {
		return resp, false, fmt.Errorf("not an HTTP response: %.40q", line)
	}
	last = proto == "HTTP/1.0"
	length, chunked := int64(-1), false
	for {
		line, err := readLine(br)
		if err != nil {
			return resp, false, err
		}
		if line == "" {
			break
		}
		k, v, _ := strings.Cut(line, ":")
		v = strings.TrimSpace(v)
		switch strings.ToLower(k) {
		case "content-length":
			if length, err = strconv.ParseInt(v, 10, 64); err != nil || length < 0 {
				return resp, false, fmt.Errorf("malformed Content-Length %q", v)
			}
		case "transfer-encoding":
			chunked = strings.EqualFold(v, "chunked")
		case "connection":
			if strings.EqualFold(v, "close") {
				last = true
			}
		case "date":
			resp.date = v
		}
	}
	var body io.Reader
	switch {
	case resp.status == 204 || resp.status == 304 || resp.status < 200:
		return resp, last, nil
	case chunked, length < 0:
		// The end of such a body is the end of the connection for us: read
		// what there is now and let go of the connection.
		last = true
		body = io.LimitReader(br, int64(max(1, br.Buffered())))
	default:
		body = io.LimitReader(br, length)
	}
	resp.body = make([]byte, 0, 256)
	for len(resp.body) < limit {
		chunk := make([]byte, min(512, limit-len(resp.body)))
		n, err := body.Read(chunk)
		resp.body = append(resp.body, chunk[:n]...)
		if err == io.EOF {
			break
		}
		if err != nil {
			return resp, false, err
		}
	}
	if _, err := io.Copy(io.Discard, body); err != nil {
		return resp, false, err
	}
	return resp, last, nil
}

func readLine(br *bufio.Reader) (string, error) {
	b, err := br.ReadSlice('\n')
	if err != nil {
		return "", err
	}
	return strings.TrimRight(string(b), "\r\n"), nil
}

// roots are the authorities of the cluster.
type roots struct {
	pool  *x509.CertPool
	certs []*x509.Certificate
}

// verify checks a chain for server authentication and for one of the names.
// A chain that is right in all but time is no error; skew tells.
func (r *roots) verify(chain []*x509.Certificate, names []string, now time.Time) (skew, error) {
	if len(chain) == 0 {
		return skew{}, errors.New("no certificate")
	}
	leaf := chain[0]
	opts := x509.VerifyOptions{Roots: r.pool, Intermediates: x509.NewCertPool(), CurrentTime: now,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	for _, c := range chain[1:] {
		opts.Intermediates.AddCert(c)
	}
	named := slices.ContainsFunc(names, func(n string) bool { return n != "" && leaf.VerifyHostname(n) == nil })
	if !named {
		return skew{}, fmt.Errorf("its certificate is for %s, not for %s",
			strings.Join(append(slices.Clone(leaf.DNSNames), addresses(leaf.IPAddresses)...), " "), strings.Join(names, " "))
	}
	_, err := leaf.Verify(opts)
	var invalid x509.CertificateInvalidError
	if err == nil || !errors.As(err, &invalid) || invalid.Reason != x509.Expired {
		return skew{}, err
	}
	// Is there any time at which the chain was right? The borders of the
	// validities are the only candidates.
	moments := []time.Time{leaf.NotBefore, leaf.NotAfter}
	for _, c := range slices.Concat(r.certs, chain[1:]) {
		moments = append(moments, c.NotBefore, c.NotAfter)
	}
	for _, m := range moments {
		opts.CurrentTime = m
		if _, verr := leaf.Verify(opts); verr == nil {
			return skew{off: true, early: now.Before(leaf.NotBefore), notAfter: leaf.NotAfter}, nil
		}
	}
	return skew{}, err
}

func addresses(ips []net.IP) []string {
	var s []string
	for _, ip := range ips {
		s = append(s, ip.String())
	}
	return s
}

// parseRoots reads a PEM file of authorities.
func parseRoots(name string, pemData []byte) (*roots, error) {
	r := &roots{pool: x509.NewCertPool()}
	certs, err := parseCertificates(pemData)
	if err != nil {
		return nil, fmt.Errorf("reading CA file %s: %w", name, err)
	}
	for i, c := range certs {
		if !c.IsCA {
			return nil, fmt.Errorf("reading CA file %s: certificate %d (%s) is not an authority; give the cluster's ca.crt", name, i+1, c.Subject)
		}
		r.pool.AddCert(c)
	}
	r.certs = certs
	return r, nil
}
