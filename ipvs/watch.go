package ipvs

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
)

// watcher probes one API server until it is cancelled. It reports outcomes to
// observe, which returns the new state.
type watcher struct {
	target  func() probe.Target // called for each connection, because the CA may change
	profile Profile
	fall    int
	observe func(probe.Outcome, error) (s State, soon bool)
	// clusterCheck checks the API server's cluster on each new connection. It may be nil.
	clusterCheck func(context.Context) (probe.Outcome, error)
	// renew tells the watcher to open a new connection.
	renew chan struct{}
	// probeNow triggers a probe, because programs of the node use the API server.
	probeNow chan struct{}
	// slots limits the concurrent handshakes with all API servers: on a small
	// machine two hundred of them would make each other time out.
	slots chan struct{}
	// count counts requests, PINGs and connections for the metrics.
	count func(what counter)
	// ticks has the times at which this process wakes up in any case.
	ticks tickTimes
	// alone reports whether no API server is up, so that probing is urgent.
	alone func() bool
	// readyDue is the time of the next request; zero means at once. It is kept across connections,
	// because kube-apiserver closes the connection of a client without a certificate after every
	// answer.
	readyDue time.Time
	// anonymousCloses counts consecutive closes because this node has no certificate.
	anonymousCloses int
	// rejected is set if the API server does not accept this node's certificate,
	// for example because it has expired.
	rejected bool
	// rtt and handshake are the measured durations of PINGs and handshakes.
	rtt, handshake latency
	spacing        spacing
	// checkPause is the minimum pause after a check of the cluster that has failed.
	checkPause time.Duration
	// late counts consecutive handshakes that took too long. failed counts consecutive attempts
	// without a usable connection.
	late, failed int
	state        State // state returned by the last observe
	// soon is set if the next attempt decides about a change of state.
	soon bool
	// silent is the connection of an API server that is down because it did not answer. If it
	// answers again, no new handshake is needed.
	silent *probe.Link
	// paused is the schedule of the silent connection.
	paused *schedule
}

// maxHandshakes is the number of slots.
const maxHandshakes = 24

// counter identifies an event that is counted in the metrics.
type counter int

const (
	countDial counter = iota
	countPing
	countRequest
	counters
)

// run probes until the context ends.
func (w *watcher) run(ctx context.Context) {
	var next *probe.Link // verified connection, opened while the old one did not answer
	for ctx.Err() == nil {
		l := next
		next = nil
		if l == nil {
			if l = w.connect(ctx); l == nil {
				break
			}
		}
		s := w.paused
		if l != w.silent { // the silent connection has shown its cluster before
			s = nil
			asked := time.Now()
			if outcome, err := w.checkCluster(ctx); err != nil {
				l.Close()
				if ctx.Err() != nil {
					break
				}
				if outcome == probe.Timeout { // the handshake succeeded, but nothing else
					outcome = probe.Late
				}
				w.reportFailure(outcome, err)
				w.checkPause = w.spacing.answered(time.Now(), time.Since(asked), false, false)
				if outcome == probe.Recreated {
					w.closeSilent()
					w.rest(ctx, jitter(recreatedPause*w.profile.Retry))
					w.failed = 0
				}
				continue
			}
			w.closeSilent()
			w.checkPause = 0
		}
		w.silent, w.paused = nil, nil
		began := time.Now()
		next = w.hold(ctx, l, s)
		if l != w.silent {
			l.Close()
		}
		if next == nil && w.silent == nil && time.Since(began) < w.profile.Tick {
			// Avoid a busy loop with a server that accepts each connection and closes it at once.
			w.rest(ctx, w.profile.Tick)
		}
	}
	w.closeSilent()
	if next != nil {
		next.Close()
	}
}

// closeSilent closes the silent connection, if there is one.
func (w *watcher) closeSilent() {
	if w.silent != nil {
		w.silent.Close()
		w.silent, w.paused = nil, nil
	}
}

