package ipvs

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"syscall"
	"time"
)

func classify(err error, noCA bool) outcome {
	var identity *identityError
	switch {
	case errors.As(err, &identity):
		return outcomeIdentity
	case errors.Is(err, errNotTLS):
		if noCA {
			return outcomeTCPOnly
		}
		return outcomeIdentity
	case errors.Is(err, syscall.ECONNREFUSED):
		return outcomeRefused
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		return outcomeTimeout
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.EADDRNOTAVAIL):
		return outcomeUnreachable
	}
	return outcomeClosed
}

// shutdownMark is what kube-apiserver's /readyz says while it drains.
const shutdownMark = "[-]shutdown"

// judge classes an answer to the probe. skew says how the certificate fits
// this node's clock.
func (p *Probe) judge(e event, skew skew) outcome {
	alive := outcomeOK
	switch {
	case slices.Contains(p.Status, e.status):
	case e.status == 401 || e.status == 403 || e.status == 429:
		alive = outcomeGuarded
	case e.status >= 200 && e.status < 400:
	case e.status >= 500 && bytes.Contains(e.body, []byte(shutdownMark)):
		return outcomeDraining
	default:
		return outcomeServerError
	}
	if skew.off {
		// The certificate does not fit this node's clock. Only if the API server
		// itself says that it is past the end has it really expired.
		if date, err := time.Parse("Mon, 02 Jan 2006 15:04:05 GMT", e.date); err == nil && !skew.early && date.After(skew.notAfter) {
			return outcomeExpired
		}
		if alive == outcomeOK {
			return outcomeSkewedOK
		}
	}
	return alive
}
