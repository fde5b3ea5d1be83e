package transfer

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"
)

// Retry is how often something is tried, and how far apart.
type Retry struct {
	// Attempts is how many may fail in a row that bring nothing.
	Attempts int
	// Pause is before the second attempt, and doubles with each that brings
	// nothing, up to Longest; 0: without bound.
	Pause, Longest time.Duration
	// Again, if set, is told why there is another attempt.
	Again func(err error)
	// Sleep waits; nil: time itself. The installer passes its own.
	Sleep func(context.Context, time.Duration) error
}

// longestAsked is how long a server may have us wait.
const longestAsked = time.Minute

// Do calls try until it succeeds, fails for good (Final), or has failed too
// often. brought says that it brought something before it failed: on a line
// that breaks every minute a transfer of an hour comes to its end.
func (r Retry) Do(ctx context.Context, try func() (brought bool, err error)) error {
	pause := r.Pause
	for failed := 0; ; {
		brought, err := try()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if final := (*finalError)(nil); errors.As(err, &final) {
			return final.error
		}
		if failed++; brought {
			failed, pause = 0, r.Pause
		}
		if failed >= r.Attempts {
			return err
		}
		if r.Again != nil {
			r.Again(err)
		}
		pause = max(pause, min(AskedPause(err), longestAsked))
		if err := r.sleep(ctx, pause); err != nil {
			return err
		}
		if !brought {
			pause *= 2
		}
		if r.Longest > 0 {
			pause = min(pause, r.Longest)
		}
	}
}

// Each asks n places in turn, in rounds, until one of them succeeds. A place whose error is
// Final is not asked again, and no other is asked after Stop. The result is *Failures, unless
// it is nil, the error of Stop, or that of ctx.
func (r Retry) Each(ctx context.Context, n int, try func(i int) error) error {
	last, over := make([]error, n), make([]bool, n)
	return r.Do(ctx, func() (bool, error) {
		left, pause := false, time.Duration(0)
		for i := range n {
			if over[i] {
				continue
			}
			err := try(i)
			if err == nil || ctx.Err() != nil {
				return false, err
			}
			if stop := (*stopError)(nil); errors.As(err, &stop) {
				return false, Final(stop.error)
			}
			if final := (*finalError)(nil); errors.As(err, &final) {
				last[i], over[i] = final.error, true
				continue
			}
			last[i], left, pause = err, true, max(pause, AskedPause(err))
		}
		if !left {
			return false, Final(&Failures{last})
		}
		return false, After(&Failures{last}, pause)
	})
}

// Failures are the last errors of places, in their order.
type Failures struct{ Errs []error }

func (f *Failures) Error() string   { return errors.Join(f.Errs...).Error() }
func (f *Failures) Unwrap() []error { return f.Errs }

// Stop says that no other place could do better. Each returns err.
func Stop(err error) error { return &stopError{err} }

type stopError struct{ error }

func (e *stopError) Unwrap() error { return e.error }

func (r Retry) sleep(ctx context.Context, d time.Duration) error {
	if r.Sleep != nil {
		return r.Sleep(ctx, d)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// Final says that another attempt would end as this one did. Do returns err.
func Final(err error) error { return &finalError{err} }

// IsFinal reports whether an error is of Final.
func IsFinal(err error) bool { return errors.As(err, new(*finalError)) }

type finalError struct{ error }

func (e *finalError) Unwrap() error { return e.error }

// After adds to an error how long the server asks us to wait.
func After(err error, pause time.Duration) error {
	if pause <= 0 {
		return err
	}
	return &afterError{err, pause}
}

type afterError struct {
	error
	pause time.Duration
}

func (e *afterError) Unwrap() error { return e.error }

// AskedPause is how long the server asks us to wait, where it does.
func AskedPause(err error) time.Duration {
	if after := (*afterError)(nil); errors.As(err, &after) {
		return after.pause
	}
	return 0
}

// RetryAfter reads how long an answer asks us to wait, in seconds; a date is
// not heeded.
func RetryAfter(resp *http.Response) time.Duration {
	seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	if err != nil || seconds < 0 {
		return 0
	}
	return time.Duration(min(seconds, int(longestAsked/time.Second))) * time.Second
}

// MayPass reports whether an answer of that status may be another later.
func MayPass(status int) bool {
	return status == http.StatusTooManyRequests || status == http.StatusRequestTimeout || status >= 500
}
