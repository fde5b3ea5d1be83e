// Package imageref defines full names and digests of container images.
package imageref

import (
	"encoding/hex"
	"fmt"
	"net"
	"regexp"
	"strings"

	"github.com/distribution/reference"
)

var digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// Ref is the full name of a container image, as containerd and kubelet write it: "pause" becomes
// docker.io/library/pause.
type Ref struct {
	Domain string // such as "registry.example.com" or "localhost:5000"
	Path   string // such as "pause" or "library/nginx"
	Tag    string
	Digest Digest
}

// Repo returns the reference without tag and digest.
func (r Ref) Repo() string { return r.Domain + "/" + r.Path }

// OnLoopback reports whether the registry is on this computer. Then plain HTTP needs no permission,
// because no other computer can impersonate the registry.
func (r Ref) OnLoopback() bool {
	host, _, err := net.SplitHostPort(r.Domain)
	if err != nil {
		host = strings.Trim(r.Domain, "[]")
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// String returns the full name.
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

// MarshalText returns the full name.
func (r Ref) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText calls Parse.
func (r *Ref) UnmarshalText(text []byte) (err error) {
	*r, err = Parse(string(text))
	return err
}

// Digest is an SHA-256 digest as registries write it: "sha256:" and 64 hexadecimal digits. An empty
// Digest is unknown. Only ParseDigest converts a text to a Digest, so every other Digest is valid.
type Digest string

// DigestError means that a text is not a valid Digest.
type DigestError struct{ Text string }

func (e *DigestError) Error() string {
	return fmt.Sprintf("digest %q is not sha256: and 64 hex digits", e.Text)
}

// ParseDigest parses a digest.
func ParseDigest(s string) (Digest, error) {
	if !digestForm.MatchString(s) {
		return "", &DigestError{s}
	}
	return Digest(s), nil
}

// DigestOf returns the digest with these 32 bytes.
func DigestOf(sha256 []byte) Digest { return Digest("sha256:" + hex.EncodeToString(sha256)) }

// Hex returns the digest without its algorithm, as used in the names of cached blobs.
func (d Digest) Hex() string { return strings.TrimPrefix(string(d), "sha256:") }

// UnmarshalText calls ParseDigest.
func (d *Digest) UnmarshalText(text []byte) (err error) {
	*d, err = ParseDigest(string(text))
	return err
}

// Parse parses a reference with the grammar of containerd and kubelet. It rejects a reference
// without tag and digest, which would mean different images over time.
func Parse(s string) (Ref, error) {
	named, err := reference.ParseNormalizedNamed(s)
	if err == nil && reference.Domain(named) == "" { // such as "a.b_c/x", which is parsed as a path without a domain
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

// whyNoRef returns why s is not a reference. If no single part of s is wrong, it returns err, the
// error for all of s.
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

// matches reports whether the regular expression re, which has no anchors, matches all of s.
func matches(re *regexp.Regexp, s string) bool {
	return regexp.MustCompile("^(?:" + re.String() + ")$").MatchString(s)
}