// connect returns a new connection, or the silent one if the API server answers over it again. It
// retries until the context ends, and then returns nil.
func (w *watcher) connect(ctx context.Context) *probe.Link {
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
		l, a := w.await(ctx, tried)
		cancel()
		switch {
		case l != nil:
			go func() { // close the new connection if it is established later
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
		w.recordHandshake(a)
		if a.err == nil {
			return a.l
		}
		w.reportFailure(a.outcome, a.err)
	}
	return nil
}

// await waits for the result of an attempt. If the silent connection answers first, await returns
// it.
func (w *watcher) await(ctx context.Context, tried <-chan attempt) (*probe.Link, attempt) {
	for {
		select {
		case a := <-tried: // the attempt itself ends with the context
			return nil, a
		case e := <-w.silentEvents():
			if l := w.heardSilent(e); l != nil {
				return l, attempt{}
			}
		}
	}
}

// silentEvents returns the events of the silent connection.
func (w *watcher) silentEvents() <-chan probe.Event {
	if w.silent == nil {
		return nil
	}
	return w.silent.Events
}

// heardSilent handles an event of the silent connection, and returns the
// connection if it answered.
func (w *watcher) heardSilent(e probe.Event) *probe.Link {
	switch e.Kind {
	case probe.EventPong:
		return w.silent
	case probe.EventResponse:
		w.paused.asked = time.Time{} // the answer is too old to count
		return w.silent
	case probe.EventClosed:
		w.report(probe.Closed, e.Err)
	}
	w.closeSilent()
	return nil
}

// report passes an outcome to observe.
func (w *watcher) report(outcome probe.Outcome, err error) (s State, soon bool) {
	w.state, soon = w.observe(outcome, err)
	if w.state == Up {
		w.failed = 0
	}
	if outcome == probe.Refused { // a server that refuses connections is not busy with requests
		w.spacing, w.late, w.checkPause = spacing{}, 0, 0
	}
	return w.state, soon
}

// reportFailure reports an attempt without a usable connection.
func (w *watcher) reportFailure(outcome probe.Outcome, err error) {
	_, w.soon = w.report(outcome, err)
	w.failed++
	w.readyDue = time.Time{}
}

// pause waits before the next attempt. If the silent connection answers meanwhile, pause returns
// it.
func (w *watcher) pause(ctx context.Context) *probe.Link {
	if w.soon {
		w.soon = false
		l, _ := w.rest(ctx, w.profile.Tick)
		return l
	}
	r := rand.Float64()
	began := time.Now()
	for ctx.Err() == nil {
		// Compute the pause repeatedly, because other API servers may go down meanwhile.
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

// backoff returns the pause before the next attempt. r is random, in [0,1); it spreads the nodes of
// a cluster over the second half of the pause.
func (w *watcher) backoff(r float64) time.Duration {
	d, most := w.profile.Retry, w.profile.RetryMax
	if !w.alone() {
		d = max(d, w.profile.Spread)
	}
	if w.late > 0 { // for a slow API server an abandoned handshake is as much work as a completed one
		d, most = max(d, w.handshakeTimeout()), max(most, 2*maxTimeout)
	}
	for i := 1; i < w.failed && d < most; i++ {
		d = min(2*d, most)
	}
	return max(randomHalf(d, r), w.checkPause)
}

// connectTimeout returns the timeout of the TCP handshake: one round of an inquiry, but at least
// the time for one lost SYN.
func (w *watcher) connectTimeout() time.Duration {
	return max(time.Duration(w.profile.Ticks)*w.profile.Tick, 1500*time.Millisecond)
}

// handshakeMargin is the minimum time for the TLS handshake with an API server that accepts the
// connection: a thousand nodes may connect at once.
const handshakeMargin = 5 * time.Second

// handshakeTimeout returns a timeout that follows the measured handshakes. It doubles while they
// time out, because an abandoned handshake is wasted work for both sides.
func (w *watcher) handshakeTimeout() time.Duration {
	d := w.handshake.timeout(max(w.connectTimeout(), handshakeMargin), maxTimeout)
	return min(d<<min(w.late, 8), maxTimeout)
}

// recordHandshake records the duration of a handshake.
func (w *watcher) recordHandshake(a attempt) {
	switch {
	case a.l != nil:
		w.late = 0
		w.handshake.add(a.took)
	case a.outcome == probe.Late && w.state != Unknown: // the first verdict must not wait longer
		w.late++
	}
}

// jitter returns d shortened by a random part, so that nodes that booted
// together do not act at the same time.
func jitter(d time.Duration) time.Duration {
	return d - time.Duration(rand.Int64N(int64(maxJitter(d))+1))
}

// maxJitter returns the maximum by which jitter shortens d: a fifth of d, at most five seconds.
// More would mean shorter pauses and more packets.
func maxJitter(d time.Duration) time.Duration {
	return min(d/5, 5*time.Second)
}

// rest waits until d has passed or the silent connection answers; in the latter case it returns
// that connection. It reports whether it was woken: renew was triggered or the context ended.
func (w *watcher) rest(ctx context.Context, d time.Duration) (l *probe.Link, woken bool) {
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil, true
		case <-w.renew:
			return nil, true
		case e := <-w.silentEvents():
			if l := w.heardSilent(e); l != nil {
				return l, false
			}
		case <-t.C:
			return nil, false
		}
	}
}

// dial connects and classifies failures. The timeout includes the TLS
// handshake.
func (w *watcher) dial(ctx context.Context, timeout time.Duration, progress *atomic.Int32) attempt {
	select {
	case w.slots <- struct{}{}:
		defer func() { <-w.slots }()
	case <-ctx.Done():
		return attempt{outcome: probe.Timeout, err: ctx.Err()}
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
		a.outcome = probe.Classify(err, t.Roots == nil && !t.Probe.Unsafe)
		if a.outcome == probe.Timeout && progress.Load() >= probe.Connected {
			a.outcome = probe.Late
		}
	}
	return a
}

// checkCluster checks the API server's cluster. It occupies one of the slots for handshakes.
func (w *watcher) checkCluster(ctx context.Context) (probe.Outcome, error) {
	if w.clusterCheck == nil {
		return probe.OK, nil
	}
	select {
	case w.slots <- struct{}{}:
		defer func() { <-w.slots }()
	case <-ctx.Done():
		return probe.Timeout, ctx.Err()
	}
	return w.clusterCheck(ctx)
}

// hold probes over one connection until the connection ends. The schedule decides what is sent and
// when. hold returns the connection to use next, if an inquiry opened one. s is the connection's
// schedule if the connection was held before, otherwise nil.
func (w *watcher) hold(ctx context.Context, l *probe.Link, s *schedule) *probe.Link {
	if s != nil {
		s.resume(time.Now())
	} else {
		s = newSchedule(time.Now(), &w.profile, w.ticks, l.HTTP2, w.readyDue, &w.rtt, &w.spacing)
	}
	w.readyDue = time.Time{}
	due := time.NewTimer(0)
	defer due.Stop()
	for {
		for !l.Exhausted() {
			what := s.next(time.Now())
			if what == idle {
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
			// Compute the wait repeatedly, because other API servers may go down meanwhile.
			wait = min(wait, w.profile.Retry)
		}
		due.Reset(wait)
		select {
		case <-ctx.Done():
			return nil
		case <-w.renew:
			return nil
		case <-w.probeNow:
			s.pingSoon(time.Now())
		case e := <-l.Events:
			if w.handle(s, l, e) {
				return nil
			}
		case <-due.C:
		}
		// With anonymousCloses, each request costs a handshake, and a thousand nodes may be
		// waiting.
		if w.state != Up && w.alone() && w.anonymousCloses == 0 {
			s.hurry(w.profile.RetryMax)
		}
	}
}

// do performs an action of the schedule. over means that the connection must be closed. next, if
// not nil, is the connection to use instead.
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
		result, conn, answer := w.inquire(ctx, l)
		s.inquired(time.Now())
		switch result {
		case silent:
			w.silent, w.paused, w.readyDue = l, s, time.Time{}
			w.failed++
			return nil, true
		case reconnect:
			return nil, true
		}
		if conn != l {
			if !w.soon && !s.awaits() {
				w.readyDue = s.readyDue
			}
			return conn, true
		}
		if answer != nil && s.awaits() {
			return nil, w.handle(s, l, *answer)
		}
		s.afterInquiry(time.Now(), w.soon)
	case overdue:
		waited := time.Since(s.asked)
		late := fmt.Errorf("no answer to %s in %s", l.Target.Probe.Path, waited.Round(time.Second))
		switch {
		case !l.HTTP2: // over HTTP/2 an inquiry would have started already
			w.reportFailure(probe.Timeout, late)
			return nil, true
		case waited >= mostAnswer:
			w.reportFailure(probe.Overdue, late)
			return nil, true
		}
		w.report(probe.Overdue, late)
		return nil, false
	}
	if err != nil {
		w.broken(s, err)
	}
	return nil, err != nil
}

