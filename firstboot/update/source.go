package update

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk/order"
	"github.com/edgebake/edgebake/ondisk/update"
)

// Source is an image that is read in byte ranges.
type Source interface {
	Name() string
	Size() int64
	// Open returns n bytes from offset off. If the connection is lost, the reader requests the
	// rest.
	Open(ctx context.Context, off, n int64) (io.ReadCloser, error)
	Close() error
}

// temporaryError is an error of the connection or of a busy server. A retry may succeed.
type temporaryError struct{ error }

func (d *temporaryError) Unwrap() error { return d.error }

// openSource opens the image that Options names: a file, an http or https URL, or an image in a
// registry. tell receives status messages.
func openSource(ctx context.Context, e *machine.Env, o Options, allow *allowance, proxy []string, tell func(format string, args ...any)) (Source, error) {
	if scheme, _, ok := strings.Cut(o.Image, "://"); ok {
		l := &requester{e: e, get: e.Get, proxy: proxy, rate: o.Rate, allow: allow, tell: tell}
		if o.ordered() {
			l.get = e.GetRemote // an order must not make the machine send requests to itself
		}
		switch scheme {
		case "http", "https":
			s := &server{requester: l, url: o.Image}
			return s, s.find(ctx)
		case order.Registry:
			return openRegistry(ctx, l, o.Image)
		}
		return nil, fmt.Errorf("%s: expected a file, or a URL that begins with https://, http:// or oci://", o.Image)
	}
	f, err := os.Open(e.Path(o.Image))
	if err != nil {
		return nil, fmt.Errorf("opening the image: %w", err)
	}
	size, err := f.Seek(0, io.SeekEnd) // also works for devices
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("opening the image: %w", err)
	}
	return &file{f, o.Image, size}, nil
}

// file is an image in a file on this machine or on a stick.
type file struct {
	f interface {
		io.ReaderAt
		io.Closer
	}
	name string
	size int64
}

func (f *file) Name() string { return f.name }
func (f *file) Size() int64  { return f.size }
func (f *file) Close() error { return f.f.Close() }

func (f *file) Open(_ context.Context, off, n int64) (io.ReadCloser, error) {
	return io.NopCloser(io.NewSectionReader(f.f, off, n)), nil
}

// requester sends the HTTP requests of an update.
type requester struct {
	e     *machine.Env
	get   func(ctx context.Context, url string, header http.Header, proxy []string) (*http.Response, error)
	proxy []string
	rate  int64 // maximum bytes per second; 0: no limit
	allow *allowance
	tell  func(format string, args ...any)
	due   time.Time // earliest time of the next read, according to rate
	login *login    // nil if none is needed
}

// server is an image on a web server, or one part of an image in a registry.
type server struct {
	*requester
	url  string
	size int64
}

func (s *server) Name() string { return s.url }
func (s *server) Size() int64  { return s.size }
func (s *server) Close() error { return nil }

// errReplaced means that the server now has a different image.
var errReplaced = errors.New("the image was replaced during the update")

// find requests the last byte. The response contains the size of the image.
func (s *server) find(ctx context.Context) error {
	return s.retry(ctx, func() error {
		resp, err := s.get(ctx, "bytes=-1", 1)
		if err != nil {
			return err
		}
		body := &countedBody{resp.Body, s.allow, 1}
		defer body.Close()
		_, s.size, err = contentRange(resp)
		return err
	})
}

// retry calls try until it succeeds, or has failed too often.
func (l *requester) retry(ctx context.Context, try func() error) error {
	for p := (backoff{l: l, tries: 5, fix: "check the address, and that the server is up; then run the same command again"}); ; {
		err := try()
		if err == nil {
			return nil
		}
		if err := p.after(ctx, err); err != nil {
			return err
		}
	}
}

// Open returns a reader of a range. The reader sends requests only as data is read.
func (s *server) Open(ctx context.Context, off, n int64) (io.ReadCloser, error) {
	return &rangeReader{ctx: ctx, s: s, off: off, end: off + n, backoff: backoff{l: s.requester, tries: 20, fix: "run the same command again: it continues"}}, nil
}

// ask requests the bytes from off to end, without end.
func (s *server) ask(ctx context.Context, off, end int64) (*countedBody, error) {
	resp, err := s.get(ctx, fmt.Sprintf("bytes=%d-%d", off, end-1), end-off)
	if err != nil {
		return nil, err
	}
	from, size, err := contentRange(resp)
	switch {
	case err != nil:
	// The chunk digests reveal a replacement of equal size. The ETag is not compared, because it
	// may differ between mirrors that share one name.
	case size != s.size:
		err = errReplaced
	case from != off:
		err = fmt.Errorf("the server sent bytes from offset %d instead of %d", from, off)
	}
	if err != nil {
		resp.Body.Close()
		return nil, err
	}
	return &countedBody{resp.Body, s.allow, end - off}, nil
}

