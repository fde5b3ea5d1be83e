package images

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/docker/cli/cli/config/configfile"
	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// registry fetches from the registry a reference names, or a mirror of it.
type registry struct {
	stall, wait time.Duration
	config      map[string]configs.Registry // by host
	at          func(string) string         // makes a path absolute

	mu      sync.Mutex
	pullers map[string]*remote.Puller // by host
	tries   map[string]*tries         // by digest
	silent  map[string]int            // how often a host was
	warn    func(text string)
	warned  map[string]bool // of this host
}

// tries is what became of the attempts to fetch one blob.
type tries struct {
	at    string                    // the host that was asked last
	count map[string]int            // failures, by host
	errs  map[string]*endpointError // the last failure, by host
	total int                       // transfers that failed
}

func newRegistry(o *Options, at func(string) string) *registry {
	r := &registry{
		stall:   cmp.Or(o.Stall, 30*time.Second),
		wait:    cmp.Or(o.RetryWait, time.Second),
		at:      at,
		config:  map[string]configs.Registry{},
		pullers: map[string]*remote.Puller{},
		tries:   map[string]*tries{},
		silent:  map[string]int{},
		warn:    o.Warn,
		warned:  map[string]bool{},
	}
	for _, c := range o.Registries {
		r.config[c.Host] = c
	}
	return r
}

// name is empty: the reference says which registry, errors which mirror.
func (r *registry) name() string { return "" }
func (r *registry) Close() error { return nil }

// endpoint is one place to ask for a repository.
type endpoint struct {
	host string // host[:port]
	repo string
}

// endpoints lists the mirrors of a registry, then the registry.
func (r *registry) endpoints(ref Ref) []endpoint {
	var es []endpoint
	for _, m := range r.config[ref.Domain].Mirrors {
		// A URL's scheme decides nothing: plain HTTP is for hosts that are
		// said to be insecure.
		m = strings.TrimPrefix(strings.TrimPrefix(m, "https://"), "http://")
		host, prefix, _ := strings.Cut(strings.Trim(m, "/"), "/")
		repo := ref.Path
		if prefix != "" {
			repo = prefix + "/" + repo
		}
		es = append(es, endpoint{host, repo})
	}
	return append(es, endpoint{ref.Domain, ref.Path})
}

// puller returns the client for a host, which keeps its connections and
// tokens.
func (r *registry) puller(host string) (*remote.Puller, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.pullers[host]; p != nil {
		return p, nil
	}
	config := r.config[host]
	base := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: r.stall}).DialContext,
		TLSHandshakeTimeout:   r.stall,
		ResponseHeaderTimeout: r.stall,
		IdleConnTimeout:       90 * time.Second,
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   8,
	}
	var rt http.RoundTripper = impatient{base, r.stall}
	if config.Insecure {
		base.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} //nolint:gosec // the user said so, for this host
	} else {
		rt = tlsOnly{rt}
	}
	keys := authn.Keychain(authn.DefaultKeychain)
	if config.AuthFile != "" {
		k, err := readAuthFile(r.at(config.AuthFile))
		if err != nil {
			return nil, err
		}
		keys = k
	}
	p, err := remote.NewPuller(
		remote.WithTransport(rt),
		remote.WithAuthFromKeychain(keys),
		remote.WithUserAgent("edgebake"),
		remote.WithRetryBackoff(remote.Backoff{Duration: r.wait, Factor: 3, Jitter: 0.1, Steps: 3}),
	)
	if err != nil {
		return nil, err
	}
	r.pullers[host] = p
	return p, nil
}

// tlsOnly refuses plain HTTP, which the client library would otherwise try by
// itself for hosts it takes for local.
type tlsOnly struct{ base http.RoundTripper }

var errPlainHTTP = errors.New("plain HTTP is refused")

func (t tlsOnly) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" {
		return nil, fmt.Errorf("%s: %w", req.URL.Host, errPlainHTTP)
	}
	return t.base.RoundTrip(req)
}

