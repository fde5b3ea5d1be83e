// Package imageref has names and digests of container images, in their full form.
package imageref

import (
	"encoding/hex"
	"fmt"
	"regexp"
	"strings"

	"github.com/distribution/reference"
)

var digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// Ref is the name of a container image in its full form, as containerd and the
// kubelet write it: "pause" has become docker.io/library/pause.
type Ref struct {
	Domain string // "registry.example.com", "localhost:5000"
	Path   string // "pause", "library/nginx"
	Tag    string
	Digest Digest
}

// Repo is the reference without tag and digest.
func (r Ref) Repo() string { return r.Domain + "/" + r.Path }

// String is the reference's full form.
func (r Ref) String() string {
	s := r.Repo()
	if r.Tag != "" {
		s += ":" + r.Tag
	}
	if r.Digest != "" {
		s += "@" + string(r.Digest)
	}
	return s
}

// MarshalText writes the full form.
func (r Ref) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText is Parse.
func (r *Ref) UnmarshalText(text []byte) (err error) {
	*r, err = Parse(string(text))
	return err
}

// Digest is a SHA-256 as registries write it: "sha256:" and 64 hexadecimal
// digits; empty: unknown. ParseDigest alone makes one of text, so that whoever has
// one need not look again.
type Digest string

// DigestError says that a text is not a Digest.
type DigestError struct{ Text string }

func (e *DigestError) Error() string {
	return fmt.Sprintf("digest %q is not sha256: and 64 hex digits", e.Text)
}

// ParseDigest reads a digest.
func ParseDigest(s string) (Digest, error) {
	if !digestForm.MatchString(s) {
		return "", &DigestError{s}
	}
	return Digest(s), nil
}

// DigestOf is the digest with those 32 bytes.
func DigestOf(sha256 []byte) Digest { return Digest("sha256:" + hex.EncodeToString(sha256)) }

// Hex is the digest without its algorithm, as the cache names blobs.
func (d Digest) Hex() string { return strings.TrimPrefix(string(d), "sha256:") }

// UnmarshalText is ParseDigest.
func (d *Digest) UnmarshalText(text []byte) (err error) {
	*d, err = ParseDigest(string(text))
	return err
}

// Parse reads a reference, by the grammar of containerd and the kubelet. One
// that names neither a tag nor a digest is rejected: what it means changes over
// time, and an image is baked once.
func Parse(s string) (Ref, error) {
	named, err := reference.ParseNormalizedNamed(s)
	if err == nil && reference.Domain(named) == "" { // "a.b_c/x", of which it takes all for the path
		err = reference.ErrReferenceInvalidFormat
	}
	if err != nil {
		return Ref{}, fmt.Errorf("image reference %q: %w", s, whyNoRef(s, err))
	}
	r := Ref{Domain: reference.Domain(named), Path: reference.Path(named)}
	if t, ok := named.(reference.Tagged); ok {
		r.Tag = t.Tag()
	}
	if d, ok := named.(reference.Digested); ok {
		if r.Digest, err = ParseDigest(d.Digest().String()); err != nil {
			return Ref{}, fmt.Errorf("image reference %q: %w", s, err)
		}
	}
	if r.Tag == "" && r.Digest == "" {
		return Ref{}, &UntaggedError{s}
	}
	return r, nil
}

// UntaggedError means that a reference has neither a tag nor a digest.
type UntaggedError struct{ Ref string }

func (e *UntaggedError) Error() string {
	return fmt.Sprintf("image reference %q has no tag: write the version you mean, as in %s:1.2.3, or pin it as %s@sha256:…", e.Ref, e.Ref, e.Ref)
}

// whyNoRef names the part of s for which it is not a reference; err is what is said
// of the whole.
func whyNoRef(s string, err error) error {
	rest, digest, hasDigest := strings.Cut(s, "@")
	if _, err := ParseDigest(digest); hasDigest && err != nil {
		return err
	}
	if i := strings.LastIndexByte(rest, ':'); i >= 0 && !strings.Contains(rest[i:], "/") {
		tag := rest[i+1:]
		if rest = rest[:i]; !matches(reference.TagRegexp, tag) {
			return fmt.Errorf("tag %q is not 1 to 128 letters, digits, '_', '.' and '-'", tag)
		}
	}
	domain, path, ok := strings.Cut(rest, "/")
	if !ok || !strings.ContainsAny(domain, ".:") && domain != "localhost" && strings.ToLower(domain) == domain {
		domain, path = "docker.io", rest
	}
	switch {
	case !matches(reference.DomainRegexp, domain):
		return fmt.Errorf("%q is not a registry's host name", domain)
	case !matches(reference.NameRegexp, "docker.io/"+path) || len(path) > reference.RepositoryNameTotalLengthMax:
		return fmt.Errorf("%q is not a repository: lower case letters, digits and single separators, at most %d bytes", path, reference.RepositoryNameTotalLengthMax)
	}
	return err
}

// matches reports whether all of s is what re, which has no anchors, describes.
func matches(re *regexp.Regexp, s string) bool {
	return regexp.MustCompile("^(?:" + re.String() + ")$").MatchString(s)
}
