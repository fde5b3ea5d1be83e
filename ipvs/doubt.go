package ipvs

import (
	"context"
	"slices"
	"sync/atomic"
	"time"
)

// inquiry decides between a slow API server and a dead one: PINGs go on over
// the held connection, where each new packet also helps TCP to recover lost
// ones, and every tick tries a fresh connection.
type inquiry struct {
	w *watcher
	l *link
	// fresh delivers what became of the pending tries.
	fresh   chan attempt
	pending int
	// signs are set by tries on which the API server's program said anything.
	signs []*atomic.Bool
}

// attempt is what became of a fresh connection.
type attempt struct {
	l     *link
	class outcome
	err   error
}

// finding is what a round led to. Unless it is over, the round failed as class
// and err say.
type finding struct {
	over  bool
	alive *link // the connection to go on with, if it is over
	class outcome
	err   error
}

// doubt makes an inquiry of as many rounds as may fail. Each round without any
// sign of life counts as one failed probe; a fresh connection on which the API
// server began to answer excuses one round, as many times as it takes to fall.
// ok is false when the API server has to be dialled anew.
func (w *watcher) doubt(ctx context.Context, l *link) (alive *link, ok bool) {
	ctx, cancel := context.WithCancel(ctx)
	q := &inquiry{w: w, l: l, fresh: make(chan attempt, 2*w.fall*w.profile.Ticks)}
	defer func() {
		cancel()
		q.dismiss()
	}()
	tick := time.NewTicker(w.profile.Tick)
	defer tick.Stop()
	for failed, excused := 0, 0; failed < w.fall; {
		f := q.round(ctx, tick.C)
		if f.over {
			return f.alive, f.alive != nil
		}
		if f.class == outcomeTimeout && excused < w.fall && q.excuse() {
			excused++
			continue
		}
		failed++
		if s, _ := w.observe(f.class, f.err); s == Down {
			return nil, false
		}
	}
	return nil, false
}

// round sends a PING and tries a fresh connection in each tick.
func (q *inquiry) round(ctx context.Context, tick <-chan time.Time) finding {
	for range q.w.profile.Ticks - 1 {
		q.try(ctx)
		if q.l.h2 {
			q.w.count(countPing)
			if err := q.l.ping(); err != nil {
				return q.broken(err)
			}
		}
		if f, done := q.listen(ctx, tick); done {
			return f
		}
	}
	return finding{class: outcomeTimeout}
}

// try begins one fresh connection. There is one in each tick: where a fifth of
// all packets is lost, a single one does not get through in time often enough.
func (q *inquiry) try(ctx context.Context) {
	q.pending++
	sign := new(atomic.Bool)
	q.signs = append(q.signs, sign)
	go func() {
		l, class, err := q.w.dial(ctx, max(2*q.w.round(), 1500*time.Millisecond), sign)
		q.fresh <- attempt{l, class, err}
	}()
}

// listen waits for the end of the tick, or for what ends the round.
func (q *inquiry) listen(ctx context.Context, tick <-chan time.Time) (f finding, done bool) {
	for {
		select {
		case <-ctx.Done():
			return finding{over: true}, true
		case <-tick:
			return finding{}, false
		case e := <-q.l.events:
			switch e.kind {
			case evPong, evResponse:
				return finding{over: true, alive: q.l}, true
			case evGoAway:
				return finding{over: true}, true
			}
			return q.broken(e.err), true
		case a := <-q.fresh:
			q.pending--
			switch {
			case a.l != nil:
				return finding{over: true, alive: a.l}, true
			case a.class == outcomeIdentity:
				q.w.observe(a.class, a.err)
				return finding{over: true}, true
			case a.class == outcomeTCPOnly:
				return finding{over: true}, true
			case a.class == outcomeRefused:
				return finding{class: a.class, err: a.err}, true
			}
		}
	}
}

// broken is a held connection that ended meanwhile.
func (q *inquiry) broken(err error) finding {
	q.w.observe(outcomeClosed, err)
	return finding{over: true}
}

// excuse uses one sign of life up, if there is one.
func (q *inquiry) excuse() bool {
	i := slices.IndexFunc(q.signs, (*atomic.Bool).Load)
	if i < 0 {
		return false
	}
	q.signs = slices.Delete(q.signs, i, i+1)
	return true
}

// dismiss closes whoever comes too late.
func (q *inquiry) dismiss() {
	go func(n int) {
		for range n {
			if a := <-q.fresh; a.l != nil {
				a.l.close()
			}
		}
	}(q.pending)
}
