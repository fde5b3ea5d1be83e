package carry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/builder/registry"
	"github.com/edgebake/edgebake/builder/transfer"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk/artifact"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// repo is one repository of a registry.
type repo struct {
	o      *Options
	ref    imageref.Ref
	name   name.Repository
	client *http.Client
	stall  time.Duration
	wait   time.Duration
	warnMu sync.Mutex // serializes warnings about parts that are sent in parallel
}

// openRepo opens a repository and logs in. scope is transport.PullScope or PushScope.
func openRepo(ctx context.Context, ref imageref.Ref, scope string, o *Options) (*repo, error) {
	r := &repo{o: o, ref: ref, stall: cmp.Or(o.Stall, 30*time.Second), wait: cmp.Or(o.RetryWait, time.Second)}
	var opts []name.Option
	if o.Insecure {
		opts = append(opts, name.Insecure)
	}
	var err error
	if r.name, err = name.NewRepository(ref.Repo(), opts...); err != nil {
		return nil, err
	}
	keys, err := registry.Logins(o.AuthFile)
	if err != nil {
		return nil, err
	}
	login, err := authn.Resolve(ctx, keys, r.name)
	if err != nil {
		return nil, fmt.Errorf("getting the login of %s: %w", ref.Domain, err)
	}
	rt := transport.NewUserAgent(registry.Access{Insecure: o.Insecure, Stall: r.stall}.Transport(), "edgebake")
	err = r.again(ctx, "", "", func() error {
		in, err := transport.NewWithContext(ctx, r.name.Registry, login, rt, []string{r.name.Scope(scope)})
		r.client = &http.Client{Transport: in}
		return err
	})
	return r, err
}

// url returns the URL of a path in the repository. The transport changes it to http if the registry
// supports only that.
func (r *repo) url(path string) string {
	return (&url.URL{Scheme: r.name.Scheme(), Host: r.name.RegistryStr(), Path: "/v2/" + r.name.RepositoryStr() + path}).String()
}

// request sends a request and returns the response, whose status must be one of codes.
func (r *repo) request(ctx context.Context, method, url string, header http.Header, body io.Reader, size int64, codes ...int) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.ContentLength = size
	}
	for k, v := range header {
		req.Header[k] = v
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return nil, err
	}
	if err := transport.CheckError(resp, codes...); err != nil {
		resp.Body.Close()
		return nil, transfer.WithPause(err, transfer.RetryAfter(resp))
	}
	return resp, nil
}

// attempts is how often a request is tried.
const attempts = 5

// again calls f until it succeeds, returns an error that a retry cannot fix, or has failed attempts
// times. Before each retry, it warns with the error and the text what, unless what is empty.
func (r *repo) again(ctx context.Context, digest imageref.Digest, what string, f func() error) error {
	retry := transfer.Retry{Attempts: attempts, Pause: r.wait}
	if what != "" {
		retry.Again = func(err error) {
			r.warnMu.Lock()
			defer r.warnMu.Unlock()
			r.o.warn("%v; %s", err, what)
		}
	}
	return retry.Do(ctx, func() (bool, error) {
		err := f()
		if err == nil {
			return false, nil
		}
		failed := &registry.Error{Host: r.ref.Domain, Digest: string(digest), Stall: r.stall, Err: err}
		var op *net.OpError
		first := r.client == nil && errors.As(err, &op) && op.Op == "dial" // usually a misspelled host
		switch {
		case transfer.IsFinal(err): // not an error of the registry
			return false, err
		case first || !mayBeTemporary(err):
			return false, transfer.Final(failed)
		}
		return false, failed
	})
}

// mayBeTemporary reports whether an error may be temporary.
func mayBeTemporary(err error) bool {
	var te *transport.Error
	var op *net.OpError
	var unknown *net.DNSError
	switch {
	case errors.As(err, &te):
		return transfer.IsTemporary(te.StatusCode)
	case errors.As(err, &unknown):
		return !unknown.IsNotFound
	}
	return transfer.IsBroken(err) || errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) || errors.As(err, &op)
}

// document reads a manifest or blob of at most limit bytes and compares its digest.
func (r *repo) document(ctx context.Context, path string, digest imageref.Digest, accept string, limit int64) ([]byte, error) {
	var b []byte
	err := r.again(ctx, digest, "", func() error {
		resp, err := r.request(ctx, http.MethodGet, r.url(path), http.Header{"Accept": {accept}}, nil, 0, http.StatusOK)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if b, err = io.ReadAll(io.LimitReader(resp.Body, limit+1)); err == nil && int64(len(b)) > limit {
			err = transfer.Final(fmt.Errorf("%s sent more than %d bytes of %s", r.ref.Domain, limit, path))
		}
		return err
	})
	if err == nil && digest != "" && digestOf(b) != digest {
		err = fmt.Errorf("%s sent bytes that do not match digest %s: they are damaged, or were changed in transit", r.ref.Domain, digest)
	}
	return b, err
}

// manifest returns the manifest to which the reference points, decoded and as bytes.
func (r *repo) manifest(ctx context.Context) (*artifact.Manifest, []byte, error) {
	// Pass no digest, so that the error for a 404 says that the name is unknown.
	b, err := r.document(ctx, "/manifests/"+cmp.Or(string(r.ref.Digest), r.ref.Tag), "", artifact.Accept, artifact.MaxManifest)
	if err != nil {
		return nil, nil, err
	}
	if r.ref.Digest != "" && digestOf(b) != r.ref.Digest {
		return nil, nil, fmt.Errorf("%s sent a manifest that does not match the digest: it is damaged, or was changed in transit", r.ref.Domain)
	}
	m, err := readManifest(b)
	return m, b, err
}

// has reports whether the registry has a blob.
func (r *repo) has(ctx context.Context, d artifact.Descriptor) (bool, error) {
	there := false
	err := r.again(ctx, "", "", func() error {
		resp, err := r.request(ctx, http.MethodHead, r.url("/blobs/"+string(d.Digest)), nil, nil, 0, http.StatusOK, http.StatusNotFound)
		if err != nil {
			return err
		}
		resp.Body.Close()
		there = resp.StatusCode == http.StatusOK && (resp.ContentLength < 0 || resp.ContentLength == d.Size)
		return nil
	})
	return there, err
}

// at returns the URL of an upload from the Location header, which may be relative.
func at(resp *http.Response) (string, error) {
	where := resp.Header.Get("Location")
	if where == "" {
		return "", errors.New("the registry returned no URL for the upload")
	}
	u, err := resp.Request.URL.Parse(where)
	if err != nil {
		return "", errors.New("the registry returned an invalid URL for the upload")
	}
	return u.String(), nil
}
