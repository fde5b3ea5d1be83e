package images

import (
	"fmt"
	"regexp"
	"strings"
)

// Ref is an image reference in its full form, as containerd and the kubelet
// write it: "pause" has become docker.io/library/pause.
type Ref struct {
	Domain string // "registry.example.com", "localhost:5000"
	Path   string // "pause", "library/nginx"
	Tag    string
	Digest string // "sha256:…"
}

// Sole stands for the one image of a layout or archive, whatever its name is.
const Sole = "sole.invalid/image:only"

// Repo is the reference without tag and digest.
func (r Ref) Repo() string { return r.Domain + "/" + r.Path }

// String is the reference's full form.
func (r Ref) String() string {
	s := r.Repo()
	if r.Tag != "" {
		s += ":" + r.Tag
	}
	if r.Digest != "" {
		s += "@" + r.Digest
	}
	return s
}

// The grammar is the distribution project's, which containerd and the kubelet
// use.
const (
	domainGrammar = `^(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9])(?:\.(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9]))*(?::[0-9]+)?$|^\[[0-9A-Fa-f:]+\](?::[0-9]+)?$`
	pathGrammar   = `^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*$`
	tagGrammar    = `^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`
	digestGrammar = `^sha256:[0-9a-f]{64}$`
)

// ParseRef reads a reference. One that names neither a tag nor a digest is
// refused: what it means changes over time, and an image is baked once.
func ParseRef(s string) (Ref, error) {
	r, err := parseRepo(s)
	if err != nil {
		return Ref{}, fmt.Errorf("image reference %q: %w", s, err)
	}
	if r.Tag == "" && r.Digest == "" {
		return Ref{}, fmt.Errorf("image reference %q has no tag: write the version you mean, as in %s:1.2.3, or pin it as %s@sha256:…", s, s, s)
	}
	return r, nil
}

// parseRepo reads a reference that may lack tag and digest.
func parseRepo(s string) (Ref, error) {
	var r Ref
	rest, digest, hasDigest := strings.Cut(s, "@")
	if hasDigest {
		if !regexp.MustCompile(digestGrammar).MatchString(digest) {
			return r, fmt.Errorf("digest %q is not sha256: and 64 hex digits", digest)
		}
		r.Digest = digest
	}
	if i := strings.LastIndexByte(rest, ':'); i >= 0 && !strings.Contains(rest[i:], "/") {
		r.Tag, rest = rest[i+1:], rest[:i]
		if !regexp.MustCompile(tagGrammar).MatchString(r.Tag) {
			return r, fmt.Errorf("tag %q is not 1 to 128 letters, digits, '_', '.' and '-'", r.Tag)
		}
	}
	domain, p, ok := strings.Cut(rest, "/")
	if !ok || !strings.ContainsAny(domain, ".:") && domain != "localhost" && strings.ToLower(domain) == domain {
		domain, p = "docker.io", rest
		if !ok {
			p = "library/" + rest
		}
	}
	if domain == "index.docker.io" {
		domain = "docker.io"
	}
	if !regexp.MustCompile(domainGrammar).MatchString(domain) {
		return r, fmt.Errorf("%q is not a registry's host name", domain)
	}
	if !regexp.MustCompile(pathGrammar).MatchString(p) || len(p)+len(domain) > 254 {
		return r, fmt.Errorf("%q is not a repository: lower case letters, digits and single separators, at most 255 bytes", p)
	}
	r.Domain, r.Path = domain, p
	return r, nil
}
