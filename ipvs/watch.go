package ipvs

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
)

// watcher senses one API server for as long as it lives. It reports outcomes
// through observe, which returns the belief that follows from them.
type watcher struct {
	target  func() probe.Target // asked at every dial: the CA may have come or changed
	profile Profile
	fall    int
	observe func(probe.Outcome, error) (s State, soon bool)
	// vouch has the API server show which cluster it is of, at each new connection
	// and before it is believed; nil: it need not.
	vouch func(context.Context) (probe.Outcome, error)
	// renew tells the watcher to dial anew.
	renew chan struct{}
	// needed tells it that programs of the node use the API server, or wait for it.
	needed chan struct{}
	// slots bounds how many handshakes go on at once, over all API servers:
	// on a small machine two hundred of them together would time each other out.
	slots chan struct{}
	// count is told of what goes over the wire.
	count func(what counter)
	// beat is when this process is awake anyway.
	beat beat
	// alone reports whether no API server is up: the return of this one is urgent.
	alone func() bool
	// readyDue is when the next request is due, across connections: a
	// kube-apiserver hangs up after every answer to somebody it does not
	// know. Zero: at once.
	readyDue time.Time
	// strange counts answers in a row after which the API server hung up for that reason.
	strange int
	// rtt and shake are the measured times until a PING is answered, and of a
	// handshake.
	rtt, shake latency
	spacing    spacing
	// late counts handshakes in a row that took too long, failed all tries in a row
	// that led to no connection, or to an answer that did not help.
	late, failed int
	state        State // what observe returned last
	// soon: the next try is one of those that decide about a verdict.
	soon bool
	// silent is the connection of an API server that was called down because it did
	// not answer. It is held: to an API server that answers again it is one
	// handshake less.
	silent *probe.Link
	// paused is the schedule of that connection.
	paused *schedule
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
	var next *probe.Link // a connection that proved itself while the old one did not answer
	for ctx.Err() == nil {
		l := next
		next = nil
		if l == nil {
			if l = w.reach(ctx); l == nil {
				break
			}
		}
		s := w.paused
		if l != w.silent { // or the same process has shown its cluster already
			s = nil
			if class, err := w.vouched(ctx); err != nil {
				l.Close()
				if ctx.Err() != nil {
					break
				}
				if class == probe.Timeout { // it shook hands
					class = probe.Late
				}
				w.fail(class, err)
				if class == probe.Reborn {
					w.drop()
					w.sleep(ctx, jitter(rebornPause*w.profile.Retry))
					w.failed = 0
				}
				continue
			}
			w.drop()
		}
		w.silent, w.paused = nil, nil
		began := time.Now()
		next = w.hold(ctx, l, s)
		if l != w.silent {
			l.Close()
		}
		if next == nil && w.silent == nil && time.Since(began) < w.profile.Tick {
			// Whoever accepts and hangs up at once must not make us spin.
			w.sleep(ctx, w.profile.Tick)
		}
	}
	w.drop()
	if next != nil {
		next.Close()
	}
}

// drop closes the silent connection.
func (w *watcher) drop() {
	if w.silent != nil {
		w.silent.Close()
		w.silent, w.paused = nil, nil
	}
}

// reach tries until there is a connection, a fresh one or the silent one that speaks
// again. It returns nil when the context ends.
func (w *watcher) reach(ctx context.Context) *probe.Link {
	for ctx.Err() == nil {
		if w.failed > 0 {
			if l := w.pause(ctx); l != nil {
				return l
			}
		}
		dctx, cancel := context.WithCancel(ctx)
		timeout := w.handshakeTimeout()
		tried := make(chan attempt, 1)
		go func() { tried <- w.dial(dctx, timeout, new(atomic.Int32)) }()
		l, a := w.listen(ctx, tried)
		cancel()
		switch {
		case l != nil:
			go func() { // whoever comes too late is closed
				if a := <-tried; a.l != nil {
					a.l.Close()
				}
			}()
			return l
		case ctx.Err() != nil:
			if a.l != nil {
				a.l.Close()
			}
			return nil
		}
		w.shook(a)
		if a.err == nil {
			return a.l
		}
		w.fail(a.class, a.err)
	}
	return nil
}

// listen waits for the result of a try, or for the silent connection to speak, which
// is returned then.
func (w *watcher) listen(ctx context.Context, tried <-chan attempt) (*probe.Link, attempt) {
	for {
		select {
		case a := <-tried: // which also ends with the context
			return nil, a
		case e := <-w.words():
			if l := w.spoke(e); l != nil {
				return l, attempt{}
			}
		}
	}
}

// words are the events of the silent connection.
func (w *watcher) words() <-chan probe.Event {
	if w.silent == nil {
		return nil
	}
	return w.silent.Events
}

