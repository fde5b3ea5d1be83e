package images

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

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
}

func newRegistry(o *Options, at func(string) string) *registry {
	r := &registry{
		stall:   cmp.Or(o.Stall, 30*time.Second),
		wait:    cmp.Or(o.RetryWait, time.Second),
		at:      at,
		config:  map[string]configs.Registry{},
		pullers: map[string]*remote.Puller{},
	}
	for _, c := range o.Registries {
		r.config[c.Host] = c
	}
	return r
}

func (r *registry) name() string { return "registry" }
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
	var rt http.RoundTripper = tlsOnly{base}
	if config.Insecure {
		base.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} //nolint:gosec // the user said so, for this host
		rt = base
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

// each asks the endpoints in turn until one has it.
func (r *registry) each(ref Ref, f func(*remote.Puller, name.Repository) error) error {
	var errs []error
	for _, e := range r.endpoints(ref) {
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
			return nil
		}
		errs = append(errs, &endpointError{e.host, r.stall, err})
	}
	return errors.Join(errs...)
}

// endpointError is what one registry or mirror answered.
type endpointError struct {
	host  string
	stall time.Duration
	err   error
}

func (e *endpointError) Error() string {
	if isTimeout(e.err) {
		return fmt.Sprintf("%s was silent for %v", e.host, e.stall)
	}
	return fmt.Sprintf("%s: %v", e.host, e.err)
}

func (e *endpointError) Unwrap() error { return e.err }

func isTimeout(err error) bool {
	var ne net.Error
	return errors.Is(err, errStalled) || errors.As(err, &ne) && ne.Timeout()
}

func (r *registry) root(ctx context.Context, ref Ref) (Descriptor, error) {
	var d Descriptor
	err := r.each(ref, func(p *remote.Puller, repo name.Repository) error {
		got, err := p.Get(ctx, r.reference(repo, ref))
		if err != nil {
			return err
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
	err := r.each(ref, func(p *remote.Puller, repo name.Repository) error {
		if isIndex(d.MediaType) || isManifest(d.MediaType) {
			got, err := p.Get(ctx, repo.Digest(d.Digest))
			if err != nil {
				return err
			}
			body = io.NopCloser(strings.NewReader(string(got.Manifest)))
			return nil
		}
		ctx, cancel := context.WithCancelCause(ctx)
		l, err := p.Layer(ctx, repo.Digest(d.Digest))
		if err != nil {
			cancel(nil)
			return err
		}
		b, err := l.Compressed()
		if err != nil {
			cancel(nil)
			return err
		}
		body = watchStall(ctx, b, cancel, r.stall)
		return nil
	})
	return body, err
}

var errStalled = errors.New("no more data came")

// stallReader ends a transfer that yields nothing for too long. A transfer
// that is merely slow goes on.
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

// cureOf is what a person can do about a failure to fetch.
func cureOf(err error) string {
	var te *transport.Error
	var de *fetch.DigestError
	var unknown *net.DNSError
	var refused *net.OpError
	var untrusted *tls.CertificateVerificationError
	switch {
	case errors.Is(err, errAuthFile):
		return "correct authFile in registries:, or the file"
	case errors.As(err, &te):
		switch {
		case te.StatusCode == http.StatusUnauthorized || te.StatusCode == http.StatusForbidden:
			return "log in to the registry, or name a file with credentials as authFile in registries: (registries also answer so when the image does not exist)"
		case te.StatusCode == http.StatusNotFound:
			return "check repository, tag and digest for spelling"
		case te.StatusCode == http.StatusTooManyRequests:
			return "the registry limits requests: wait, log in, or name a mirror in registries:"
		case te.StatusCode >= 500:
			return "the registry is failing: try later, or name a mirror in registries:"
		}
	case errors.Is(err, errPlainHTTP):
		return "set insecure: true for this host in registries: if plain HTTP is meant"
	case errors.Is(err, context.Canceled):
		return ""
	case errors.As(err, &untrusted):
		return "have this machine trust the registry's CA; or, where that does not matter, set insecure: true for this host in registries:"
	case errors.As(err, &unknown) && unknown.IsNotFound:
		return "check the registry's name for spelling, and the network; or name a mirror in registries:"
	case isTimeout(err) || errors.As(err, &refused):
		return "check the network and the proxy settings, or name a mirror in registries:"
	case errors.As(err, &de), strings.Contains(err.Error(), "error verifying sha256 checksum"): // the client's, whose type is internal
		return "the source is damaged or was changed on its way; fetch it again or use another source"
	case errors.Is(err, errDigestForm):
		return "the source is damaged; use another"
	case errors.Is(err, fs.ErrNotExist):
		return "the layout or archive is incomplete; make it again, with this platform"
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "the blob is cut short; fetch it again or use another source"
	}
	return ""
}

// authFile is a docker config.json without credential helpers.
type authFile map[string]struct {
	Auth          string `json:"auth"`
	Username      string `json:"username"`
	Password      string `json:"password"`
	IdentityToken string `json:"identitytoken"`
	RegistryToken string `json:"registrytoken"`
}

var errAuthFile = errors.New("reading authFile")

func readAuthFile(path string) (authFile, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errAuthFile, err)
	}
	var doc struct {
		Auths authFile `json:"auths"`
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		// The decoder's message may quote the file, which holds secrets.
		return nil, fmt.Errorf("%w %s: it is not a docker config.json", errAuthFile, path)
	}
	return doc.Auths, nil
}

// Resolve finds the credentials for a repository: its own before its
// registry's.
func (a authFile) Resolve(target authn.Resource) (authn.Authenticator, error) {
	keys := []string{target.String(), target.RegistryStr(), "https://" + target.RegistryStr(), "https://" + target.RegistryStr() + "/v1/"}
	if target.RegistryStr() == name.DefaultRegistry {
		keys = append(keys, "docker.io", authn.DefaultAuthKey)
	}
	for _, key := range keys {
		c, ok := a[key]
		if !ok {
			continue
		}
		if c.Auth != "" {
			raw, err := base64.StdEncoding.DecodeString(c.Auth)
			user, password, ok := strings.Cut(string(raw), ":")
			if err != nil || !ok {
				return nil, fmt.Errorf("%w: the auth entry of %s is not base64 of user:password", errAuthFile, key)
			}
			c.Username, c.Password = user, password
		}
		return authn.FromConfig(authn.AuthConfig{
			Username: c.Username, Password: c.Password,
			IdentityToken: c.IdentityToken, RegistryToken: c.RegistryToken,
		}), nil
	}
	return authn.Anonymous, nil
}
