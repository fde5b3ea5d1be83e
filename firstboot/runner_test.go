package firstboot

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// TestSpread: a thousand nodes that boot together do not ask together, and none
// of them waits for long.
func TestSpread(t *testing.T) {
	t.Parallel()
	var early, late int
	for i := range 1000 {
		id := fmt.Sprintf("shop-%d", i)
		d := spread(id)
		if d < 0 || d >= spreadMax || d != spread(id) {
			t.Fatalf("%s waits %s", id, d)
		}
		if d < spreadMax/10 {
			early++
		}
		if d >= spreadMax*9/10 {
			late++
		}
	}
	if early > 150 || late > 150 || early < 50 || late < 50 {
		t.Errorf("%d of 1000 in the first tenth, %d in the last", early, late)
	}
	// Once a boot, before the first connection, also when the run begins again.
	w := nativeWorld(t)
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	w.powerOn()
	w.offline, w.patience = true, 5*time.Minute
	e := w.env()
	var first time.Time
	began, dial := w.now, e.Dial
	e.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if first.IsZero() {
			first = w.now
		}
		return dial(ctx, network, addr)
	}
	waits, sleep := 0, e.Sleep
	want := spread("edge-sn0042" + machineID(e))
	e.Sleep = func(ctx context.Context, d time.Duration) error {
		if d == want {
			waits++
		}
		return sleep(ctx, d)
	}
	if err := w.run(New(e)); err == nil {
		t.Fatal("it was done, offline")
	}
	if first.Sub(began) != want || waits != 1 {
		t.Errorf("the first connection came after %s, expected %s; it waited %d times", first.Sub(began), want, waits)
	}
}

// TestBackoff passes real time, made up by synctest.
func TestBackoff(t *testing.T) {
	t.Parallel()
	e := newWorld(t, "testdata/machine.txtar").env() // its API servers live outside the bubble
	synctest.Test(t, func(t *testing.T) {
		var tried []time.Duration
		start := time.Now()
		e.Now = time.Now
		e.Sleep = func(ctx context.Context, d time.Duration) error {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(d):
				return nil
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
		defer cancel()
		r := &Runner{Env: e, Sources: func(*Env) string { return "" }}
		r.First = func() []Phase {
			return []Phase{{
				Name: "never", Doc: "never done", Timeout: 10 * time.Second,
				Check: func(context.Context, *Env) (Verdict, error) { return Todo, nil },
				Run: func(ctx context.Context, e *Env) error {
					tried = append(tried, time.Since(start))
					<-ctx.Done() // hangs until its deadline
					return ctx.Err()
				},
			}}
		}
		if err := r.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		if n := len(tried); n < 20 || n > 60 {
			t.Errorf("%d attempts in 20 minutes", n)
		}
		for i := 1; i < len(tried); i++ {
			pause := tried[i] - tried[i-1] - 10*time.Second
			want := Backoff(i, 0)
			if pause != want {
				t.Errorf("pause %d is %v, not %v", i, pause, want)
			}
		}
		if !r.Alive(time.Now().Add(-time.Minute)) {
			t.Error("the watchdog would have bitten")
		}
	})
	for n := 1; n < 40; n++ {
		low, high := Backoff(n, 0), Backoff(n, 0.999)
		if low <= 0 || high > backoffMax || high < low || high > 2*low {
			t.Errorf("attempt %d: %v to %v", n, low, high)
		}
	}
}