// get requests a range of n bytes. A response without that range is an error.
func (s *server) get(ctx context.Context, bytes string, n int64) (*http.Response, error) {
	resp, err := s.request(ctx, s.url, http.Header{"Range": {bytes}, "Accept-Encoding": {"identity"}}, n)
	if err != nil {
		return nil, err
	}
	switch code := resp.StatusCode; {
	case code == http.StatusPartialContent:
		return resp, nil
	case code == http.StatusOK:
		err = errors.New("the server sent the whole image instead of a range: it does not support ranges; use another server")
	case code == http.StatusRequestedRangeNotSatisfiable:
		err = errReplaced
	default:
		err = badStatus(resp)
	}
	resp.Body.Close()
	return nil, err
}

// badStatus returns the error for an unexpected status code.
func badStatus(resp *http.Response) error {
	err := fmt.Errorf("the server answers %s", resp.Status)
	if code := resp.StatusCode; code >= 400 && code < 500 && code != http.StatusRequestTimeout && code != http.StatusTooManyRequests {
		return err
	}
	return &temporaryError{err}
}

// request sends a request for at most n bytes. If the server requires a login, it logs in.
func (l *requester) request(ctx context.Context, url string, header http.Header, n int64) (*http.Response, error) {
	resp, err := l.send(ctx, url, header, n)
	if err != nil || resp.StatusCode != http.StatusUnauthorized || l.login == nil {
		return resp, err
	}
	resp.Body.Close()
	if err := l.login.answer(ctx, l, resp); err != nil {
		return nil, err
	}
	return l.send(ctx, url, header, n)
}

// send sends one request.
func (l *requester) send(ctx context.Context, url string, header http.Header, n int64) (*http.Response, error) {
	if err := l.allow.request(n); err != nil {
		return nil, err
	}
	if l.login != nil && l.login.header != "" {
		header = header.Clone()
		header.Set("Authorization", l.login.header)
	}
	resp, err := l.get(ctx, url, header, l.proxy)
	if errors.Is(err, machine.ErrRedirect) || errors.Is(err, machine.ErrLocal) {
		return nil, err
	}
	if err != nil {
		return nil, &temporaryError{err}
	}
	l.allow.redirected(resp)
	return resp, nil
}

// contentRange parses the Content-Range header: the offset of the response's bytes, and the size of
// the image.
func contentRange(resp *http.Response) (from, size int64, err error) {
	text := resp.Header.Get("Content-Range")
	span, total, ok := strings.Cut(strings.TrimPrefix(text, "bytes "), "/")
	begin, _, ok2 := strings.Cut(span, "-")
	from, err1 := strconv.ParseInt(begin, 10, 64)
	size, err2 := strconv.ParseInt(total, 10, 64)
	if !ok || !ok2 || err1 != nil || err2 != nil || size <= 0 {
		return 0, 0, errors.New("the server's Content-Range is missing or malformed")
	}
	return from, size, nil
}

// backoff counts consecutive failures, and doubles the pause after each one.
type backoff struct {
	l        *requester
	tries    int
	fix      string // advice after the last failure
	failures int
	pause    time.Duration
}

const maxPause = time.Minute

// after waits before the next attempt. It returns an error if err is not temporary, no tries are
// left or ctx has ended.
func (p *backoff) after(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if !errors.As(err, new(*temporaryError)) {
		return err
	}
	if p.failures++; p.failures > p.tries {
		return run.Advise(err, p.fix)
	}
	p.pause = min(max(2*p.pause, time.Second), maxPause)
	p.l.tell("next attempt in %s: %s", p.pause, machine.OneLine(err))
	return p.l.e.Sleep(ctx, p.pause)
}

// leastInAMinute is the number of bytes that a server must send per minute. Fewer count as a
// failure.
const leastInAMinute = 10 << 10

// rangeReader reads one range. After a failure, it requests the rest of the range.
type rangeReader struct {
	ctx      context.Context
	s        *server
	off, end int64
	until    int64        // end of the current request
	body     *countedBody // nil: the next bytes must be requested
	failed   error        // error of the last attempt
	backoff  backoff
	came     int64         // bytes since the last failure
	waited   time.Duration // time spent reading in the current minute
	minute   int64
}

