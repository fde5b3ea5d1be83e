package machine

import (
	"context"
	"errors"
	"testing"
	"time"
)

// TestRetrySaysWhatWasWrong checks that Retry returns the reason of the last failure, and not the
// deadline or the error of an interrupted attempt.
func TestRetrySaysWhatWasWrong(t *testing.T) {
	t.Parallel()
	reason := errors.New("not registered")
	for _, tt := range []struct {
		name         string
		cutOff       bool // the deadline passes during an attempt
		patience     time.Duration
		fails, tries int
		want         error
	}{
		{"well in the end", false, 0, 2, 3, nil},
		{"deadline between two tries", false, 0, 9, 4, reason},
		{"deadline during a try", true, 0, 9, 4, reason},
		{"patience is over", false, 2 * time.Minute, 9, 4, reason},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		now, tries := time.Unix(0, 0), 0
		e := &Env{Clock: Clock{Now: func() time.Time { return now }, Sleep: func(ctx context.Context, d time.Duration) error {
			if now = now.Add(d); tries == 4 {
				cancel()
			}
			return ctx.Err()
		}}}
		err := e.Retry(ctx, Wait{Every: time.Minute, For: tt.patience}, func() error {
			switch tries++; {
			case tries > tt.fails:
				return nil
			case tries == 4 && tt.cutOff:
				cancel()
				return ctx.Err()
			}
			return reason
		})
		cancel()
		if err != tt.want || tries != tt.tries {
			t.Errorf("%s: %v after %d tries, expected %v after %d", tt.name, err, tries, tt.want, tt.tries)
		}
	}
}

// TestRetryGently checks that a long wait polls less and less often, but ends only slightly late.
func TestRetryGently(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		after       time.Duration // until it succeeds
		least, most int           // attempts
		late        time.Duration
	}{
		{4 * time.Second, 3, 3, 0},
		{16 * time.Second, 9, 9, 0},
		{80 * time.Second, 15, 23, 10 * time.Second},
		{10 * time.Minute, 60, 76, 10 * time.Second},
	} {
		now, tries := time.Unix(0, 0), 0
		e := &Env{Clock: Clock{Now: func() time.Time { return now }, Sleep: func(ctx context.Context, d time.Duration) error {
			now = now.Add(d)
			return nil
		}}}
		err := e.Retry(t.Context(), Wait{Every: 2 * time.Second, Gently: true}, func() error {
			if tries++; now.Sub(time.Unix(0, 0)) < tt.after {
				return errors.New("not registered")
			}
			return nil
		})
		late := now.Sub(time.Unix(0, 0)) - tt.after
		if err != nil || tries < tt.least || tries > tt.most || late > tt.late {
			t.Errorf("%v after %d tries, %s late; expected %d to %d tries, at most %s late", err, tries, late, tt.least, tt.most, tt.late)
		}
	}
}
