package probe

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// encodeHTTP1 returns the request's text.
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
		resp, last, err := readResponse(br, limit)
		if err != nil {
			l.deliver(Event{Kind: EventClosed, Err: err})
			return
		}
		if !l.deliver(resp) {
			return
		}
		if last {
			// The server said that it would close: no news about its health.
			l.deliver(Event{Kind: EventGoAway})
			return
		}
	}
}

// readResponse reads one HTTP/1.1 response. last means that no other follows.
func readResponse(br *bufio.Reader, limit int) (resp Event, last bool, err error) {
	line, err := readLine(br)
	if err != nil {
		return resp, false, err
	}
	proto, rest, _ := strings.Cut(line, " ")
	code, _, _ := strings.Cut(rest, " ")
	resp.Kind = EventResponse
	if resp.Status, err = strconv.Atoi(code); err != nil || !strings.HasPrefix(proto, "HTTP/1.") {
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
	case resp.Status == 204 || resp.Status == 304 || resp.Status < 200:
		return resp, last, nil
	case chunked, length < 0:
		// The end of such a body is the end of the connection for us: read
		// what there is now and let go of the connection.
		last = true
		body = io.LimitReader(br, int64(max(1, br.Buffered())))
	default:
		body = io.LimitReader(br, length)
	}
	resp.Body = make([]byte, 0, 256)
	for len(resp.Body) < limit {
		chunk := make([]byte, min(512, limit-len(resp.Body)))
		n, err := body.Read(chunk)
		resp.Body = append(resp.Body, chunk[:n]...)
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
