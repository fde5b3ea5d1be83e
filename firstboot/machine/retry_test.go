package machine

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"
)

// TestRetrySaysWhatWasWrong: neither the deadline nor a try that it cut off hides
// the reason.
func TestRetrySaysWhatWasWrong(t *testing.T) {
	t.Parallel()
	reason := errors.New("not registered")
	for _, tt := range []struct {
		name         string
		cutOff       bool // the deadline comes during a try
		patience     time.Duration
		fails, tries int
		want         error
	}{
		{"well in the end", false, math.MaxInt64, 2, 3, nil},
		{"deadline between two tries", false, math.MaxInt64, 9, 4, reason},
		{"deadline during a try", true, math.MaxInt64, 9, 4, reason},
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
		err := e.RetryFor(ctx, tt.patience, time.Minute, func() error {
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
