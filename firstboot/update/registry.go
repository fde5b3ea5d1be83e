package update

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/run"
	"github.com/edgebake/edgebake/ondisk/artifact"
	"github.com/edgebake/edgebake/ondisk/order"
)

// LoginsFile is a docker config.json with logins of registries. kubelet reads it too.
const LoginsFile = "/var/lib/kubelet/config.json"

// registryImage is an image that `edgebake push` has stored in a container registry, in parts.
type registryImage struct {
	name  string
	m     *artifact.Manifest
	parts []*server
}

// openRegistry reads the manifest of the image at an oci:// URL.
func openRegistry(ctx context.Context, l *requester, image string) (*registryImage, error) {
	ref, err := order.ParseRegistry(image)
	if err != nil {
		return nil, err
	}
	base := registryURL(ref)
	if l.login, err = newLogin(l.e, ref, base); err != nil {
		return nil, err
	}
	r := &registryImage{name: image}
	if err := l.retry(ctx, func() error { r.m, err = l.manifest(ctx, base, ref); return err }); err != nil {
		return nil, err
	}
	for _, p := range r.m.Layers {
		r.parts = append(r.parts, &server{requester: l, url: base + "/blobs/" + string(p.Digest), size: p.Size})
	}
	return r, nil
}

// registryURL returns the URL of a repository. It uses plain HTTP for a registry on this machine,
// and HTTPS for all others.
func registryURL(ref imageref.Ref) string {
	host, scheme := ref.Domain, "https"
	if host == "docker.io" {
		host = "registry-1.docker.io"
	}
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host
	}
	if ip := net.ParseIP(strings.Trim(name, "[]")); name == "localhost" || ip != nil && ip.IsLoopback() {
		scheme = "http"
	}
	return (&url.URL{Scheme: scheme, Host: host, Path: "/v2/" + ref.Path}).String()
}

// manifest requests the manifest of an image.
func (l *requester) manifest(ctx context.Context, base string, ref imageref.Ref) (*artifact.Manifest, error) {
	b, err := l.document(ctx, base+"/manifests/"+cmp.Or(string(ref.Digest), ref.Tag), http.Header{"Accept": {artifact.Accept}}, artifact.MaxManifest)
	if err != nil {
		return nil, fmt.Errorf("requesting its manifest: %w", err)
	}
	if sum := sha256.Sum256(b); ref.Digest != "" && imageref.DigestOf(sum[:]) != ref.Digest {
		return nil, errors.New("the registry sends a manifest that does not match the digest: it is damaged, or was changed in transit")
	}
	return artifact.Read(b)
}

// document downloads a small file.
func (l *requester) document(ctx context.Context, url string, header http.Header, limit int64) ([]byte, error) {
	resp, err := l.request(ctx, url, header, limit)
	if err != nil {
		return nil, err
	}
	body := &countedBody{resp.Body, l.allow, max(0, resp.ContentLength)}
	defer body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusUnauthorized, http.StatusForbidden:
		err := badStatus(resp)
		if l.login == nil {
			return nil, err
		}
		return nil, run.Advise(fmt.Errorf("%w: %s", err, l.login), "check repository and tag, and the login in "+LoginsFile)
	default:
		return nil, badStatus(resp)
	}
	b, err := io.ReadAll(io.LimitReader(&bounded{body, l.e.Now, l.e.Now().Add(documentTime), documentTime}, limit+1))
	switch {
	case err != nil:
		return nil, &temporaryError{err}
	case int64(len(b)) > limit:
		return nil, fmt.Errorf("the server sends more than %d bytes", limit)
	}
	return b, nil
}

// documentTime bounds the download of a small file: a server could send a byte a minute, for months.
const documentTime = 5 * time.Minute

func (r *registryImage) Name() string { return r.name }
func (r *registryImage) Size() int64  { return r.m.Stored() }
func (r *registryImage) Close() error { return nil }

// Open returns a reader of a range, which may span several parts.
func (r *registryImage) Open(ctx context.Context, off, n int64) (io.ReadCloser, error) {
	all := &multiReadCloser{}
	var each []io.Reader
	for _, x := range r.m.Ranges(off, n) {
		body, err := r.parts[x.Part].Open(ctx, x.Off, x.To-x.Off)
		if err != nil {
			return nil, err
		}
		all.close, each = append(all.close, body), append(each, body)
	}
	all.Reader = io.MultiReader(each...)
	return all, nil
}