func (r *registry) repository(e endpoint) (name.Repository, error) {
	opts := []name.Option{}
	if r.config[e.host].Insecure {
		opts = append(opts, name.Insecure)
	}
	return name.NewRepository(e.host+"/"+e.repo, opts...)
}

// each asks the endpoints in turn until one has it. Those that spoiled the blob
// before are asked last, and those that were silent, which may take long;
// digest is empty for what is asked by name.
func (r *registry) each(ref Ref, digest string, f func(*remote.Puller, name.Repository) error) error {
	es := r.endpoints(ref)
	t := r.triesOf(digest)
	r.mu.Lock()
	slices.SortStableFunc(es, func(a, b endpoint) int {
		return cmp.Compare(t.count[a.host]+r.silent[a.host], t.count[b.host]+r.silent[b.host])
	})
	r.mu.Unlock()
	var errs endpointErrors
	for n, e := range es {
		err := func() error {
			p, err := r.puller(e.host)
			if err != nil {
				return err
			}
			repo, err := r.repository(e)
			if err != nil {
				return err
			}
			return f(p, repo)
		}()
		if err == nil {
			r.mu.Lock()
			t.at = e.host
			r.mu.Unlock()
			return nil
		}
		failed := &endpointError{e.host, digest, r.stall, err}
		errs = append(errs, failed)
		r.mu.Lock()
		r.failed(t, failed)
		if n < len(es)-1 && isTimeout(err) {
			r.warnOnce(failed, "asking the next, and this one last from now on")
		}
		r.mu.Unlock()
	}
	return errs.join()
}

// warnOnce tells what costs time though it may end well. r.mu is held.
func (r *registry) warnOnce(e *endpointError, goOn string) {
	if r.warn != nil && !r.warned[e.host] {
		r.warn(e.Error() + "; " + goOn)
	}
	r.warned[e.host] = true
}

// failed takes down what a host did wrong. r.mu is held.
func (r *registry) failed(t *tries, e *endpointError) {
	t.count[e.host]++
	t.errs[e.host] = e
	if isTimeout(e.err) {
		r.silent[e.host]++
	}
}

func (r *registry) triesOf(digest string) *tries {
	r.mu.Lock()
	defer r.mu.Unlock()
	if t := r.tries[digest]; t != nil {
		return t
	}
	t := &tries{count: map[string]int{}, errs: map[string]*endpointError{}}
	if digest != "" {
		r.tries[digest] = t
	}
	return t
}

// attempts is how often a blob is asked for whose transfer breaks off.
const attempts = 3

// spoiled notes that the transfer of a blob failed after it had begun, and
// tells how long to wait before it is asked for again, or what to say instead.
func (r *registry) spoiled(ref Ref, digest string, err error) (time.Duration, error) {
	t := r.triesOf(digest)
	es := r.endpoints(ref)
	r.mu.Lock()
	defer r.mu.Unlock()
	failed := &endpointError{t.at, digest, r.stall, err}
	r.failed(t, failed)
	t.total++
	switch {
	case slices.ContainsFunc(es, func(e endpoint) bool { return t.count[e.host] == 0 }):
		r.warnOnce(failed, "asking the next")
		return 0, nil
	// Who sends wrong bytes will send them again.
	case isBroken(err) && t.total < attempts+len(es)-1:
		r.warnOnce(failed, "asking again")
		return r.wait * time.Duration(t.total), nil
	}
	var errs endpointErrors
	for _, e := range es {
		if failed := t.errs[e.host]; failed != nil {
			errs = append(errs, failed)
		}
	}
	return 0, errs.join()
}