// spoke takes an event of the silent connection, and returns it if it lives.
func (w *watcher) spoke(e probe.Event) *probe.Link {
	switch e.Kind {
	case probe.EventPong:
		return w.silent
	case probe.EventResponse:
		w.paused.asked = time.Time{} // it tells of the time before
		return w.silent
	case probe.EventClosed:
		w.see(probe.Closed, e.Err)
	}
	w.drop()
	return nil
}

// see passes an outcome on.
func (w *watcher) see(class probe.Outcome, err error) (s State, soon bool) {
	w.state, soon = w.observe(class, err)
	if w.state == Up {
		w.failed = 0
	}
	if class == probe.Refused { // it works on nothing anymore
		w.spacing = spacing{}
	}
	return w.state, soon
}

// fail takes a try that led to no connection which can be used.
func (w *watcher) fail(class probe.Outcome, err error) {
	_, w.soon = w.see(class, err)
	w.failed++
	w.readyDue = time.Time{}
}

// pause waits before the next try. It returns the silent connection if that speaks meanwhile.
func (w *watcher) pause(ctx context.Context) *probe.Link {
	if w.soon {
		w.soon = false
		return w.sleep(ctx, w.profile.Tick)
	}
	r := rand.Float64()
	began := time.Now()
	for ctx.Err() == nil {
		// Looked at again and again: the others may go down meanwhile.
		left := w.backoff(r) - time.Since(began)
		if left <= 0 {
			break
		}
		l, woken := w.rest(ctx, min(left, w.profile.Retry))
		if l != nil || woken {
			return l
		}
	}
	return nil
}

// backoff is the pause before the next try; r in [0,1) spreads the nodes of a cluster
// over half to all of it.
func (w *watcher) backoff(r float64) time.Duration {
	d, most := w.profile.Retry, w.profile.RetryMax
	if !w.alone() {
		d = max(d, w.profile.Spread)
	}
	for i := 1; i < w.failed && d < most; i++ {
		d = min(2*d, most)
	}
	return d/2 + time.Duration(r*float64(d/2))
}

// connectTimeout leaves room for one lost SYN.
func (w *watcher) connectTimeout() time.Duration {
	return max(w.round(), 1500*time.Millisecond)
}

// handshakeTimeout follows the measured handshakes, and doubles while they time out:
// one that is given up was work for nothing on both sides.
func (w *watcher) handshakeTimeout() time.Duration {
	d := w.shake.patience(w.connectTimeout(), mostPatience)
	return min(d<<min(w.late, 8), mostPatience)
}

// shook takes how long a handshake took.
func (w *watcher) shook(a attempt) {
	switch {
	case a.l != nil:
		w.late = 0
		w.shake.add(a.took)
	case a.class == probe.Late:
		w.late++
	}
}

// round is the length of one round of an inquiry.
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

// sleep waits, but not longer than until the silent connection speaks, which it
// returns then, or the watcher is to dial anew.
func (w *watcher) sleep(ctx context.Context, d time.Duration) *probe.Link {
	l, _ := w.rest(ctx, d)
	return l
}

// rest is sleep, and reports whether the watcher is to dial anew.
func (w *watcher) rest(ctx context.Context, d time.Duration) (l *probe.Link, woken bool) {
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil, true
		case <-w.renew:
			return nil, true
		case e := <-w.words():
			if l := w.spoke(e); l != nil {
				return l, false
			}
		case <-t.C:
			return nil, false
		}
	}
}

// dial connects and classes a failure. The timeout is of the handshake over TLS.
func (w *watcher) dial(ctx context.Context, timeout time.Duration, progress *atomic.Int32) attempt {
	select {
	case w.slots <- struct{}{}:
		defer func() { <-w.slots }()
	case <-ctx.Done():
		return attempt{class: probe.Timeout, err: ctx.Err()}
	}
	w.count(countDial)
	t := w.target()
	t.Progress, t.ConnectTime = progress, w.connectTimeout()
	dctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	began := time.Now()
	l, err := probe.Dial(dctx, t, probe.BodyLimit)
	a := attempt{l: l, err: err, took: time.Since(began)}
	if err != nil {
		a.class = probe.Classify(err, t.Roots == nil && !t.Probe.Unsafe)
		if a.class == probe.Timeout && progress.Load() >= probe.Connected {
			a.class = probe.Late
		}
	}
	return a
}

// vouched has the API server show its cluster, one of as many as may shake hands
// at once.
func (w *watcher) vouched(ctx context.Context) (probe.Outcome, error) {
	if w.vouch == nil {
		return probe.OK, nil
	}
	select {
	case w.slots <- struct{}{}:
		defer func() { <-w.slots }()
	case <-ctx.Done():
		return probe.Timeout, ctx.Err()
	}
	return w.vouch(ctx)
}

