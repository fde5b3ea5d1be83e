package ipvs

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// watcher senses one API server for as long as it lives. It reports outcomes
// through observe, which returns the belief that follows from them.
type watcher struct {
	target  func() target // asked at every dial: the CA may have come or changed
	profile Profile
	fall    int
	observe func(outcome, error) (s State, doubted bool)
	// vouch has the API server show which cluster it is of, at each new connection
	// and before it is believed; nil: it need not.
	vouch func(context.Context) (outcome, error)
	// renew tells the watcher to dial anew.
	renew chan struct{}
	// stuck tells it that the node's own connections to the API server wait for an
	// answer.
	stuck chan struct{}
	// slots bounds how many handshakes go on at once, over all API servers:
	// on a small machine two hundred of them together would time each other out.
	slots chan struct{}
	// count is told of what goes over the wire.
	count func(what counter)
	// beat is when this process is awake anyway.
	beat   beat
	alarms alarms
	// readyDue is when the next request is due, across connections: a
	// kube-apiserver hangs up after every answer to somebody it does not
	// know. Zero: at once.
	readyDue time.Time
}

// handshakes is how many slots there are.
const handshakes = 24

// counter is one of the events that metrics count.
type counter int

const (
	countDial counter = iota
	countPing
	countRequest
	counters
)

// run watches until the context ends.
func (w *watcher) run(ctx context.Context) {
	var next *link // a connection that proved itself while the old one was doubted
	for ctx.Err() == nil {
		l := next
		next = nil
		if l == nil {
			var class outcome
			var err error
			l, class, err = w.dial(ctx, w.dialTimeout(), nil)
			if ctx.Err() != nil {
				break
			}
			if err != nil {
				_, doubted := w.observe(class, err)
				w.readyDue = time.Time{}
				w.sleep(ctx, w.pause(doubted))
				continue
			}
		}
		if class, err := w.vouched(ctx); err != nil {
			l.close()
			if ctx.Err() != nil {
				break
			}
			_, doubted := w.observe(class, err)
			w.readyDue = time.Time{}
			pause := w.pause(doubted)
			if class == outcomeReborn {
				pause = jitter(rebornPause * w.profile.Retry)
			}
			w.sleep(ctx, pause)
			continue
		}
		began := time.Now()
		next = w.hold(ctx, l)
		l.close()
		if next == nil && time.Since(began) < w.profile.Tick {
			// Whoever accepts and hangs up at once must not make us spin.
			w.sleep(ctx, w.profile.Tick)
		}
	}
	if next != nil {
		next.close()
	}
}

// pause is how long to wait before the next try.
func (w *watcher) pause(doubted bool) time.Duration {
	if doubted {
		return w.profile.Tick
	}
	return jitter(w.profile.Retry)
}

// dialTimeout leaves room for one lost SYN.
func (w *watcher) dialTimeout() time.Duration {
	return max(w.round(), 1500*time.Millisecond)
}

// round is the length of one round of doubt.
func (w *watcher) round() time.Duration {
	return time.Duration(w.profile.Ticks) * w.profile.Tick
}

// jitter shortens d a little, so that nodes that booted together do not stay
// together. It never lengthens: d is a promise.
func jitter(d time.Duration) time.Duration {
	return d - time.Duration(rand.Int64N(int64(room(d))+1))
}

// room is how much earlier than after d something may be done: a fifth of it,
// but not more than spreads nodes well, since it is sent the more often.
func room(d time.Duration) time.Duration {
	return min(d/5, 5*time.Second)
}

func (w *watcher) sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-w.renew:
	case <-t.C:
	}
}

// dial connects and classes a failure. heard, if given, is set as soon as the
// API server's program says anything.
func (w *watcher) dial(ctx context.Context, timeout time.Duration, heard *atomic.Bool) (*link, outcome, error) {
	select {
	case w.slots <- struct{}{}:
		defer func() { <-w.slots }()
	case <-ctx.Done():
		return nil, outcomeTimeout, ctx.Err()
	}
	w.count(countDial)
	t := w.target()
	t.heard = heard
	dctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	l, err := dialLink(dctx, t, bodyLimit)
	if err == nil {
		return l, outcomeOK, nil
	}
	return nil, classify(err, t.roots == nil && !t.probe.Unsafe), err
}

// vouched has the API server show its cluster, one of as many as may shake hands
// at once.
func (w *watcher) vouched(ctx context.Context) (outcome, error) {
	if w.vouch == nil {
		return outcomeOK, nil
	}
	select {
	case w.slots <- struct{}{}:
		defer func() { <-w.slots }()
	case <-ctx.Done():
		return outcomeTimeout, ctx.Err()
	}
	return w.vouch(ctx)
}

// hold senses over one connection until it breaks. It returns the connection
// to go on with, if one proved itself meanwhile. What is sent and when is the
// schedule's to decide; the loop has one alarm, and does what it says.
func (w *watcher) hold(ctx context.Context, l *link) *link {
	s := newSchedule(time.Now(), &w.profile, w.beat, l.h2, w.readyDue)
	w.readyDue = time.Time{}
	due := w.alarms()
	defer due.stop()
	for {
		for !l.exhausted() {
			what := s.next(time.Now())
			if what == rest {
				break
			}
			if next, over := w.do(ctx, l, s, what); over {
				return next
			}
		}
		if l.exhausted() {
			return nil
		}
		due.set(time.Until(s.due()))
		select {
		case <-ctx.Done():
			return nil
		case <-w.renew:
			return nil
		case <-w.stuck:
			s.suspect(time.Now())
		case e := <-l.events:
			if w.hear(s, l, e) {
				return nil
			}
		case <-due.C:
		}
	}
}

// do carries out what the schedule wants. over says that the connection is not
// to be held any longer; next is the one to go on with, if there is one.
func (w *watcher) do(ctx context.Context, l *link, s *schedule, what action) (next *link, over bool) {
	var err error
	switch what {
	case ask:
		w.count(countRequest)
		err = l.ask()
	case ping:
		w.count(countPing)
		err = l.ping()
	case doubt:
		alive, ok := w.doubt(ctx, l)
		if !ok || alive != l {
			return alive, true
		}
		s.trust(time.Now())
	case overdue:
		w.observe(outcomeTimeout, fmt.Errorf("no answer to %s in %s", l.target.probe.Path, w.profile.ReadyTimeout))
		// Over HTTP/2 it answers PINGs, so only the request hangs: it is asked
		// once more on the same connection.
		return nil, !l.h2
	}
	if err != nil {
		w.observe(outcomeClosed, err)
	}
	return nil, err != nil
}

// hear takes an event, and reports whether the connection is over.
func (w *watcher) hear(s *schedule, l *link, e event) (over bool) {
	switch e.kind {
	case evPong:
		s.pong(time.Now())
	case evGoAway:
		over, w.readyDue = s.goAway(time.Now())
		return over
	case evClosed:
		w.observe(outcomeClosed, e.err)
		return true
	case evResponse:
		if !s.awaits() {
			return false
		}
		state, doubted := w.observe(l.target.probe.judge(e, l.skew), nil)
		s.response(time.Now(), state, doubted)
		if s.leaving {
			w.readyDue = s.readyDue
			return true
		}
	}
	return false
}