// isBroken reports whether a transfer broke off, as opposed to having been
// refused or having brought wrong bytes.
func isBroken(err error) bool {
	return isTimeout(err) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// again calls f, which fetches a blob, until that succeeds or there is no
// hope. The client library repeats requests; a transfer that broke off in the
// middle is ours to repeat, and bytes that one mirror spoiled are asked of the
// next.
func again(ctx context.Context, src source, ref Ref, digest string, f func() error) error {
	for {
		err := f()
		r, remote := src.(*registry)
		if err == nil || !remote || ctx.Err() != nil {
			return err
		}
		var unopened *endpointError
		var wrong *fetch.DigestError
		switch {
		case errors.As(err, &unopened):
			return err
		case isBroken(err), errors.Is(err, errTooLong), errors.As(err, &wrong) && "sha256:"+wrong.Want == digest:
		default:
			return err // not the registry's doing
		}
		wait, err := r.spoiled(ref, digest, err)
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// endpointError is what one registry or mirror answered.
type endpointError struct {
	host   string
	digest string // of the blob that was asked for; empty for a name
	stall  time.Duration
	err    error
}

// Error puts into plain words what the client library tells with requests and
// pages of HTML.
func (e *endpointError) Error() string {
	var te *transport.Error
	var untrusted *tls.CertificateVerificationError
	var unknown *net.DNSError
	var op *net.OpError
	var ue *url.Error
	// Those who log in or fetch blobs may be sent elsewhere.
	who, sentTo := e.host, ""
	if errors.As(e.err, &te) && te.Request != nil {
		sentTo = te.Request.URL.Host
	} else if errors.As(e.err, &ue) {
		sentTo = urlHost(ue.URL)
	}
	if sentTo != "" && sentTo != e.host {
		who += " (" + sentTo + ")"
	}
	switch {
	case isTimeout(e.err):
		return fmt.Sprintf("%s was silent for %v", who, e.stall)
	case errors.As(e.err, &te):
		s := fmt.Sprintf("%s answered %d %s", who, te.StatusCode, http.StatusText(te.StatusCode))
		for _, d := range te.Errors {
			if said := strings.Join(strings.Fields(cmp.Or(d.Message, string(d.Code))), " "); said != "" {
				s += ": " + strings.ToValidUTF8(said[:min(len(said), 200)], "")
			}
		}
		return s
	case errors.As(e.err, &untrusted):
		return fmt.Sprintf("%s has a certificate that cannot be verified: %v", who, untrusted.Err)
	case errors.Is(e.err, http.ErrSchemeMismatch):
		return who + " speaks plain HTTP, not HTTPS"
	case errors.Is(e.err, errPlainHTTP) && sentTo != "":
		return fmt.Sprintf("%s sends on to %s over plain HTTP, which is refused", e.host, sentTo)
	case errors.As(e.err, &unknown) && unknown.IsNotFound:
		return who + " is not known to the name server"
	case errors.As(e.err, &op) && op.Op == "dial":
		return fmt.Sprintf("%s cannot be reached: %v", who, op.Err)
	case e.err == io.ErrUnexpectedEOF:
		return e.host + " broke off in the middle"
	case errors.As(e.err, &ue):
		return fmt.Sprintf("%s: %v", who, ue.Err)
	}
	return fmt.Sprintf("%s: %v", e.host, e.err)
}

func (e *endpointError) Unwrap() error { return e.err }

// urlHost leaves out what a URL may tell beside: paths and tokens.
func urlHost(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return "another place"
	}
	return u.Host
}

// endpointErrors is what a registry and its mirrors answered, each with its
// own fix.
type endpointErrors []*endpointError

func (es endpointErrors) join() error {
	if len(es) == 1 {
		return es[0]
	}
	return es
}

func (es endpointErrors) Error() string {
	var b strings.Builder
	b.WriteString("neither a mirror nor the registry gives it:")
	for _, e := range es {
		b.WriteString("\n  " + e.Error())
		if c := fixOf(e); c != "" {
			b.WriteString("; " + c)
		}
	}
	return b.String()
}

func (es endpointErrors) Unwrap() []error {
	var out []error
	for _, e := range es {
		out = append(out, e)
	}
	return out
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.Is(err, errStalled) || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &ne) && ne.Timeout()
}

var errNoManifest = errors.New("which is no manifest")

func (r *registry) root(ctx context.Context, ref Ref) (Descriptor, error) {
	var d Descriptor
	err := r.each(ref, "", func(p *remote.Puller, repo name.Repository) error {
		got, err := p.Get(ctx, r.reference(repo, ref))
		if err != nil {
			return err
		}
		if !strings.HasPrefix(strings.TrimSpace(string(got.Manifest)), "{") {
			return fmt.Errorf("it answered with %s, %w", cmp.Or(string(got.MediaType), "bytes"), errNoManifest)
		}
		d = Descriptor{MediaType: string(got.MediaType), Digest: got.Digest.String(), Size: got.Size}
		return nil
	})
	return d, err
}

func (r *registry) reference(repo name.Repository, ref Ref) name.Reference {
	if ref.Digest != "" {
		return repo.Digest(ref.Digest)
	}
	return repo.Tag(ref.Tag)
}

func (r *registry) open(ctx context.Context, ref Ref, d Descriptor) (io.ReadCloser, error) {
	var body io.ReadCloser
	err := r.each(ref, d.Digest, func(p *remote.Puller, repo name.Repository) error {
		if isIndex(d.MediaType) || isManifest(d.MediaType) {
			got, err := p.Get(ctx, repo.Digest(d.Digest))
			if err != nil {
				return err
			}
			body = io.NopCloser(strings.NewReader(string(got.Manifest)))
			return nil
		}
		l, err := p.Layer(ctx, repo.Digest(d.Digest))
		if err != nil {
			return err
		}
		if body, err = l.Compressed(); err == nil {
			body = unverified{body}
		}
		return err
	})
	return body, err
}

// unverified makes what the client library finds wrong with a blob's digest an
// ordinary end: who reads a source verifies it, and can tell more.
type unverified struct{ io.ReadCloser }

func (u unverified) Read(p []byte) (int, error) {
	n, err := u.ReadCloser.Read(p)
	if err != nil && strings.Contains(err.Error(), "error verifying") { // its type is internal
		err = io.EOF
	}
	return n, err
}

// impatient ends answers that yield nothing for too long. One that is merely
// slow goes on.
type impatient struct {
	base  http.RoundTripper
	limit time.Duration
}

func (i impatient) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	resp, err := i.base.RoundTrip(req.WithContext(ctx))
	if err != nil {
		cancel(nil)
		return nil, err
	}
	resp.Body = watchStall(ctx, resp.Body, cancel, i.limit)
	return resp, nil
}