func (r *rangeReader) Read(b []byte) (n int, err error) {
	if r.off == r.end {
		return 0, io.EOF
	}
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	for n == 0 {
		if r.failed != nil {
			if r.came >= leastInAMinute {
				r.backoff.failures, r.backoff.pause = 0, 0
			}
			r.came = 0
			if err := r.backoff.after(r.ctx, r.failed); err != nil {
				return 0, err
			}
		}
		if n, r.failed = r.try(b); r.failed != nil {
			r.giveUp()
		}
	}
	return n, nil
}

// try sends a request if necessary, and reads from its response.
func (r *rangeReader) try(b []byte) (n int, err error) {
	if r.body == nil {
		r.waited, r.minute, r.until = 0, 0, min(r.end, r.off+r.s.allow.piece())
		if r.body, err = r.s.ask(r.ctx, r.off, r.until); err != nil {
			return 0, err
		}
	}
	n, err = r.read(b[:min(int64(len(b)), r.until-r.off)])
	if r.off == r.until {
		r.Close()
	}
	return n, err
}

// read reads with the rate limit. If the server is too slow, it returns an error.
func (r *rangeReader) read(b []byte) (int, error) {
	s := r.s
	if s.rate > 0 {
		b = b[:min(int64(len(b)), max(s.rate/4, 512))]
	}
	before := s.e.Now()
	n, err := r.body.Read(b)
	now := s.e.Now()
	r.off += int64(n)
	r.came += int64(n)
	r.minute += int64(n)
	r.waited += now.Sub(before)
	switch {
	case r.off == r.until:
		err = nil // the response is complete
	case err == io.EOF:
		err = io.ErrUnexpectedEOF
	case err == nil && r.waited >= time.Minute:
		if r.minute < leastInAMinute {
			err = fmt.Errorf("only %d bytes arrived in a minute", r.minute)
		}
		r.waited, r.minute = 0, 0
	}
	if err != nil {
		return n, &temporaryError{err}
	}
	if s.rate == 0 || n == 0 {
		return n, nil
	}
	if s.due.Before(now) {
		s.due = now
	}
	s.due = s.due.Add(time.Duration(float64(n) / float64(s.rate) * float64(time.Second)))
	return n, s.e.Sleep(r.ctx, s.due.Sub(now))
}

// giveUp ends a request after a failure. The unread rest of the response does not count.
func (r *rangeReader) giveUp() {
	if r.body != nil {
		r.body.left = 0
		r.Close()
	}
}

func (r *rangeReader) Close() error {
	if r.body == nil {
		return nil
	}
	body := r.body
	r.body = nil
	return body.Close()
}

// indexTime bounds the download of an image's index. Its signature is checked afterwards. Until
// then, leastInAMinute alone would let a hostile server take a day for the maximum of 16 MB.
const indexTime = time.Hour

// openIndex reads the index of an image, without checking it. It calls tell every few seconds.
func openIndex(ctx context.Context, src Source, now func() time.Time, tell func(format string, args ...any)) (*update.Image, error) {
	start := now()
	return update.Open(&indexReader{ctx: ctx, src: src, now: now, tell: tell, end: start.Add(indexTime), told: start}, src.Size())
}

// indexReader reads a source, with one request per call.
type indexReader struct {
	ctx  context.Context
	src  Source
	now  func() time.Time
	tell func(format string, args ...any)
	end  time.Time
	came int64     // bytes
	told time.Time // when tell was called last
}

func (r *indexReader) ReadAt(b []byte, off int64) (int, error) {
	body, err := r.src.Open(r.ctx, off, int64(len(b)))
	if err != nil {
		return 0, err
	}
	defer body.Close()
	return io.ReadFull(&bounded{&countingReader{body, r.count}, r.now, r.end, indexTime}, b)
}

func (r *indexReader) count(n int) {
	r.came += int64(n)
	if now := r.now(); now.Sub(r.told) >= tellEvery {
		r.told = now
		r.tell("reading the index of %s: %s", r.src.Name(), bytesize.MB(r.came))
	}
}

// bounded is a reader that fails at a time.
type bounded struct {
	io.Reader
	now   func() time.Time
	end   time.Time
	limit time.Duration
}

func (b *bounded) Read(p []byte) (int, error) {
	if !b.now().Before(b.end) {
		return 0, &temporaryError{fmt.Errorf("the server has not sent it in %s", b.limit)}
	}
	return b.Reader.Read(p)
}
