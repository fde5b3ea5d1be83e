package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Remote reads ranges of a file on a web server. If the connection fails, it continues from the
// same byte. The caller must verify the bytes.
type Remote struct {
	ctx   context.Context
	http  *http.Client
	url   string
	size  int64
	sleep func(context.Context, time.Duration) error
}

const (
	// requestTimeout is how long a server may send nothing before a request fails.
	requestTimeout = 30 * time.Second
	// patience is the number of requests in a row that may fail without progress before ReadAt
	// fails.
	patience = 20
	// maxPause is the longest pause between two attempts.
	maxPause = 15 * time.Second
)

// errChanged means that the server now has another file.
var errChanged = errors.New("the image on the server has changed")

// OpenRemote opens the file at a URL. sleep replaces the pause between attempts; nil means a real
// pause.
func OpenRemote(ctx context.Context, url string, sleep func(context.Context, time.Duration) error) (*Remote, error) {
	r := &Remote{ctx: ctx, http: &http.Client{Transport: WithStallTimeout(Transport(requestTimeout, requestTimeout), requestTimeout)}, url: url, sleep: sleep}
	if err := r.find(); err != nil {
		return nil, err
	}
	return r, nil
}

// Size returns the size of the file in bytes.
func (r *Remote) Size() int64 { return r.size }

// find requests the first byte, because the response contains the size of the file.
func (r *Remote) find() error {
	_, err := r.once(make([]byte, 1), 0)
	return err
}

// ReadAt reads the range of len(p) bytes at off.
func (r *Remote) ReadAt(p []byte, off int64) (n int, err error) {
	if off >= r.size {
		return 0, io.EOF
	}
	whole := p
	p = p[:min(int64(len(p)), r.size-off)]
	retry := Retry{Attempts: patience + 1, Pause: time.Second, Longest: maxPause, Sleep: r.sleep}
	err = retry.Do(r.ctx, func() (bool, error) {
		got, err := r.once(p[n:], off+int64(n))
		n += got
		if errors.Is(err, errChanged) {
			return false, Final(err)
		}
		return got > 0, err
	})
	if err != nil {
		return n, err
	}
	if n < len(whole) {
		return n, io.EOF
	}
	return n, nil
}

// once requests a range once, and returns the number of bytes that arrived.
func (r *Remote) once(p []byte, off int64) (int, error) {
	req, err := http.NewRequestWithContext(r.ctx, http.MethodGet, r.url, nil)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+int64(len(p))-1))
	resp, err := r.http.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if err := r.check(resp, off); err != nil {
		return 0, err
	}
	n, err := io.ReadFull(resp.Body, p)
	if err != nil {
		return n, fmt.Errorf("reading %s: %w", r.url, err)
	}
	return n, nil
}

// check compares a response with the request and with earlier responses.
func (r *Remote) check(resp *http.Response, off int64) error {
	switch resp.StatusCode {
	case http.StatusPartialContent:
	case http.StatusOK:
		return fmt.Errorf("reading %s: the server does not support range requests: use another server", r.url)
	default:
		return WithPause(fmt.Errorf("reading %s: the server responded %s", r.url, resp.Status), RetryAfter(resp))
	}
	span, total, ok := strings.Cut(strings.TrimPrefix(resp.Header.Get("Content-Range"), "bytes "), "/")
	from, _, _ := strings.Cut(span, "-")
	size, err := strconv.ParseInt(total, 10, 64)
	if at, badFrom := strconv.ParseInt(from, 10, 64); !ok || err != nil || badFrom != nil || at != off || size <= 0 {
		return fmt.Errorf("reading %s: the server responded with the range %q", r.url, resp.Header.Get("Content-Range"))
	}
	if r.size == 0 {
		r.size = size
	}
	if size != r.size { // an ETag may differ between the servers behind one name
		return fmt.Errorf("reading %s: %w", r.url, errChanged)
	}
	return nil
}