var errStalled = errors.New("no more data came")

type stallReader struct {
	ctx    context.Context
	body   io.ReadCloser
	cancel context.CancelCauseFunc
	timer  *time.Timer
	limit  time.Duration
}

func watchStall(ctx context.Context, body io.ReadCloser, cancel context.CancelCauseFunc, limit time.Duration) io.ReadCloser {
	s := &stallReader{ctx: ctx, body: body, cancel: cancel, limit: limit}
	s.timer = time.AfterFunc(limit, func() { cancel(fmt.Errorf("%w for %v", errStalled, limit)) })
	s.timer.Stop()
	return s
}

func (s *stallReader) Read(p []byte) (int, error) {
	// Only waiting for the registry counts, not what the reader does with
	// the data.
	s.timer.Reset(s.limit)
	n, err := s.body.Read(p)
	s.timer.Stop()
	if err != nil && err != io.EOF {
		if cause := context.Cause(s.ctx); cause != nil {
			err = cause
		}
	}
	return n, err
}

func (s *stallReader) Close() error {
	s.timer.Stop()
	err := s.body.Close()
	s.cancel(nil)
	return err
}

// fixOf is what a person can do about a failure to fetch.
func fixOf(err error) string {
	var te *transport.Error
	var de *fetch.DigestError
	var unknown *net.DNSError
	var refused *net.OpError
	var untrusted *tls.CertificateVerificationError
	switch {
	case errors.Is(err, errAuthFile):
		return "correct authFile in registries:, or the file"
	case errors.As(err, &te):
		var asked *endpointError
		switch {
		case te.StatusCode == http.StatusUnauthorized || te.StatusCode == http.StatusForbidden:
			return "log in to the registry, or name a file with credentials as authFile in registries: (registries also answer so when the image does not exist)"
		case te.StatusCode == http.StatusNotFound && errors.As(err, &asked) && asked.digest != "":
			return "it lacks a part of the image: have the image pushed again, or name a mirror in registries:"
		case te.StatusCode == http.StatusNotFound:
			return "check repository, tag and digest for spelling"
		case te.StatusCode == http.StatusTooManyRequests:
			return "the registry limits requests: wait, log in, or name a mirror in registries:"
		case te.StatusCode >= 500:
			return "the registry is failing: try later, or name a mirror in registries:"
		}
	case errors.Is(err, context.Canceled):
		return ""
	case isTimeout(err):
		return "check the network and the proxy settings, or name a mirror in registries:"
	case errors.As(err, &untrusted):
		return "have this machine trust the registry's CA; or, where that does not matter, set insecure: true for this host in registries:"
	case errors.Is(err, http.ErrSchemeMismatch), errors.Is(err, errPlainHTTP):
		return "set insecure: true for this host in registries: if plain HTTP is meant"
	case errors.Is(err, errNoManifest):
		return "it is no registry, or a proxy or login page answers in its place: check its name and the network"
	case errors.As(err, &unknown) && unknown.IsNotFound:
		return "check the registry's name for spelling, and the network; or name a mirror in registries:"
	case errors.As(err, &refused):
		return "check the network and the proxy settings, or name a mirror in registries:"
	case strings.Contains(err.Error(), "invalid realm in www-authenticate"): // the client's, which has no type for it
		return "the registry must send to its login server (realm) by a host name, and by https unless insecure is set"
	case errors.As(err, &de):
		return "the source is damaged or was changed on its way; fetch it again or use another source"
	case errors.Is(err, errDigestForm):
		return "the source is damaged; use another"
	case errors.Is(err, fs.ErrNotExist):
		return "the layout or archive is incomplete; make it again, with this platform"
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		return "fetch it again, or use another source"
	}
	return ""
}

