package images

import (
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
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// registrySource fetches from the registry a reference names, or a mirror of it.
type registrySource struct {
	stall, wait time.Duration
	config      map[string]configs.Registry // by host
	at          func(string) string         // makes a path absolute

	mu      sync.Mutex
	pullers map[string]*remote.Puller // by host
	tries   map[configs.Digest]*tries
	silent  map[string]int // how often a host was
	warn    func(text string)
	warned  map[string]bool // of this host
}

// tries is what became of the attempts to fetch one blob.
type tries struct {
	at    string                     // the host that was asked last
	count map[string]int             // failures, by host
	errs  map[string]*registry.Error // the last failure, by host
}

func newRegistry(o *Options, at func(string) string) *registrySource {
	r := &registrySource{
		stall:   cmp.Or(o.Stall, 30*time.Second),
		wait:    cmp.Or(o.RetryWait, time.Second),
		at:      at,
		config:  map[string]configs.Registry{},
		pullers: map[string]*remote.Puller{},
		tries:   map[configs.Digest]*tries{},
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
func (r *registrySource) name() string { return "" }
func (r *registrySource) Close() error { return nil }

// endpoint is one place to ask for a repository.
type endpoint struct {
	host string // host[:port]
	repo string
}

// endpoints lists the mirrors of a registry, then the registry.
func (r *registrySource) endpoints(ref configs.Ref) []endpoint {
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

// each asks the endpoints in turn until one has it. Those that spoiled the blob
// before are asked last, and those that were silent, which may take long;
// digest is empty for what is asked by name.
func (r *registrySource) each(ref configs.Ref, digest configs.Digest, f func(*remote.Puller, name.Repository) error) error {
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
		failed := &registry.Error{Host: e.host, Digest: string(digest), Stall: r.stall, AuthFile: r.config[e.host].AuthFile, Err: err}
		errs = append(errs, failed)
		r.mu.Lock()
		r.failed(t, failed)
		if n < len(es)-1 && transfer.IsTimeout(err) {
			r.warnOnce(failed, "asking the next, and this one last from now on")
		}
		r.mu.Unlock()
	}
	return errs.join()
}

// warnOnce tells what costs time though it may end well. r.mu is held.
func (r *registrySource) warnOnce(e *registry.Error, goOn string) {
	if r.warn != nil && !r.warned[e.Host] {
		r.warn(e.Error() + "; " + goOn)
	}
	r.warned[e.Host] = true
}

// failed takes down what a host did wrong. r.mu is held.
func (r *registrySource) failed(t *tries, e *registry.Error) {
	t.count[e.Host]++
	t.errs[e.Host] = e
	if transfer.IsTimeout(e.Err) {
		r.silent[e.Host]++
	}
}

func (r *registrySource) triesOf(digest configs.Digest) *tries {
	r.mu.Lock()
	defer r.mu.Unlock()
	if t := r.tries[digest]; t != nil {
		return t
	}
	t := &tries{count: map[string]int{}, errs: map[string]*registry.Error{}}
	if digest != "" {
		r.tries[digest] = t
	}
	return t
}

// attempts is how often a blob is asked for whose transfer breaks off, once all
// hosts have been asked.
const attempts = 3

// spoiled notes that the transfer of a blob failed after it had begun, and
// reports whether another host can be asked for it, or what to say if not.
func (r *registrySource) spoiled(ref configs.Ref, digest configs.Digest, err error) (elsewhere bool, _ error) {
	t := r.triesOf(digest)
	es := r.endpoints(ref)
	r.mu.Lock()
	defer r.mu.Unlock()
	failed := &registry.Error{Host: t.at, Digest: string(digest), Stall: r.stall, Err: err}
	r.failed(t, failed)
	if slices.ContainsFunc(es, func(e endpoint) bool { return t.count[e.host] == 0 }) {
		r.warnOnce(failed, "asking the next")
		return true, nil
	}
	var errs endpointErrors
	for _, e := range es {
		if failed := t.errs[e.host]; failed != nil {
			errs = append(errs, failed)
		}
	}
	if !transfer.IsBroken(err) { // who sends wrong bytes will send them again
		return false, transfer.Final(errs.join())
	}
	r.warnOnce(failed, "asking again")
	return false, errs.join()
}

// again calls f, which fetches a blob, until that succeeds or there is no
// hope. The client library repeats requests; a transfer that broke off in the
// middle is ours to repeat, and bytes that one mirror spoiled are asked of the
// next.
func again(ctx context.Context, src source, ref configs.Ref, digest configs.Digest, f func() error) error {
	r, remote := src.(*registrySource)
	if !remote {
		return f()
	}
	retry := transfer.Retry{Attempts: attempts, Pause: r.wait}
	return retry.Do(ctx, func() (bool, error) {
		for {
			err := f()
			if err == nil || ctx.Err() != nil {
				return false, err
			}
			var unopened *registry.Error
			var wrong *fetch.DigestError
			switch {
			case errors.As(err, &unopened):
				return false, transfer.Final(err)
			case transfer.IsBroken(err), errors.Is(err, errTooLong), errors.As(err, &wrong) && wrong.Want == digest.Hex():
			default:
				return false, transfer.Final(err) // not the registry's doing
			}
			elsewhere, err := r.spoiled(ref, digest, err)
			if !elsewhere {
				return false, err
			}
		}
	})
}

// endpointErrors is what a registry and its mirrors answered, each with its
// own fix.
type endpointErrors []*registry.Error

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

func (r *registrySource) root(ctx context.Context, ref configs.Ref) (Descriptor, error) {
	var d Descriptor
	err := r.each(ref, "", func(p *remote.Puller, repo name.Repository) error {
		got, err := p.Get(ctx, r.reference(repo, ref))
		if err != nil {
			return err
		}
		if !strings.HasPrefix(strings.TrimSpace(string(got.Manifest)), "{") {
			return fmt.Errorf("it answered with %s, %w", cmp.Or(string(got.MediaType), "bytes"), registry.ErrNoManifest)
		}
		// The digest does not cover the type in the answer's header.
		d = Descriptor{Size: got.Size}
		if _, err := parseManifest(got.Manifest, &d.MediaType); err != nil {
			d.MediaType = string(got.MediaType) // it is read again, and reported
		}
		d.Digest, err = configs.ParseDigest(got.Digest.String())
		return err
	})
	return d, err
}

func (r *registrySource) reference(repo name.Repository, ref configs.Ref) name.Reference {
	if ref.Digest != "" {
		return repo.Digest(string(ref.Digest))
	}
	return repo.Tag(ref.Tag)
}

func (r *registrySource) open(ctx context.Context, ref configs.Ref, d Descriptor) (io.ReadCloser, error) {
	var body io.ReadCloser
	err := r.each(ref, d.Digest, func(p *remote.Puller, repo name.Repository) error {
		if isIndex(d.MediaType) || isManifest(d.MediaType) {
			got, err := p.Get(ctx, repo.Digest(string(d.Digest)))
			if err != nil {
				return err
			}
			body = io.NopCloser(strings.NewReader(string(got.Manifest)))
			return nil
		}
		l, err := p.Layer(ctx, repo.Digest(string(d.Digest)))
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

// fixOf is what a person can do about a failure to fetch.
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
		return "the source is damaged or was changed on its way; fetch it again or use another source"
	case errors.As(err, new(*configs.DigestError)):
		return "the source is damaged; use another"
	case errors.Is(err, fs.ErrNotExist):
		return "the layout or archive is incomplete; make it again, with this platform"
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		return "fetch it again, or use another source"
	}
	return ""
}
