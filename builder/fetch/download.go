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
	"strconv"
	"strings"
	"time"
)

// Download brings the file that any of urls serves into the cache and
// returns its SHA-256. Mirrors are tried in order; what may be passing (a
// timeout, a cut connection, 429, 5xx) is tried again, what is not (401, 404,
// a wrong digest) is not. With sha256 set, other bytes are refused, and what
// the cache has is not fetched at all. URLs are http, https and file.
func Download(ctx context.Context, c *Cache, urls []string, sha256 string, progress func(done, total int64)) (string, error) {
	d := newDownloader()
	defer d.client.CloseIdleConnections()
	return d.fetch(ctx, c, urls, sha256, progress)
}

// Head is Download of the first n bytes of a file whose digest is not known:
// whoever serves it may send without end.
func Head(ctx context.Context, c *Cache, from string, n int64) (string, error) {
	d := newDownloader()
	d.head = n
	defer d.client.CloseIdleConnections()
	return d.fetch(ctx, c, []string{from}, "", nil)
}

func newDownloader() downloader {
	return downloader{
		rounds: 4,
		pause:  time.Second,
		idle:   time.Minute,
		client: &http.Client{Transport: StayEncrypted(&http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           (&net.Dialer{Timeout: 20 * time.Second}).DialContext,
			TLSHandshakeTimeout:   20 * time.Second,
			ResponseHeaderTimeout: time.Minute,
			// Bytes are named by their digest: they must come as they are.
			DisableCompression: true,
		})},
	}
}

// errDowngrade says that a server would have us leave https.
var errDowngrade = errors.New("the server redirects from https to http, where anybody on the way may change what comes: name an https address, or the http one if that is meant")

// StayEncrypted refuses redirects that lead from https to http.
func StayEncrypted(next http.RoundTripper) http.RoundTripper { return encrypted{next} }

type encrypted struct{ next http.RoundTripper }

func (e encrypted) RoundTrip(req *http.Request) (*http.Response, error) {
	// Response is the redirect that led to this request.
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
	rounds int           // how often each mirror is tried
	pause  time.Duration // before the second round; doubles with each
	idle   time.Duration // longest time without a byte
	head   int64         // how many bytes are wanted; 0: all
	client *http.Client
}

// passing marks an error that time may heal.
type passing struct {
	error
	after time.Duration // what the server asked us to wait
}

func (p passing) Unwrap() error { return p.error }

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
	failed := make(map[string]error, len(urls)) // the last word on each mirror
	left := urls
	pause := d.pause
	for round := 0; len(left) > 0 && round < d.rounds; round++ {
		if round > 0 {
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return "", ctx.Err()
			}
			pause *= 2
		}
		var again []string
		for _, u := range left {
			sha, err := d.once(ctx, c, u, want, progress)
			if err == nil {
				return sha, nil
			}
			if ctx.Err() != nil {
				return "", ctx.Err()
			}
			failed[u] = fmt.Errorf("fetching %s: %w", Redact(u), err)
			var p passing
			if errors.As(err, &p) {
				again = append(again, u)
				pause = max(pause, min(p.after, time.Minute))
			}
		}
		left = again
	}
	var errs []error
	for _, u := range urls {
		errs = append(errs, failed[u])
	}
	return "", errors.Join(errs...)
}

// missing is fs.ErrNotExist in a server's words.
type missing struct{ error }

func (missing) Is(target error) bool { return target == fs.ErrNotExist }

// once tries one mirror once.
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
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		defer cancel()
		resp, err := d.get(ctx, u.String())
		if err != nil {
			return "", err
		}
		total = resp.ContentLength
		idle := time.AfterFunc(d.idle, cancel)
		defer idle.Stop()
		r = &idleReader{ReadCloser: resp.Body, timer: idle, limit: d.idle}
	default:
		return "", fmt.Errorf("scheme %q: use https, http or file", u.Scheme)
	}
	defer r.Close()
	var in io.Reader = &meter{r: r, total: total, tell: progress}
	if d.head > 0 {
		in = io.LimitReader(in, d.head)
	}
	sha, _, err := c.Put(ctx, want, in)
	var wrong *DigestError
	if errors.As(err, &wrong) && want != "" {
		return "", fmt.Errorf("%w; the file there is not the one that was asked for: correct the URL, or its sha256", err)
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
		// url.Error repeats the URL, which may hold a password.
		if ue := (*url.Error)(nil); errors.As(err, &ue) {
			err = ue.Err
		}
		if ne := (*net.DNSError)(nil); errors.As(err, &ne) && ne.IsNotFound {
			err = fmt.Errorf("%s is not known to the name server; check its spelling, and the network", ne.Name)
		}
		if errors.Is(err, errDowngrade) {
			return nil, err
		}
		return nil, passing{error: err}
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	resp.Body.Close()
	err = fmt.Errorf("the server answers %s", resp.Status)
	switch code := resp.StatusCode; {
	case code == http.StatusUnauthorized || code == http.StatusForbidden || code == http.StatusProxyAuthRequired:
		return nil, fmt.Errorf("%w: it wants other credentials (user:password@ in the URL)", err)
	case code == http.StatusNotFound || code == http.StatusGone:
		return nil, missing{fmt.Errorf("%w: check version, name and architecture", err)}
	case code == http.StatusTooManyRequests || code == http.StatusRequestTimeout || code >= 500:
		after, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
		return nil, passing{err, time.Duration(after) * time.Second}
	}
	return nil, err
}

// idleReader ends a transfer that has come to a stand, and marks what goes
// wrong on the way as passing: storing errors are not.
type idleReader struct {
	io.ReadCloser
	timer *time.Timer
	limit time.Duration
}

func (r *idleReader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if err == nil {
		r.timer.Reset(r.limit)
		return n, nil
	}
	if err == io.EOF {
		return n, err
	}
	if !r.timer.Stop() && errors.Is(err, context.Canceled) {
		err = fmt.Errorf("no data for %s", r.limit)
	} else if errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("the connection ended in the middle of the file")
	}
	return n, passing{error: err}
}

// meter tells how far reading has come.
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
