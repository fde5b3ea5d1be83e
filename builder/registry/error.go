package registry

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/transfer"
	"github.com/edgebake/edgebake/configs/printable"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// Error is an error from a registry or a mirror.
type Error struct {
	Host   string
	Digest string // of the requested blob; empty for a request by tag
	Stall  time.Duration
	// AuthFile is the file with the login for the host, or "".
	AuthFile string
	Err      error
}

// Error describes the error in plain words. The client library's errors would contain requests and
// HTML pages.
func (e *Error) Error() string {
	var te *transport.Error
	var untrusted *tls.CertificateVerificationError
	var unknown *net.DNSError
	var op *net.OpError
	var ue *url.Error
	who, sentTo := e.Host, e.sentTo()
	if sentTo != "" && sentTo != e.Host {
		who += " (" + sentTo + ")"
	}
	switch {
	case transfer.IsTimeout(e.Err):
		return fmt.Sprintf("%s sent nothing for %v", who, e.Stall)
	case errors.As(e.Err, &te):
		return fmt.Sprintf("%s answered %d %s%s", who, te.StatusCode, http.StatusText(te.StatusCode), messagesOf(te))
	case errors.As(e.Err, &untrusted):
		return fmt.Sprintf("%s has a certificate that cannot be verified: %v", who, untrusted.Err)
	case errors.Is(e.Err, http.ErrSchemeMismatch):
		return who + " speaks plain HTTP, not HTTPS"
	// The client library also tries plain HTTP if a host in a private network does not respond.
	// Report the error of the connection, not ErrPlainHTTP.
	case errors.As(e.Err, &unknown) && unknown.IsNotFound:
		return who + " is not found in DNS"
	case errors.As(e.Err, &op) && op.Op == "dial":
		return fmt.Sprintf("%s cannot be reached: %v", who, op.Err)
	case errors.Is(e.Err, ErrPlainHTTP) && sentTo != "":
		return fmt.Sprintf("%s redirects to %s over plain HTTP, which is rejected", e.Host, sentTo)
	case e.Err == io.ErrUnexpectedEOF:
		return e.Host + " closed the connection before the response was complete"
	case errors.Is(e.Err, io.EOF):
		return who + " closed the connection without a response"
	case errors.As(e.Err, &ue):
		return fmt.Sprintf("%s: %v", who, ue.Err)
	}
	return fmt.Sprintf("%s: %v", e.Host, e.Err)
}

// sentTo returns the host to which the failed request was sent, or "". Logins and blobs may be on
// another host than the registry.
func (e *Error) sentTo() (host string) {
	var te *transport.Error
	var ue *url.Error
	if errors.As(e.Err, &te) && te.Request != nil {
		host = te.Request.URL.Host
	} else if errors.As(e.Err, &ue) {
		host = urlHost(ue.URL)
	}
	return host
}

// messagesOf returns the messages in a registry's response.
func messagesOf(te *transport.Error) (s string) {
	for _, d := range te.Errors {
		if message := strings.Join(strings.Fields(cmp.Or(d.Message, string(d.Code))), " "); message != "" {
			s += ": " + printable.Line(message[:min(len(message), 200)])
		}
	}
	return s
}

func (e *Error) Unwrap() error { return e.Err }

// urlHost returns the host of a URL. It leaves out the path and the query, which may contain
// tokens.
func urlHost(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return "an invalid URL"
	}
	return u.Host
}

// ErrNoManifest means that a response is not a manifest.
var ErrNoManifest = errors.New("the response is not an image manifest")

// Words contains the caller's words for fixes.
type Words struct {
	// Login is the fix for missing credentials. AuthFile is the option that names a file with
	// credentials.
	Login, AuthFile string
	// Insecure is the fix that allows plain HTTP and unverified certificates.
	Insecure string
	// Mirror suggests a mirror. It is "" if none can be set.
	Mirror string
	// Lacks is the fix if the registry has a manifest but lacks its blobs.
	Lacks string
}

// Fix returns the fix for an error in accessing a registry, or "".
func Fix(err error, w Words) string {
	var te *transport.Error
	var unknown *net.DNSError
	var refused *net.OpError
	var untrusted *tls.CertificateVerificationError
	switch {
	case errors.Is(err, ErrAuthFile):
		return "correct the path in " + w.AuthFile + ", or the file"
	case errors.As(err, &te):
		return fixOfStatus(err, te.StatusCode, w)
	case errors.Is(err, context.Canceled):
		return ""
	case transfer.IsTimeout(err), errors.Is(err, io.EOF):
		return "check the network and the proxy settings" + w.Mirror
	case errors.As(err, &untrusted):
		return "make this machine trust the registry's CA or, to skip the check, " + w.Insecure
	case errors.As(err, &refused) && errors.Is(err, ErrPlainHTTP):
		return "check its name, its port and the network; " + w.Insecure + " if it uses plain HTTP"
	case errors.Is(err, http.ErrSchemeMismatch), errors.Is(err, ErrPlainHTTP):
		return w.Insecure + " if it uses plain HTTP"
	case errors.Is(err, ErrNoManifest):
		return "this is not a registry, or a proxy or login page responded instead: check its name and the network"
	case errors.As(err, &unknown) && unknown.IsNotFound:
		fix := "check the registry's name for spelling, and the network"
		if w.Mirror != "" {
			fix += ";" + strings.TrimPrefix(w.Mirror, ",")
		}
		return fix
	case errors.As(err, &refused):
		return "check the network and the proxy settings" + w.Mirror
	case strings.Contains(err.Error(), "invalid realm in www-authenticate"): // the client library's error has no type
		return "the registry must name its login server (realm) by a host name, and with https unless insecure is set"
	}
	return ""
}

func fixOfStatus(err error, code int, w Words) string {
	var failed *Error
	switch {
	case (code == http.StatusUnauthorized || code == http.StatusForbidden) && errors.As(err, &failed) && failed.AuthFile != "":
		return fmt.Sprintf("correct the login of %s in auths of %s, or add it there (registries also respond this way if the image does not exist)", failed.Host, failed.AuthFile)
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		if errors.As(err, &failed) {
			if fix := helperFix(failed.Host); fix != "" {
				return fix
			}
		}
		return w.Login + " (registries also respond this way if the image does not exist)"
	case code == http.StatusNotFound && errors.As(err, &failed) && failed.Digest != "":
		return w.Lacks
	case code == http.StatusNotFound:
		return "check repository, tag and digest for spelling"
	case code == http.StatusTooManyRequests && w.Mirror != "":
		return "the registry limits requests: wait, log in, or name a mirror in registries:"
	case code == http.StatusTooManyRequests:
		return "the registry limits requests: wait, or log in"
	case code == http.StatusRequestEntityTooLarge:
		return "the registry, or a proxy in front of it, limits the size of requests: raise that limit (nginx: client_max_body_size 0)"
	case code >= 500:
		return "the registry is failing: try later" + w.Mirror
	}
	return ""
}
