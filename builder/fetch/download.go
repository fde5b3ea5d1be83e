package fetch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/transfer"
	"github.com/edgebake/edgebake/configs/bytesize"
)

// Download fetches a file into the cache and returns its SHA-256. urls are mirrors (http, https or
// file), which it tries in order. It retries after temporary errors (a timeout, a broken
// connection, 429, 5xx), but not after others (401, 404, a wrong digest).
//
// If sha256 is set, Download rejects other bytes, and does not fetch a file that is in the cache.
// It rejects a file of more than limit bytes, since a server may send without end.
func Download(ctx context.Context, c *Cache, urls []string, sha256 string, limit int64, progress func(done, total int64)) (string, error) {
	d := newDownloader()
	d.limit = limit
	defer d.client.CloseIdleConnections()
	return d.fetch(ctx, c, urls, sha256, progress)
}

// Head fetches the first n bytes of a file whose digest is unknown.
func Head(ctx context.Context, c *Cache, from string, n int64) (string, error) {
	d := newDownloader()
	d.head = n
	defer d.client.CloseIdleConnections()
	return d.fetch(ctx, c, []string{from}, "", nil)
}

func newDownloader() downloader {
	const silence = time.Minute
	base := transfer.Transport(20*time.Second, silence)
	// Do not uncompress: the digest is that of the bytes as they are sent.
	base.DisableCompression = true
	return downloader{
		rounds: 4,
		pause:  time.Second,
		client: &http.Client{Transport: StayEncrypted(transfer.WithStallTimeout(base, silence))},
	}
}

// errDowngrade means that a server redirected from https to http.
var errDowngrade = errors.New("the server redirects from https to http, over which the file can be changed in transit: use an https URL, or name the http URL if that is intended")

// StayEncrypted wraps a transport and rejects redirects from https to http.
func StayEncrypted(next http.RoundTripper) http.RoundTripper { return encrypted{next} }

type encrypted struct{ next http.RoundTripper }

func (e encrypted) RoundTrip(req *http.Request) (*http.Response, error) {
	// from is the redirect that led to this request.
	if from := req.Response; from != nil && from.Request != nil && from.Request.URL.Scheme == "https" && req.URL.Scheme != "https" {
		return nil, errDowngrade
	}
	return e.next.RoundTrip(req)
}

