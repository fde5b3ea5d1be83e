package transfer

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"
)

// Retry configures repeated attempts.
type Retry struct {
	// Attempts is the number of failures in a row, without progress, after which Do gives up.
	Attempts int
	// Pause is the pause before the second attempt. It doubles after each attempt without progress,
	// up to Longest. A Longest of 0 means no limit.
	Pause, Longest time.Duration
	// Again, if set, is called with the error before each further attempt.
	Again func(err error)
	// Sleep replaces the pause; nil means a real pause. The installer sets it.
	Sleep func(context.Context, time.Duration) error
}

// longestAsked limits the pause that a server may demand.
const longestAsked = time.Minute

// Do calls try until it succeeds, returns a Final error, or has failed too often in a row. brought
// means that an attempt made progress before it failed. Then the count of failures starts again, so
// that a long transfer completes even if every connection ends after a minute.
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

// Each tries n places in turn, in rounds, until one succeeds. It does not retry a place after a
// Final error, and ends at a Stop error. It returns nil, a *Failures, the error of Stop, or the
// error of ctx.
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
		return false, WithPause(&Failures{last}, pause)
	})
}

// Failures contains the last error of each place.
type Failures struct{ Errs []error }

func (f *Failures) Error() string   { return errors.Join(f.Errs...).Error() }
func (f *Failures) Unwrap() []error { return f.Errs }

// Stop marks an error after which Each tries nothing else. Each then returns err.
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

// Final marks an error that another attempt cannot fix. Do then returns err.
func Final(err error) error { return &finalError{err} }

// IsFinal reports whether an error is marked by Final.
func IsFinal(err error) bool { return errors.As(err, new(*finalError)) }

type finalError struct{ error }

func (e *finalError) Unwrap() error { return e.error }

// WithPause adds to an error the pause that the server demands.
func WithPause(err error, pause time.Duration) error {
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

// AskedPause returns the pause that WithPause added, or 0.
func AskedPause(err error) time.Duration {
	if after := (*afterError)(nil); errors.As(err, &after) {
		return after.pause
	}
	return 0
}

// RetryAfter returns the pause that a response demands, at most longestAsked. It supports only
// seconds, not dates.
func RetryAfter(resp *http.Response) time.Duration {
	seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
	if err != nil || seconds < 0 {
		return 0
	}
	return time.Duration(min(seconds, int(longestAsked/time.Second))) * time.Second
}

// IsTemporary reports whether an HTTP status means a temporary error.
func IsTemporary(status int) bool {
	return status == http.StatusTooManyRequests || status == http.StatusRequestTimeout || status >= 500
}
