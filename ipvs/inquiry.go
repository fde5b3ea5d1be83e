package ipvs

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/edgebake/edgebake/ipvs/probe"
)

// inquiry decides between a slow API server and a dead one: PINGs go on over
// the held connection, where each new packet also helps TCP to recover lost
// ones, and fresh connections are tried at growing intervals.
type inquiry struct {
	w *watcher
	l *probe.Link
	// fresh delivers the results of the pending tries.
	fresh   chan attempt
	pending int
	// tick counts ticks; the next try begins at tryAt, the one after it pause later.
	tick, tryAt, pause int
	// signs has the progress of each try, but for those that excused a round.
	signs []*atomic.Int32
	// accepted: the API server's kernel accepted one of them.
	accepted bool
}

// attempt is the result of a fresh connection.
type attempt struct {
	l     *probe.Link
	class probe.Outcome
	err   error
	took  time.Duration
}

// finding is what a round led to. Unless it is over, the round failed as class
// and err say.
type finding struct {
	over  bool
	alive *probe.Link // the connection to go on with, if it is over
	// answer is what the request that was under way got meanwhile.
	answer *probe.Event
	class  probe.Outcome
	err    error
}

// inquire makes an inquiry of as many rounds as may fail. Each round without any
// sign of life counts as one failed probe; a fresh connection on which the API
// server began to answer excuses one round, as many times as it takes to fall.
// ok is false when the API server has to be dialled anew; silent says that the held
// connection is not broken and may still answer. answer is the request's, if it ended the
// inquiry.
func (w *watcher) inquire(ctx context.Context, l *probe.Link) (alive *probe.Link, answer *probe.Event, ok, silent bool) {
	if w.state == Down { // there is nothing to decide
		return nil, nil, false, true
	}
	ctx, cancel := context.WithCancel(ctx)
	q := &inquiry{w: w, l: l, fresh: make(chan attempt, 2*w.fall*w.profile.Ticks), pause: 2}
	defer func() {
		cancel()
		q.dismiss()
	}()
	tick := time.NewTicker(w.profile.Tick)
	defer tick.Stop()
	for failed, excused := 0, 0; failed < w.fall; {
		f := q.round(ctx, tick.C)
		if f.over {
			return f.alive, f.answer, f.alive != nil, false
		}
		if f.class == probe.Timeout {
			if excused < w.fall && q.excuse() {
				excused++
				continue
			}
			if q.late() {
				f.class = probe.Late
			}
		}
		failed++
		if s, _ := w.see(f.class, f.err); s == Down {
			return nil, nil, false, f.class != probe.Refused
		}
	}
	return nil, nil, false, false
}

// round sends a PING in each tick.
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
	return finding{class: probe.Timeout}
}

// try begins a fresh connection, if one is due. The pause doubles from one to the
// next: a handshake costs an overloaded API server more than all else here, and
// where a fifth of all packets is lost, a single one does not get through in time
// often enough.
func (q *inquiry) try(ctx context.Context) {
	now := q.tick
	q.tick++
	if now < q.tryAt {
		return
	}
	q.tryAt, q.pause = now+q.pause, 2*q.pause
	q.pending++
	sign := new(atomic.Int32)
	q.signs = append(q.signs, sign)
	timeout := q.w.handshakeTimeout()
	go func() { q.fresh <- q.w.dial(ctx, timeout, sign) }()
}

// listen waits for the end of the tick, or for what ends the round.
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
				q.w.shook(a)
				return finding{over: true, alive: a.l}, true
			case a.class == probe.Identity:
				q.w.see(a.class, a.err)
				return finding{over: true}, true
			case a.class == probe.TCPOnly:
				return finding{over: true}, true
			case a.class == probe.Refused:
				return finding{class: a.class, err: a.err}, true
			}
		}
	}
}

// broken is a held connection that ended meanwhile.
func (q *inquiry) broken(err error) finding {
	q.w.see(probe.Closed, err)
	return finding{over: true}
}

// excuse uses one sign of life up, if there is one.
func (q *inquiry) excuse() bool {
	i := slices.IndexFunc(q.signs, func(s *atomic.Int32) bool { return s.Load() == probe.Heard })
	if i < 0 {
		return false
	}
	q.signs = slices.Delete(q.signs, i, i+1)
	q.accepted = true
	return true
}

// late reports whether the API server accepts connections, and is only silent.
func (q *inquiry) late() bool {
	return q.accepted || slices.ContainsFunc(q.signs, func(s *atomic.Int32) bool { return s.Load() >= probe.Connected })
}

// dismiss closes whoever comes too late.
func (q *inquiry) dismiss() {
	go func(n int) {
		for range n {
			if a := <-q.fresh; a.l != nil {
				a.l.Close()
			}
		}
	}(q.pending)
}