// hold senses over one connection until it breaks. It returns the connection
// to go on with, if one proved itself meanwhile. What is sent and when is the
// schedule's to decide; the loop has one timer.
// s is the connection's schedule if it was held before.
func (w *watcher) hold(ctx context.Context, l *probe.Link, s *schedule) *probe.Link {
	if s != nil {
		s.resume(time.Now())
	} else {
		s = newSchedule(time.Now(), &w.profile, w.beat, l.HTTP2, w.readyDue, &w.rtt, &w.spacing)
	}
	w.readyDue = time.Time{}
	due := time.NewTimer(0)
	defer due.Stop()
	for {
		for !l.Exhausted() {
			what := s.next(time.Now())
			if what == rest {
				break
			}
			if next, over := w.do(ctx, l, s, what); over {
				return next
			}
		}
		if l.Exhausted() {
			return nil
		}
		wait := time.Until(s.due())
		if w.state != Up {
			// Looked at again and again: the others may go down meanwhile.
			wait = min(wait, w.profile.Retry)
		}
		due.Reset(wait)
		select {
		case <-ctx.Done():
			return nil
		case <-w.renew:
			return nil
		case <-w.needed:
			s.needed(time.Now())
		case e := <-l.Events:
			if w.hear(s, l, e) {
				return nil
			}
		case <-due.C:
		}
		if w.state != Up && w.alone() {
			s.hurry(w.profile.RetryMax)
		}
	}
}

// do carries out what the schedule wants. over says that the connection is not
// to be held any longer; next is the one to go on with, if there is one.
func (w *watcher) do(ctx context.Context, l *probe.Link, s *schedule, what action) (next *probe.Link, over bool) {
	var err error
	switch what {
	case ask:
		w.count(countRequest)
		err = l.Ask()
	case ping:
		w.count(countPing)
		err = l.Ping()
	case noAnswer:
		alive, answer, ok, silent := w.inquire(ctx, l)
		s.inquired(time.Now())
		if silent {
			w.silent, w.paused, w.readyDue = l, s, time.Time{}
			w.failed++
		}
		if !ok || alive != l {
			return alive, true
		}
		if answer != nil && s.awaits() {
			return nil, w.hear(s, l, *answer)
		}
		s.trust(time.Now())
	case overdue:
		waited := time.Since(s.asked)
		late := fmt.Errorf("no answer to %s in %s", l.Target.Probe.Path, waited.Round(time.Second))
		switch {
		case !l.HTTP2: // or there would be an inquiry by now
			w.fail(probe.Timeout, late)
			return nil, true
		case waited >= mostAnswer:
			w.fail(probe.Late, late)
			return nil, true
		}
		w.see(probe.Late, late) // it answers PINGs, so only the request hangs
		return nil, false
	}
	if err != nil {
		w.see(probe.Closed, err)
	}
	return nil, err != nil
}

// hear takes an event, and reports whether the connection is over.
func (w *watcher) hear(s *schedule, l *probe.Link, e probe.Event) (over bool) {
	switch e.Kind {
	case probe.EventPong:
		if e.Ping == l.Pings { // or it answers one of an inquiry that is over
			s.pong(time.Now())
		}
	case probe.EventGoAway:
		over, w.readyDue = s.goAway(time.Now())
		if !w.readyDue.IsZero() {
			w.hungUp(l)
		}
		return over
	case probe.EventClosed:
		w.see(probe.Closed, e.Err)
		return true
	case probe.EventResponse:
		if !s.awaits() {
			return false
		}
		answer := l.Target.Probe.Judge(e, l.Skew)
		var state State
		if state, w.soon = w.see(answer, nil); state != Up {
			w.failed++
		}
		s.response(time.Now(), answer, state, w.soon, w.backoff(rand.Float64()))
		if s.leaving {
			w.readyDue = s.readyDue
			w.hungUp(l)
			return true
		}
	}
	return false
}

// strangerMost is the longest pause between requests to an API server that hangs up after
// each answer. After 90 s without a request it hangs up anyway.
const strangerMost = 80 * time.Second

// hungUp puts the next request off if the API server hung up after its answer because
// this node shows no certificate yet. Each request costs a handshake then, and there may
// be a thousand nodes that wait for their certificates. PINGs go on.
func (w *watcher) hungUp(l *probe.Link) {
	if l.Target.Client != nil {
		w.strange = 0
		return
	}
	now := time.Now()
	if w.readyDue.Sub(now) < w.profile.Ready/2 {
		return // it is asked soon for another reason
	}
	w.strange++
	d := max(w.profile.Ready, min(w.profile.Ready<<min(w.strange, 8), strangerMost))
	w.readyDue = w.beat.within(now, d)
}
