package images

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/registry"
	"github.com/edgebake/edgebake/builder/transfer"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// registrySource fetches blobs from the registry in a reference, or from its mirrors.
type registrySource struct {
	stall, wait time.Duration
	config      map[string]configs.Registry // host → configuration
	at          func(string) string         // makes a path absolute

	mu       sync.Mutex
	pullers  map[string]*remote.Puller // host → client
	timeouts map[string]int            // host → number of timeouts
	warned   map[string]bool
	warn     func(text string)
}

func newRegistry(o *Options, at func(string) string) *registrySource {
	r := &registrySource{
		stall:    cmp.Or(o.Stall, 30*time.Second),
		wait:     cmp.Or(o.RetryWait, time.Second),
		at:       at,
		config:   map[string]configs.Registry{},
		pullers:  map[string]*remote.Puller{},
		timeouts: map[string]int{},
		warn:     o.Warn,
		warned:   map[string]bool{},
	}
	for _, c := range o.Registries {
		r.config[c.Host] = c
	}
	return r
}

// name returns "": the reference contains the registry, and errors name the mirror.
func (r *registrySource) name() string { return "" }
func (r *registrySource) Close() error { return nil }

// endpoint is a repository on a registry or on a mirror.
type endpoint struct {
	host string // host or host:port
	repo string
}

