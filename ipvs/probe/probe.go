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

// Classify turns the error of a dial or of a held link into an outcome. noCA: nobody can
// be verified yet.
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

// shutdownMark is what kube-apiserver's /readyz says while it drains.
const shutdownMark = "[-]shutdown"

// Judge classes an answer to the probe. skew says how the certificate fits
// this node's clock.
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
		// The certificate does not fit this node's clock. Only if the API server
		// itself says that it is past the end has it really expired.
		if date, err := time.Parse("Mon, 02 Jan 2006 15:04:05 GMT", e.date); err == nil && !skew.early && date.After(skew.notAfter) {
			return Expired
		}
		if alive == OK {
			return SkewedOK
		}
	}
	return alive
}
