package lab

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// guest is a machine whose clock runs at its own rate.
type guest struct {
	mu           sync.Mutex
	pace         float64 // relative to this host's clock
	off, stopped bool
	mute         bool
	clock        time.Time
	seen         time.Time
}

// at advances the clock to now and calls f with the guest locked.
func (g *guest) at(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.off && !g.stopped {
		g.clock = g.clock.Add(time.Duration(float64(time.Since(g.seen)) * g.pace))
	}
	g.seen = time.Now()
	f()
}

func (g *guest) Running() (on bool) {
	g.at(func() { on = !g.off })
	return on
}

func (g *guest) now(context.Context) (now time.Time, err error) {
	g.at(func() {
		if g.mute {
			err = errors.New("it does not answer")
		}
		now = g.clock.Truncate(time.Second)
	})
	return now, err
}

func (g *guest) command(_ context.Context, name string) (err error) {
	g.at(func() {
		if g.mute {
			err = errors.New("it does not answer")
			return
		}
		g.stopped = name == "stop"
	})
	return err
}

// TestLockstep checks that machines that run at different rates have the same time. A stalled
// machine must hold up the others, a stopped one must not.
func TestLockstep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, end := newLockstep()
		defer end()
		start := s.Now()
		on := func(pace float64) *guest {
			g := &guest{pace: pace, clock: s.Now(), seen: time.Now()}
			s.add(g)
			return g
		}
		slow, fast, other := on(0.1), on(1), on(0.7)
		together := func(what string, all ...*guest) {
			t.Helper()
			for _, g := range all {
				now, _ := g.now(t.Context())
				if g.at(func() { now = g.clock }); now.Sub(s.Now()).Abs() > lead+time.Second {
					t.Errorf("%s: a machine of pace %v is at %v, and the clock at %v", what, g.pace, now.Sub(start), s.Now().Sub(start))
				}
			}
		}
		passed := func(what string, since time.Time, want time.Duration) {
			t.Helper()
			if got := s.Now().Sub(since); got < want-2*lead || got > want+2*lead {
				t.Errorf("%s: the clock went on by %v, want %v", what, got, want)
			}
		}
		time.Sleep(200 * time.Second)
		together("all run", slow, fast, other)
		passed("all run", start, 20*time.Second)

		now := s.Now()
		slow.at(func() { slow.pace, slow.mute = 0, true })
		time.Sleep(time.Minute)
		together("one stands still", fast, other)
		passed("one stands still", now, 0)

		slow.at(func() { slow.off = true })
		now = s.Now()
		time.Sleep(100 * time.Second)
		together("one is off", fast, other)
		passed("one is off", now, 70*time.Second)

		late := on(0.5)
		now = s.Now()
		time.Sleep(100 * time.Second)
		together("one more is on", fast, other, late)
		passed("one more is on", now, 50*time.Second)

		for _, g := range []*guest{fast, other, late} {
			g.at(func() { g.off = true })
		}
		now = s.Now()
		time.Sleep(time.Minute)
		passed("all are off", now, 0)
	})
}

// TestLockstepPatience checks that time limits for such machines count the machines' time.
func TestLockstepPatience(t *testing.T) {
	for pace, want := range map[float64]struct {
		after time.Duration
		says  string
	}{
		1:    {10 * time.Minute, "on the machines' own clock"},
		0.5:  {20 * time.Minute, "on the machines' own clock"},
		0.01: {40 * time.Minute, "STARVED"},
	} {
		synctest.Test(t, func(t *testing.T) {
			s, end := newLockstep()
			defer end()
			s.add(&guest{pace: pace, clock: s.Now(), seen: time.Now()})
			start := time.Now()
			ctx, cancel := s.patience(t.Context(), 10*time.Minute)
			defer cancel()
			<-ctx.Done()
			if took := time.Since(start); took < want.after-15*time.Second || took > want.after+15*time.Second || !strings.Contains(context.Cause(ctx).Error(), want.says) {
				t.Errorf("at pace %v it ended after %v, want %v: %v", pace, took, want.after, context.Cause(ctx))
			}
		})
	}
}
