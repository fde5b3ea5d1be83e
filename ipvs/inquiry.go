package ipvs

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
)

// inquiry distinguishes a slow API server from a dead one. It sends more PINGs over the open
// connection; each packet also helps TCP to recover lost ones. In the last round it opens new
// connections at growing intervals.
type inquiry struct {
	w *watcher
	l *probe.Link
	// fresh receives the results of the attempts to open a new connection.
	fresh   chan attempt
	pending int
	// tick counts ticks. The next attempt begins at tick tryAt, and the one after it pause ticks
	// later.
	tick, tryAt, pause int
	// progress has one entry for each attempt that has not excused a round (see takeSign).
	progress []*atomic.Int32
	// accepted is set if a TCP connection was accepted.
	accepted bool
}

// attempt is the result of opening a new connection.
type attempt struct {
	l       *probe.Link
	outcome probe.Outcome
	err     error
	took    time.Duration
}

// finding is the result of a round. If over is false, the round failed; outcome and err are the
// reason.
type finding struct {
	over  bool
	alive *probe.Link // new connection for the watcher to use, if over
	// answer is the answer to the outstanding request, if it arrived.
	answer  *probe.Event
	outcome probe.Outcome
	err     error
}

// inquiryResult is the result of an inquiry.
type inquiryResult int

const (
	reconnect inquiryResult = iota // a new connection is needed
	silent                         // the API server is down; the open connection is intact and may still answer
	alive                          // the API server answers
)

// inquire makes an inquiry that ends after fall failed rounds. A round without a sign of life
// counts as a failed probe. If the API server began to answer on a new connection, one round is
// excused, at most fall times. If the result is alive, conn is the connection to continue with, and
// answer the answer to the outstanding request, if it arrived.
func (w *watcher) inquire(ctx context.Context, l *probe.Link) (result inquiryResult, conn *probe.Link, answer *probe.Event) {
	w.soon = false
	if w.state == Down { // nothing is left to decide
		return silent, nil, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	q := &inquiry{w: w, l: l, fresh: make(chan attempt, 2*w.fall*w.profile.Ticks), pause: 2}
	// Open new connections only in the last round: a slow API server answers the PING sooner or
	// later, and an abandoned handshake is wasted work for it.
	q.tryAt = (w.fall - 1) * (w.profile.Ticks - 1)
	defer func() {
		cancel()
		q.closeLate()
	}()
	tick := time.NewTicker(w.profile.Tick)
	defer tick.Stop()
	for failed, excused := 0, 0; failed < w.fall; {
		f := q.round(ctx, tick.C)
		if f.over && f.alive == nil {
			return reconnect, nil, nil
		}
		if f.over {
			return alive, f.alive, f.answer
		}
		if f.outcome == probe.Timeout {
			if excused < w.fall && q.takeSign() {
				excused++
				continue
			}
			if q.late() {
				f.outcome = probe.Late
			}
		}
		failed++
		var s State
		if s, w.soon = w.report(f.outcome, f.err); s == Down {
			if f.outcome == probe.Refused {
				return reconnect, nil, nil
			}
			return silent, nil, nil
		}
	}
	return reconnect, nil, nil
}

// round sends Ticks-1 PINGs, one per tick.
func (q *inquiry) round(ctx context.Context, tick <-chan time.Time) finding {
	for range q.w.profile.Ticks - 1 {
		q.try(ctx)
		if q.l.HTTP2 {
			q.w.count(countPing)
			if err := q.l.Ping(); err != nil {
				return q.broken(err)
			}
		}
		if f, done := q.listen(ctx, tick); done {
			return f
		}
	}
	return finding{outcome: probe.Timeout}
}

// try opens a new connection if one is due. The pause doubles each time, because handshakes are the
// most expensive requests for an overloaded API server. A single attempt is not enough on a link
// that loses a fifth of its packets.
func (q *inquiry) try(ctx context.Context) {
	now := q.tick
	q.tick++
	if now < q.tryAt {
		return
	}
	q.tryAt, q.pause = now+q.pause, 2*q.pause
	q.pending++
	sign := new(atomic.Int32)
	q.progress = append(q.progress, sign)
	timeout := q.w.handshakeTimeout()
	go func() { q.fresh <- q.w.dial(ctx, timeout, sign) }()
}

// listen waits for the next tick, or for an event that ends the round.
func (q *inquiry) listen(ctx context.Context, tick <-chan time.Time) (f finding, done bool) {
	for {
		select {
		case <-ctx.Done():
			return finding{over: true}, true
		case <-tick:
			return finding{}, false
		case e := <-q.l.Events:
			switch e.Kind {
			case probe.EventPong:
				return finding{over: true, alive: q.l}, true
			case probe.EventResponse:
				return finding{over: true, alive: q.l, answer: &e}, true
			case probe.EventGoAway:
				return finding{over: true}, true
			}
			return q.broken(e.Err), true
		case a := <-q.fresh:
			q.pending--
			switch {
			case a.l != nil:
				q.w.recordHandshake(a)
				return finding{over: true, alive: a.l}, true
			case a.outcome == probe.Identity:
				q.w.report(a.outcome, a.err)
				return finding{over: true}, true
			case a.outcome == probe.TCPOnly:
				return finding{over: true}, true
			case a.outcome == probe.Refused:
				return finding{outcome: a.outcome, err: a.err}, true
			}
		}
	}
}

// broken ends the inquiry because the open connection failed.
func (q *inquiry) broken(err error) finding {
	q.w.report(probe.Closed, err)
	return finding{over: true}
}

// takeSign reports whether the server answered on one of the attempts, and removes that attempt
// from progress.
func (q *inquiry) takeSign() bool {
	i := slices.IndexFunc(q.progress, func(s *atomic.Int32) bool { return s.Load() == probe.Heard })
	if i < 0 {
		return false
	}
	q.progress = slices.Delete(q.progress, i, i+1)
	q.accepted = true
	return true
}

// late reports whether the API server accepted a connection without answering. It also returns true
// if no connection was tried.
func (q *inquiry) late() bool {
	return q.accepted || len(q.progress) == 0 || slices.ContainsFunc(q.progress, func(s *atomic.Int32) bool { return s.Load() >= probe.Connected })
}

// closeLate closes connections that are established after the end of the inquiry.
func (q *inquiry) closeLate() {
	go func(n int) {
		for range n {
			if a := <-q.fresh; a.l != nil {
				a.l.Close()
			}
		}
	}(q.pending)
}
