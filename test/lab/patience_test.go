package lab

import (
	"context"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestPatience(t *testing.T) {
	for _, tc := range []struct {
		name       string
		ran, stood time.Duration // in each second
		after      time.Duration
		says       string
	}{
		{"quiet", time.Second, 0, 10 * time.Minute, "not starved: it had a processor for 100 %"},
		{"idle", 0, 0, 10 * time.Minute, "not starved"},
		{"busy host", time.Second, time.Second / 2, 15 * time.Minute, "not starved: it had a processor for 66 %"},
		{"starved", time.Second / 4, 3 * time.Second / 4, 40 * time.Minute, "STARVED"},
		{"hopeless", time.Second / 100, 99 * time.Second / 100, 40 * time.Minute, "STARVED"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				ctx, cancel := patience(t.Context(), 10*time.Minute, func() effort {
					s := time.Since(start).Seconds()
					return effort{time.Duration(s * float64(tc.ran)), time.Duration(s * float64(tc.stood))}
				})
				defer cancel()
				<-ctx.Done()
				took := time.Since(start)
				if took < tc.after-10*time.Second || took > tc.after+10*time.Second || !strings.Contains(context.Cause(ctx).Error(), tc.says) {
					t.Errorf("it ended after %v, want %v: %v", took, tc.after, context.Cause(ctx))
				}
			})
		})
	}
}

func TestEffortIsMeasured(t *testing.T) {
	before := effortOf(os.Getpid())
	for end := time.Now().Add(50 * time.Millisecond); time.Now().Before(end); {
	}
	if after := effortOf(os.Getpid()); after.ran <= before.ran {
		t.Errorf("this process worked, and its effort went from %v to %v", before, after)
	}
}
