package probe

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// encodeHTTP1 returns the request as HTTP/1.1 text.
func (t *Target) encodeHTTP1(method, path string) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: ipvscare\r\n", method, path, t.authority())
	for _, k := range sortedKeys(t.Probe.Headers) {
		fmt.Fprintf(&b, "%s: %s\r\n", k, t.Probe.Headers[k])
	}
	if t.Probe.Body != "" {
		fmt.Fprintf(&b, "Content-Length: %d\r\n", len(t.Probe.Body))
	}
	b.WriteString("\r\n" + t.Probe.Body)
	return []byte(b.String())
}

// readHTTP1 turns responses into events until the connection ends.
func (l *Link) readHTTP1(limit int) {
	br := bufio.NewReaderSize(l.nc, 4<<10)
	for {
		resp, last, err := readResponse(br, l.Target.Probe.Method, limit)
		if err != nil {
			l.deliver(Event{Kind: EventClosed, Err: err})
			return
		}
		if !l.deliver(resp) {
			return
		}
		if last {
			// The server announced this close, so it is no sign of bad health.
			l.deliver(Event{Kind: EventGoAway})
			return
		}
	}
}

// readResponse reads the response to an HTTP/1.1 request. last means that no response follows on
// this connection, and the caller must close it.
func readResponse(br *bufio.Reader, method string, limit int) (resp Event, last bool, err error) {
	h, err := readHeader(br)
	resp = Event{Kind: EventResponse, Status: h.status, date: h.date}
	if err != nil {
		return resp, false, err
	}
	switch {
	case method == "HEAD", h.status == 204 || h.status == 304 || h.status < 200:
		return resp, h.last, nil
	case h.chunked:
		body, whole, err := readChunks(br, limit)
		resp.Body = body
		return resp, h.last || !whole, err
	case h.length < 0:
		// The body ends with the connection, however that ends: TLS servers often close it abruptly.
		resp.Body, _ = io.ReadAll(io.LimitReader(br, int64(limit)))
		return resp, true, nil
	}
	body := io.LimitReader(br, h.length)
	if resp.Body, err = io.ReadAll(io.LimitReader(body, int64(limit))); err != nil {
		return resp, false, err
	}
	if _, err := io.Copy(io.Discard, body); err != nil {
		return resp, false, err
	}
	return resp, h.last, nil
}

// readChunks reads a chunked body (RFC 9112, section 7.1). If the body is longer than limit, whole is
// false and the rest is not read, because it may never end.
func readChunks(br *bufio.Reader, limit int) (body []byte, whole bool, err error) {
	for {
		line, err := readLine(br)
		if err != nil {
			return nil, false, err
		}
		text, _, _ := strings.Cut(line, ";")
		size, err := strconv.ParseUint(strings.TrimSpace(text), 16, 31)
		if err != nil {
			return nil, false, fmt.Errorf("malformed chunk size %.40q", text)
		}
		for size == 0 { // trailer fields follow
			if line, err := readLine(br); err != nil || line == "" {
				return body, true, err
			}
		}
		n := min(int(size), limit-len(body))
		part := make([]byte, n)
		if _, err := io.ReadFull(br, part); err != nil {
			return nil, false, err
		}
		if body = append(body, part...); n < int(size) {
			return body, false, nil
		}
		if line, err := readLine(br); err != nil || line != "" {
			return nil, false, cmp.Or(err, fmt.Errorf("malformed chunk: %.40q follows its data", line))
		}
	}
}

// header is the part of a response's status line and header fields that a probe needs.
type header struct {
	status  int
	length  int64 // of the body; -1 if not given
	chunked bool
	last    bool // the server closes the connection after this response
	date    string
}

func readHeader(br *bufio.Reader) (header, error) {
	line, err := readLine(br)
	if err != nil {
		return header{}, err
	}
	h := header{length: -1}
	proto, rest, _ := strings.Cut(line, " ")
	code, _, _ := strings.Cut(rest, " ")
	if h.status, err = strconv.Atoi(code); err != nil || !strings.HasPrefix(proto, "HTTP/1.") {
		return h, fmt.Errorf("not an HTTP response: %.40q", line)
	}
	h.last = proto == "HTTP/1.0"
	for {
		line, err := readLine(br)
		if err != nil || line == "" {
			return h, err
		}
		k, v, _ := strings.Cut(line, ":")
		v = strings.TrimSpace(v)
		switch strings.ToLower(k) {
		case "content-length":
			if h.length, err = strconv.ParseInt(v, 10, 64); err != nil || h.length < 0 {
				return h, fmt.Errorf("malformed Content-Length %q", v)
			}
		case "transfer-encoding":
			h.chunked = strings.EqualFold(v, "chunked")
		case "connection":
			h.last = h.last || strings.EqualFold(v, "close")
		case "date":
			h.date = v
		}
	}
}

func readLine(br *bufio.Reader) (string, error) {
	b, err := br.ReadSlice('\n')
	if err != nil {
		return "", err
	}
	return strings.TrimRight(string(b), "\r\n"), nil
}