// broken reports a connection that was closed or failed. If it has never answered a request, a
// pause follows as after a failed attempt: the server may close each connection after the
// handshake.
func (w *watcher) broken(s *schedule, err error) {
	if s.answered.IsZero() {
		w.reportFailure(probe.Closed, err)
		return
	}
	w.report(probe.Closed, err)
}

// handle handles an event. It reports whether the connection has ended.
func (w *watcher) handle(s *schedule, l *probe.Link, e probe.Event) (over bool) {
	switch e.Kind {
	case probe.EventPong:
		if e.Ping == l.Pings { // otherwise it answers an earlier PING, sent in an inquiry
			s.pong(time.Now())
		}
	case probe.EventGoAway:
		over, w.readyDue = s.goAway(time.Now())
		if !w.readyDue.IsZero() {
			w.deferRequest(l)
		}
		return over
	case probe.EventClosed:
		w.broken(s, e.Err)
		return true
	case probe.EventResponse:
		if !s.awaits() {
			return false
		}
		answer := l.Target.Probe.Judge(e, l.Skew)
		w.rejected = e.Status == 401
		var state State
		if state, w.soon = w.report(answer, nil); state != Up {
			w.failed++
		}
		s.response(time.Now(), answer, state, w.soon, w.backoff(rand.Float64()))
		if s.closing {
			w.readyDue = s.readyDue
			w.deferRequest(l)
			return true
		}
	}
	return false
}

// maxAnonymousPause is the longest pause between requests to an API server that closes the
// connection after each answer. After 90 s without requests it would close the connection in any
// case.
const maxAnonymousPause = 80 * time.Second

// deferRequest does not postpone a request that is due within soonDue, because the request has
// another reason, such as an outcome that contradicts the state.
const soonDue = 5 * time.Second

// deferRequest postpones the next request if the API server closed the connection because this node
// has no accepted certificate. Each request then needs a handshake, and a thousand nodes may be
// waiting for their certificates. PINGs are still sent.
func (w *watcher) deferRequest(l *probe.Link) {
	if l.Target.Client != nil && !w.rejected {
		w.anonymousCloses = 0
		return
	}
	now := time.Now()
	most := maxAnonymousPause
	if w.state != Up { // its recovery must be noticed
		most = max(mostSpacing, min(w.spacing.trouble(now)/4, maxAnonymousPause))
	}
	if w.readyDue.Sub(now) < soonDue {
		return // a request is due soon for another reason
	}
	w.anonymousCloses++
	d := max(w.profile.Ready, min(w.profile.Ready<<min(w.anonymousCloses, 8), most))
	w.readyDue = w.ticks.within(now, d)
}