// endpoints returns the mirrors of a registry, followed by the registry itself.
func (r *registrySource) endpoints(ref imageref.Ref) []endpoint {
	var es []endpoint
	for _, m := range r.config[ref.Domain].Mirrors {
		// Ignore the URL's scheme: edgebake uses plain HTTP only for hosts with insecure: true.
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

// puller returns the client for a host. It keeps the connections and tokens of the host.
func (r *registrySource) puller(host string) (*remote.Puller, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.pullers[host]; p != nil {
		return p, nil
	}
	config := r.config[host]
	path := ""
	if config.AuthFile != "" {
		path = r.at(config.AuthFile)
	}
	keys, err := registry.Logins(path)
	if err != nil {
		return nil, err
	}
	rt := registry.Access{Insecure: config.Insecure, Stall: r.stall}.Transport()
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

func (r *registrySource) repository(e endpoint) (name.Repository, error) {
	opts := []name.Option{}
	if r.config[e.host].Insecure {
		opts = append(opts, name.Insecure)
	}
	return name.NewRepository(e.host+"/"+e.repo, opts...)
}

// attempts is how often a transfer from one host is tried.
const attempts = 3

// each calls f for the endpoints in turn until one call succeeds. Hosts that have timed out come
// last. digest is empty for a request by tag. f reports whether the transfer had begun.
func (r *registrySource) each(ctx context.Context, ref imageref.Ref, digest imageref.Digest, f func(*remote.Puller, name.Repository) (begun bool, err error)) error {
	es := r.endpoints(ref)
	r.mu.Lock()
	slices.SortStableFunc(es, func(a, b endpoint) int { return cmp.Compare(r.timeouts[a.host], r.timeouts[b.host]) })
	r.mu.Unlock()
	retry := transfer.Retry{Attempts: attempts, Pause: r.wait}
	err := retry.Each(ctx, len(es), func(i int) error {
		begun, err := r.ask(es[i], f)
		if err == nil || ctx.Err() != nil {
			return err
		}
		failed := &registry.Error{Host: es[i].host, Digest: string(digest), Stall: r.stall, AuthFile: r.config[es[i].host].AuthFile, Err: err}
		if begun && !transfer.IsBroken(err) && !wrongBytes(err, digest) {
			return transfer.Stop(err) // not an error of the registry
		}
		r.failed(failed, begun, i < len(es)-1)
		if begun && transfer.IsBroken(err) {
			return failed
		}
		// The client library has already retried, and a host would send the same wrong bytes again.
		return transfer.Final(failed)
	})
	var all *transfer.Failures
	if !errors.As(err, &all) {
		return err
	}
	var answers endpointErrors
	for _, err := range all.Errs {
		answers = append(answers, err.(*registry.Error))
	}
	return answers.join()
}

// ask calls f with the client for an endpoint.
func (r *registrySource) ask(e endpoint, f func(*remote.Puller, name.Repository) (bool, error)) (begun bool, err error) {
	p, err := r.puller(e.host)
	if err != nil {
		return false, err
	}
	repo, err := r.repository(e)
	if err != nil {
		return false, err
	}
	return f(p, repo)
}

// wrongBytes reports whether err means that a blob's bytes do not match its digest or size.
func wrongBytes(err error, digest imageref.Digest) bool {
	var wrong *fetch.DigestError
	return errors.Is(err, errDamagedSource) || errors.As(err, &wrong) && wrong.Want == digest.Hex()
}

// failed counts the timeouts of each host. For each host that causes a delay, it warns once.
func (r *registrySource) failed(e *registry.Error, begun, others bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	goOn := ""
	switch {
	case others && begun:
		goOn = "trying the next host"
	case others && transfer.IsTimeout(e.Err):
		goOn = "trying the next host; from now on, this host is tried last"
	case begun && transfer.IsBroken(e.Err):
		goOn = "trying again"
	}
	if transfer.IsTimeout(e.Err) {
		r.timeouts[e.Host]++
	}
	if goOn == "" || r.warn == nil || r.warned[e.Host] {
		return
	}
	r.warned[e.Host] = true
	r.warn(e.Error() + "; " + goOn)
}

// endpointErrors contains the errors of a registry and its mirrors. Each has its own fix.
type endpointErrors []*registry.Error

func (es endpointErrors) join() error {
	if len(es) == 1 {
		return es[0]
	}
	return es
}

func (es endpointErrors) Error() string {
	var b strings.Builder
	b.WriteString("neither a mirror nor the registry provides it:")
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

func (r *registrySource) root(ctx context.Context, ref imageref.Ref) (Descriptor, error) {
	var d Descriptor
	err := r.each(ctx, ref, "", func(p *remote.Puller, repo name.Repository) (bool, error) {
		got, err := p.Get(ctx, r.reference(repo, ref))
		if err != nil {
			return false, err
		}
		if !strings.HasPrefix(strings.TrimSpace(string(got.Manifest)), "{") {
			return false, fmt.Errorf("%w (its type is %q)", registry.ErrNoManifest, got.MediaType)
		}
		// Use the type in the manifest: the digest does not cover the type in the response's
		// header.
		d = Descriptor{Size: got.Size}
		if _, err := parseManifest(got.Manifest, &d.MediaType); err != nil {
			d.MediaType = string(got.MediaType) // parseManifest checks it later and reports the error
		}
		d.Digest, err = imageref.ParseDigest(got.Digest.String())
		return false, err
	})
	return d, err
}

func (r *registrySource) reference(repo name.Repository, ref imageref.Ref) name.Reference {
	if ref.Digest != "" {
		return repo.Digest(string(ref.Digest))
	}
	return repo.Tag(ref.Tag)
}

func (r *registrySource) fetch(ctx context.Context, ref imageref.Ref, d Descriptor, take func(io.Reader) error) error {
	return r.each(ctx, ref, d.Digest, func(p *remote.Puller, repo name.Repository) (bool, error) {
		if isIndex(d.MediaType) || isManifest(d.MediaType) {
			got, err := p.Get(ctx, repo.Digest(string(d.Digest)))
			if err != nil {
				return false, err
			}
			return true, take(bytes.NewReader(got.Manifest))
		}
		l, err := p.Layer(ctx, repo.Digest(string(d.Digest)))
		if err != nil {
			return false, err
		}
		body, err := l.Compressed()
		if err != nil {
			return false, err
		}
		defer body.Close()
		return true, take(unverified{body})
	})
}

// unverified replaces the client library's digest errors, because the package verifies all bytes
// itself and returns better errors.
type unverified struct{ io.Reader }

func (u unverified) Read(p []byte) (int, error) {
	n, err := u.Reader.Read(p)
	if err != nil && strings.Contains(err.Error(), "error verifying") { // the type of this error is internal
		err = io.EOF
	}
	return n, err
}

// fixOf returns the remedy for a failed fetch, or "".
func fixOf(err error) string {
	fix := registry.Fix(err, registry.Words{
		Login:    "log in to the registry, or name a file with credentials as authFile in registries:",
		AuthFile: "authFile in registries:",
		Insecure: "set insecure: true for this host in registries:",
		Mirror:   ", or name a mirror in registries:",
		Lacks:    "it lacks a part of the image: have the image pushed again, or name a mirror in registries:",
	})
	var te *transport.Error
	var de *fetch.DigestError
	switch {
	case fix != "", errors.As(err, &te), errors.Is(err, context.Canceled):
		return fix
	case errors.As(err, &de):
		return "the source is damaged or was changed in transit; fetch it again or use another source"
	case errors.As(err, new(*imageref.DigestError)):
		return "the source is damaged; use another source"
	case errors.Is(err, fs.ErrNotExist):
		return "the layout or archive is incomplete; make it again, with this platform"
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		return "fetch it again, or use another source"
	}
	return ""
}