// authFile is a docker config.json, credential helpers and stores included, as
// docker itself reads it.
type authFile struct{ *configfile.ConfigFile }

var errAuthFile = errors.New("reading authFile")

func readAuthFile(path string) (authFile, error) {
	raw, err := readFile(path)
	if err != nil {
		return authFile{}, fmt.Errorf("%w: %w", errAuthFile, err)
	}
	a := authFile{configfile.New(path)}
	switch err := a.LoadFromReader(bytes.NewReader(raw)); {
	case err == nil && len(raw) > 0:
		return a, nil
	case err == nil: // which LoadFromReader takes for no logins
	case errors.As(err, new(base64.CorruptInputError)), err.Error() == "invalid auth configuration file":
		return authFile{}, fmt.Errorf("%w %s: an auth entry is not base64 of user:password", errAuthFile, path)
	}
	// The decoder's message may quote the file, which holds secrets.
	return authFile{}, fmt.Errorf("%w %s: it is not a docker config.json", errAuthFile, path)
}

// Resolve finds the credentials for a repository: its own before its
// registry's.
func (a authFile) Resolve(target authn.Resource) (authn.Authenticator, error) {
	keys := []string{target.String(), target.RegistryStr()}
	if target.RegistryStr() == name.DefaultRegistry {
		keys = append(keys, "docker.io", authn.DefaultAuthKey)
	}
	for _, key := range keys {
		c, err := a.GetAuthConfig(key)
		if err != nil {
			return nil, fmt.Errorf("%w %s: asking its credential helper for the login of %s: %w", errAuthFile, a.Filename, key, err)
		}
		login := authn.AuthConfig{Username: c.Username, Password: c.Password, IdentityToken: c.IdentityToken, RegistryToken: c.RegistryToken}
		if login != (authn.AuthConfig{}) {
			return authn.FromConfig(login), nil
		}
	}
	return authn.Anonymous, nil
}