func (e encrypted) CloseIdleConnections() {
	if c, ok := e.next.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

type downloader struct {
	rounds int           // number of attempts for each mirror
	pause  time.Duration // wait before the second round; doubles with each further round
	head   int64         // bytes to fetch; 0 means all
	limit  int64         // largest accepted size in bytes; 0 means no limit
	client *http.Client
}

// temporaryError is an error after which a retry may succeed.
type temporaryError struct{ error }

func (p temporaryError) Unwrap() error { return p.error }

func (d downloader) fetch(ctx context.Context, c *Cache, urls []string, want string, progress func(done, total int64)) (string, error) {
	if want != "" && c.Has(want) {
		return want, nil
	}
	if len(urls) == 0 {
		return "", errors.New("fetching: no URL given")
	}
	if progress == nil {
		progress = func(int64, int64) {}
	}
	sha := ""
	retry := transfer.Retry{Attempts: d.rounds, Pause: d.pause}
	err := retry.Each(ctx, len(urls), func(i int) (err error) {
		if sha, err = d.once(ctx, c, urls[i], want, progress); err == nil {
			return nil
		}
		failed := fmt.Errorf("fetching %s: %w", Redact(urls[i]), err)
		if !errors.As(err, new(temporaryError)) {
			return transfer.Final(failed)
		}
		return failed
	})
	if all := (*transfer.Failures)(nil); errors.As(err, &all) {
		err = errors.Join(all.Errs...) // report the error of each mirror separately
	}
	if err != nil {
		return "", err
	}
	return sha, nil
}

// missing is the error for a response that means "no such file". It matches fs.ErrNotExist.
type missing struct{ error }

func (missing) Is(target error) bool { return target == fs.ErrNotExist }

// once makes one attempt with one mirror.
func (d downloader) once(ctx context.Context, c *Cache, from, want string, progress func(done, total int64)) (string, error) {
	u, err := url.Parse(from)
	if err != nil {
		return "", errors.New("not a URL")
	}
	var r io.ReadCloser
	total := int64(-1)
	switch u.Scheme {
	case "file":
		f, err := os.Open(filepath.FromSlash(u.Path))
		if err != nil {
			return "", err
		}
		if fi, err := f.Stat(); err == nil {
			total = fi.Size()
		}
		r = f
	case "http", "https":
		resp, err := d.get(ctx, u.String())
		if err != nil {
			return "", err
		}
		total = resp.ContentLength
		r = responseBody{resp.Body}
	default:
		return "", fmt.Errorf("scheme %q: use https, http or file", u.Scheme)
	}
	defer r.Close()
	if d.limit > 0 && total > d.limit {
		return "", tooLarge(total, d.limit)
	}
	var in io.Reader = &meter{r: r, total: total, tell: progress}
	if d.limit > 0 {
		in = &bounded{r: in, left: d.limit, limit: d.limit}
	}
	if d.head > 0 {
		in = io.LimitReader(in, d.head)
	}
	sha, _, err := c.Put(ctx, want, in)
	var wrong *DigestError
	if errors.As(err, &wrong) && want != "" {
		return "", fmt.Errorf("%w; the file on the server is not the expected one: correct the URL, or its sha256", err)
	}
	return sha, err
}

func (d downloader) get(ctx context.Context, u string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("User-Agent", "edgebake")
	resp, err := d.client.Do(req)
	if err != nil {
		// A url.Error repeats the URL, which may contain a password.
		if ue := (*url.Error)(nil); errors.As(err, &ue) {
			err = ue.Err
		}
		if ne := (*net.DNSError)(nil); errors.As(err, &ne) && ne.IsNotFound {
			err = fmt.Errorf("%s is not found in DNS; check its spelling, and the network", ne.Name)
		}
		if errors.Is(err, io.EOF) {
			err = errors.New("the server closed the connection without a response")
		}
		if errors.Is(err, errDowngrade) {
			return nil, err
		}
		return nil, temporaryError{err}
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	resp.Body.Close()
	err = fmt.Errorf("the server responded with %s", resp.Status)
	switch code := resp.StatusCode; {
	case code == http.StatusUnauthorized || code == http.StatusForbidden || code == http.StatusProxyAuthRequired:
		return nil, fmt.Errorf("%w: other credentials are required (user:password@ in the URL)", err)
	case code == http.StatusNotFound || code == http.StatusGone:
		return nil, missing{fmt.Errorf("%w: check version, name and architecture", err)}
	case transfer.IsTemporary(code):
		return nil, temporaryError{transfer.WithPause(err, transfer.RetryAfter(resp))}
	}
	return nil, err
}

// responseBody is a response body whose read errors are temporary. Errors of the cache are not
// temporary.
type responseBody struct{ io.ReadCloser }

func (r responseBody) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	switch {
	case err == nil || err == io.EOF:
		return n, err
	case errors.Is(err, io.ErrUnexpectedEOF):
		err = errors.New("the connection ended in the middle of the file")
	}
	return n, temporaryError{err}
}

// tooLarge returns the error for a file that exceeds the limit. size is -1 if it is unknown.
func tooLarge(size, limit int64) error {
	has := "more than " + bytesize.MiB(limit)
	if size >= 0 {
		has = bytesize.MiB(size) + ", and the limit is " + bytesize.MiB(limit)
	}
	return fmt.Errorf("the file is too large (%s): correct the URL, or use another mirror", has)
}

// bounded is a reader that fails after limit bytes.
type bounded struct {
	r           io.Reader
	left, limit int64
}

func (b *bounded) Read(p []byte) (int, error) {
	// Read one more byte than the limit, to detect a larger file.
	n, err := b.r.Read(p[:min(int64(len(p)), b.left+1)])
	if b.left -= int64(n); b.left < 0 {
		return 0, tooLarge(-1, b.limit)
	}
	return n, err
}

// meter is a reader that reports its progress.
type meter struct {
	r           io.Reader
	done, total int64
	tell        func(done, total int64)
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	m.done += int64(n)
	m.tell(m.done, m.total)
	return n, err
}

// Redact returns a URL without its password, for messages.
func Redact(from string) string {
	u, err := url.Parse(from)
	if err != nil {
		before, _, _ := strings.Cut(from, "?")
		return before
	}
	return u.Redacted()
}
