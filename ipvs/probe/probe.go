package probe

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"syscall"
	"time"
)

// Classify returns the outcome for an error of Dial or of a link. noCA means that no CA is known,
// so no server can be verified.
func Classify(err error, noCA bool) Outcome {
	var identity *IdentityError
	switch {
	case errors.As(err, &identity):
		return Identity
	case errors.Is(err, ErrNotTLS):
		if noCA {
			return TCPOnly
		}
		return Identity
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		return Timeout
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.EADDRNOTAVAIL):
		return Unreachable
	}
	return Closed
}

// shutdownMark is the text that kube-apiserver's /readyz contains while it shuts down.
const shutdownMark = "[-]shutdown"

// Judge returns the outcome for an answer to the probe. skew describes the server's certificate.
func (p *Spec) Judge(e Event, skew Skew) Outcome {
	alive := OK
	switch {
	case slices.Contains(p.Status, e.Status):
	case e.Status == 401 || e.Status == 403 || e.Status == 429:
		alive = Guarded
	case e.Status >= 200 && e.Status < 400:
	case e.Status >= 500 && bytes.Contains(e.Body, []byte(shutdownMark)):
		return Draining
	default:
		return ServerError
	}
	if skew.off {
		// The certificate is not valid according to this node's clock. It is
		// considered expired only if it is also expired according to the API
		// server's clock.
		if date, err := time.Parse("Mon, 02 Jan 2006 15:04:05 GMT", e.date); err == nil && !skew.early && date.After(skew.notAfter) {
			return Expired
		}
		if alive == OK {
			return SkewedOK
		}
	}
	return alive
}