// multiReadCloser reads several readers one after another, and closes all of them.
type multiReadCloser struct {
	io.Reader
	close []io.ReadCloser
}

func (r *multiReadCloser) Close() (err error) {
	for _, c := range r.close {
		err = errors.Join(err, c.Close())
	}
	return err
}

// login authenticates at a registry, either with a token from its login server (which may be
// anonymous) or with the name and password in LoginsFile.
type login struct {
	ref    imageref.Ref
	secure bool   // the registry uses TLS, so the login server must use it too
	basic  string // name and password, encoded; "" without them
	header string // value of Authorization in requests; "" at first
}

func (l *login) String() string {
	if l.basic == "" {
		return "no login for " + l.ref.Domain + " is configured"
	}
	return "the login for " + l.ref.Domain + " is not accepted"
}

// newLogin reads the name and password for a repository, if LoginsFile has them.
func newLogin(e *machine.Env, ref imageref.Ref, base string) (*login, error) {
	l := &login{ref: ref, secure: strings.HasPrefix(base, "https:")}
	text := e.Contents(LoginsFile)
	if text == nil {
		return l, nil
	}
	var conf struct {
		Auths map[string]struct{ Auth, Username, Password string }
	}
	// The decoder's errors may quote the file, which contains secrets.
	if json.Unmarshal(text, &conf) != nil {
		return nil, fmt.Errorf("%s is not a docker config.json", LoginsFile)
	}
	keys := []string{ref.Repo(), ref.Domain, "https://" + ref.Domain}
	if ref.Domain == "docker.io" {
		keys = append(keys, "https://index.docker.io/v1/")
	}
	for _, k := range keys {
		switch a, ok := conf.Auths[k]; {
		case !ok:
		case a.Auth != "":
			if !isToken(a.Auth) {
				return nil, fmt.Errorf("%s: the auth of %s has a character that base64 does not have, such as a line break: write it on one line", LoginsFile, k)
			}
			l.basic = "Basic " + a.Auth
			return l, nil
		case a.Username != "":
			l.basic = "Basic " + base64.StdEncoding.EncodeToString([]byte(a.Username+":"+a.Password))
			return l, nil
		}
	}
	return l, nil
}

var challengeParam = regexp.MustCompile(`([a-z]+)="([^"]*)"`)

// maxToken limits the size of a login server's response.
const maxToken = 64 << 10

// answer sets the header that resp's challenge requires.
func (l *login) answer(ctx context.Context, send *requester, resp *http.Response) error {
	for _, c := range resp.Header.Values("WWW-Authenticate") {
		scheme, rest, _ := strings.Cut(c, " ")
		switch strings.ToLower(scheme) {
		case "basic":
			l.header = l.basic
			return nil
		case "bearer":
			params := map[string]string{}
			for _, m := range challengeParam.FindAllStringSubmatch(rest, -1) {
				params[m[1]] = m[2]
			}
			return l.token(ctx, send, params)
		}
	}
	return nil // the second request fails and shows the reason
}

// token requests a token from the login server that a challenge names.
func (l *login) token(ctx context.Context, send *requester, params map[string]string) error {
	realm, err := url.Parse(params["realm"])
	if err != nil || realm.Scheme != "https" && (l.secure || realm.Scheme != "http") {
		return errors.New("the registry's challenge has no usable realm (URL of its login server): it must be https, unless the registry itself uses http")
	}
	q := realm.Query()
	if params["service"] != "" {
		q.Set("service", params["service"])
	}
	q.Set("scope", cmp.Or(params["scope"], "repository:"+l.ref.Path+":pull"))
	realm.RawQuery = q.Encode()
	header := http.Header{}
	if l.basic != "" {
		header.Set("Authorization", l.basic)
	}
	own := *send
	own.login = nil
	b, err := own.document(ctx, realm.String(), header, maxToken)
	if err != nil {
		return fmt.Errorf("requesting a token for the registry: %w", err)
	}
	var t struct {
		Token       string `json:"token"`
		AccessToken string `json:"access_token"`
	}
	if json.Unmarshal(b, &t) != nil || t.Token == "" && t.AccessToken == "" {
		return errors.New("the registry's login server sends no token")
	}
	token := cmp.Or(t.Token, t.AccessToken)
	if !isToken(token) {
		return errors.New("the registry's login server sends a token that has a blank, a line break or another character that no HTTP header may have")
	}
	l.header = "Bearer " + token
	return nil
}

// isToken reports whether text may be sent in the header Authorization.
func isToken(text string) bool {
	return !strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' })
}
