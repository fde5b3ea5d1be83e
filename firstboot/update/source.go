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

	"github.com/edgebake/edgebake/firstboot/machine"
)

// Source is where an image is. Ranges of it are read.
type Source interface {
	Name() string
	Size() int64
	// Open returns n bytes at an offset.
	Open(ctx context.Context, off, n int64) (io.ReadCloser, error)
	Close() error
}

// final is an error that the same request meets again.
type final struct{ error }

func (f *final) Unwrap() error { return f.error }

// openSource finds the image that a person names: a file, or an http or https URL.
func openSource(ctx context.Context, e *machine.Env, name string, proxy []string) (Source, error) {
	if scheme, _, ok := strings.Cut(name, "://"); ok {
		if scheme != "http" && scheme != "https" {
			return nil, fmt.Errorf("%s: want a file, or a URL that begins with https:// or http://", name)
		}
		s := &server{e: e, url: name, proxy: proxy}
		return s, s.find(ctx)
	}
	f, err := os.Open(e.Path(name))
	if err != nil {
		return nil, fmt.Errorf("opening the image: %w", err)
	}
	size, err := f.Seek(0, io.SeekEnd) // also of a device
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("opening the image: %w", err)
	}
	return &file{f, name, size}, nil
}

// file is an image on this machine, or on a stick.
type file struct {
	f    *os.File
	name string
	size int64
}

func (f *file) Name() string { return f.name }
func (f *file) Size() int64  { return f.size }
func (f *file) Close() error { return f.f.Close() }

func (f *file) Open(_ context.Context, off, n int64) (io.ReadCloser, error) {
	return io.NopCloser(io.NewSectionReader(f.f, off, n)), nil
}

// server is an image on a web server.
type server struct {
	e     *machine.Env
	url   string
	proxy []string
	size  int64
	etag  string
}

func (s *server) Name() string { return s.url }
func (s *server) Size() int64  { return s.size }
func (s *server) Close() error { return nil }

// errReplaced is an image that was replaced by another one.
var errReplaced = errors.New("the server has another image now than at the beginning")

// find asks for the last byte: the answer says how many there are.
func (s *server) find(ctx context.Context) error {
	resp, err := s.get(ctx, "bytes=-1")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, s.size, err = contentRange(resp); err != nil {
		return &final{fmt.Errorf("reading %s: %w", s.url, err)}
	}
	s.etag = resp.Header.Get("ETag")
	return nil
}

// Open asks for one range.
func (s *server) Open(ctx context.Context, off, n int64) (io.ReadCloser, error) {
	resp, err := s.get(ctx, fmt.Sprintf("bytes=%d-%d", off, off+n-1))
	if err != nil {
		return nil, err
	}
	from, size, err := contentRange(resp)
	switch {
	case err != nil:
	case size != s.size || resp.Header.Get("ETag") != s.etag:
		err = errReplaced
	case from != off:
		err = fmt.Errorf("the server answers with bytes from %d on, asked for %d", from, off)
	}
	if err != nil {
		resp.Body.Close()
		return nil, &final{fmt.Errorf("reading %s: %w", s.url, err)}
	}
	return resp.Body, nil
}

// get asks for a range, and rejects an answer of anything else.
func (s *server) get(ctx context.Context, bytes string) (*http.Response, error) {
	resp, err := s.e.Get(ctx, s.url, http.Header{"Range": {bytes}, "Accept-Encoding": {"identity"}}, s.proxy)
	if err != nil {
		return nil, err
	}
	switch code := resp.StatusCode; {
	case code == http.StatusPartialContent:
		return resp, nil
	case code == http.StatusOK:
		err = &final{errors.New("the server answers with the whole image where a part was asked for: it does not know ranges; use another one")}
	case code == http.StatusRequestedRangeNotSatisfiable:
		err = &final{errReplaced}
	case code >= 400 && code < 500 && code != http.StatusRequestTimeout && code != http.StatusTooManyRequests:
		err = &final{fmt.Errorf("the server answers %s", resp.Status)}
	default:
		err = fmt.Errorf("the server answers %s", resp.Status)
	}
	resp.Body.Close()
	return nil, fmt.Errorf("reading %s: %w", s.url, err)
}

// contentRange reads the header of a part: where it begins, and how large the whole is.
func contentRange(resp *http.Response) (from, size int64, err error) {
	text := resp.Header.Get("Content-Range")
	span, total, ok := strings.Cut(strings.TrimPrefix(text, "bytes "), "/")
	begin, _, ok2 := strings.Cut(span, "-")
	from, err1 := strconv.ParseInt(begin, 10, 64)
	size, err2 := strconv.ParseInt(total, 10, 64)
	if !ok || !ok2 || err1 != nil || err2 != nil || size <= 0 {
		return 0, 0, fmt.Errorf("the server does not say which part it sends (Content-Range %q)", text)
	}
	return from, size, nil
}

// readerAt reads a source, for what is read in few pieces.
type readerAt struct {
	ctx context.Context
	src Source
}

func (r readerAt) ReadAt(b []byte, off int64) (int, error) {
	body, err := r.src.Open(r.ctx, off, int64(len(b)))
	if err != nil {
		return 0, err
	}
	defer body.Close()
	return io.ReadFull(body, b)
}
