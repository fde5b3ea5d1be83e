package ipvs

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"time"
)

func parseCertificates(data []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		certs = append(certs, c)
	}
	if len(certs) == 0 {
		return nil, errors.New("it holds no PEM certificate; give the cluster's ca.crt")
	}
	return certs, nil
}

// watcher senses one master for as long as it lives. It reports outcomes
// through observe, which returns the belief that follows from them.
type watcher struct {
	target  func() target // asked at every dial: the CA may have come or changed
	profile Profile
	fall    int
	observe func(Class, error) (s State, doubted bool)
	// renew tells the watcher to dial anew.
	renew chan struct{}
	// slots bounds how many handshakes go on at once, over all masters: two
	// hundred of them together would time each other out on a small machine.
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
			var class Class
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

// jitter shortens d by up to a fifth, so that nodes that booted together do
// not stay together. It never lengthens: d is a promise.
func jitter(d time.Duration) time.Duration {
	return d - time.Duration(rand.Int64N(int64(d)/5+1))
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
// master's program says anything.
func (w *watcher) dial(ctx context.Context, timeout time.Duration, heard *atomic.Bool) (*link, Class, error) {
	select {
	case w.slots <- struct{}{}:
		defer func() { <-w.slots }()
	case <-ctx.Done():
		return nil, Timeout, ctx.Err()
	}
	w.count(countDial)
	t := w.target()
	t.heard = heard
	dctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	l, err := dialLink(dctx, t, bodyLimit)
	if err == nil {
		return l, OK, nil
	}
	return nil, classify(err, t.roots == nil && !t.probe.Unsafe), err
}

func classify(err error, noCA bool) Class {
	var identity *identityError
	switch {
	case errors.As(err, &identity):
		return Identity
	case errors.Is(err, errNotTLS):
		if noCA {
			return TCPOnly
		}
		return Identity
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		return Timeout
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.EADDRNOTAVAIL):
		return Unreachable
	}
	return Closed
}

// hold senses over one connection until it breaks. It returns the connection
// to go on with, if one proved itself meanwhile.
//
// The loop has one alarm. A PING goes out when it is due and nothing is
// outstanding; if there is no sign of life within a tick, doubt decides.
func (w *watcher) hold(ctx context.Context, l *link) *link {
	p := &w.profile
	now := time.Now()
	pingDue := w.beat.within(now, p.Ping)
	readyDue := now
	if w.readyDue.After(now) {
		readyDue = w.readyDue
	}
	w.readyDue = time.Time{}
	var asked time.Time    // when the outstanding request was sent; zero if none
	var answered time.Time // when the last answer came; zero if none did
	leaving := false       // the server hangs up after the outstanding answer
	var pinged time.Time   // when the outstanding PING was sent; zero if none
	wait := 2 * p.Tick     // for the answer to a PING
	due := w.alarms()
	defer due.stop()
	due.set(0)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.renew:
			return nil
		case e := <-l.events:
			switch e.kind {
			case evPong:
				if !pinged.IsZero() {
					now = time.Now()
					// Near masters are doubted sooner than far ones.
					wait = min(max(4*now.Sub(pinged), p.Tick), 2*p.Tick)
					pingDue = w.beat.within(pinged, p.Ping)
					pinged = time.Time{}
				}
				if asked.IsZero() && readyDue.After(time.Now()) {
					continue
				}
			case evGoAway:
				// The server moves its clients, often because it is about to
				// stop. That is no fault: ask it anew. But around an answer it
				// is how kube-apiserver treats whoever did not show a
				// certificate: then nothing is new until the next one is due.
				if !asked.IsZero() {
					leaving = true
					continue
				}
				if !answered.IsZero() && time.Since(answered) < w.profile.Ping {
					w.readyDue = readyDue
				}
				return nil
			case evClosed:
				w.observe(Closed, e.err)
				return nil
			case evResponse:
				if asked.IsZero() {
					continue
				}
				asked, pinged = time.Time{}, time.Time{}
				state, doubted := w.observe(l.target.probe.judge(e, l.skew), nil)
				now = time.Now()
				switch {
				case doubted:
					readyDue = now.Add(2 * p.Tick)
				case state != Up: // it answers, so it may heal any time
					readyDue = now.Add(jitter(p.Retry))
				default:
					readyDue = w.beat.within(now, p.Ready)
				}
				pingDue = w.beat.within(now, p.Ping)
				answered = now
				if leaving {
					w.readyDue = readyDue
					return nil
				}
			}
		case <-due.C:
		}
		now = time.Now()
		switch {
		case l.exhausted():
			return nil
		case !pinged.IsZero() && !now.Before(pingDue):
			next, ok := w.doubt(ctx, l)
			if !ok || next != l {
				return next
			}
			pinged = time.Time{}
			wait = 2 * p.Tick
			now = time.Now()
			pingDue = w.beat.within(now, p.Ping)
			readyDue = now // clears what the rounds counted
		case !asked.IsZero() && now.Sub(asked) >= p.ReadyTimeout:
			w.observe(Timeout, fmt.Errorf("no answer to %s in %s", l.target.probe.Path, p.ReadyTimeout))
			if !l.h2 {
				return nil
			}
			// It answers PINGs, so only the request hangs: ask once more on
			// the same connection.
			asked = time.Time{}
			readyDue = now
		}
		if asked.IsZero() && !now.Before(readyDue) {
			w.count(countRequest)
			if err := l.ask(); err != nil {
				w.observe(Closed, err)
				return nil
			}
			asked = now
		}
		if pinged.IsZero() && !now.Before(pingDue) && (l.h2 || asked.IsZero()) {
			w.count(countPing)
			if err := l.ping(); err != nil {
				w.observe(Closed, err)
				return nil
			}
			pinged = now
			if !l.h2 {
				asked = now
			}
			pingDue = now.Add(wait)
		}
		wake := pingDue
		if asked.IsZero() {
			if readyDue.Before(wake) {
				wake = readyDue
			}
		} else if d := asked.Add(p.ReadyTimeout); d.Before(wake) {
			wake = d
		}
		due.set(time.Until(wake))
	}
}

// doubt decides between a slow master and a dead one: PINGs go on over the
// held connection, where each new packet also helps TCP to recover lost ones,
// and every tick tries a fresh connection. Each round without any sign of
// life counts as one failed probe; a fresh connection on which the master
// began to answer excuses one round, as many times as it takes to fall. ok is
// false when the master has to be dialled anew.
func (w *watcher) doubt(ctx context.Context, l *link) (alive *link, ok bool) {
	type outcome struct {
		l     *link
		class Class
		err   error
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	fresh := make(chan outcome, 2*w.fall*w.profile.Ticks)
	pending := 0
	var heard []*atomic.Bool
	defer func() { // whoever comes too late is closed
		cancel()
		go func(n int) {
			for range n {
				if o := <-fresh; o.l != nil {
					o.l.close()
				}
			}
		}(pending)
	}()
	tick := time.NewTicker(w.profile.Tick)
	defer tick.Stop()
	for failed, excused := 0, 0; failed < w.fall; {
		class, cause := Timeout, error(nil)
	round:
		for range w.profile.Ticks - 1 {
			// One in each tick: where a fifth of all packets is lost, a single
			// one does not get through in time often enough.
			pending++
			sign := new(atomic.Bool)
			heard = append(heard, sign)
			go func() {
				l, class, err := w.dial(ctx, max(2*w.round(), 1500*time.Millisecond), sign)
				fresh <- outcome{l, class, err}
			}()
			if l.h2 {
				w.count(countPing)
				if err := l.ping(); err != nil {
					w.observe(Closed, err)
					return nil, false
				}
			}
			for {
				select {
				case <-ctx.Done():
					return nil, false
				case e := <-l.events:
					switch e.kind {
					case evPong, evResponse:
						return l, true
					case evGoAway:
						return nil, false
					}
					w.observe(Closed, e.err)
					return nil, false
				case o := <-fresh:
					pending--
					if o.l != nil {
						return o.l, true
					}
					if o.class == Identity {
						w.observe(o.class, o.err)
						return nil, false
					}
					if o.class == TCPOnly {
						return nil, false
					}
					if o.class == Refused {
						class, cause = o.class, o.err
						break round
					}
					continue
				case <-tick.C:
				}
				break
			}
		}
		if i := slices.IndexFunc(heard, (*atomic.Bool).Load); i >= 0 && class == Timeout && excused < w.fall {
			heard = slices.Delete(heard, i, i+1)
			excused++
			continue
		}
		failed++
		if s, _ := w.observe(class, cause); s == Down {
			return nil, false
		}
	}
	return nil, false
}

// shutdownMark is what kube-apiserver's /readyz says while it drains.
const shutdownMark = "[-]shutdown"

// judge classes an answer to the probe. skew says how the certificate fits
// this node's clock.
func (p *Probe) judge(e event, skew skew) Class {
	alive := OK
	switch {
	case slices.Contains(p.Status, e.status):
	case e.status == 401 || e.status == 403 || e.status == 429:
		alive = Guarded
	case e.status >= 200 && e.status < 400:
	case e.status >= 500 && bytes.Contains(e.body, []byte(shutdownMark)):
		return Draining503
	default:
		return ServerError
	}
	if skew.off {
		// The certificate does not fit this node's clock. Only if the master
		// itself says that it is past the end has it really expired.
		if date, err := time.Parse("Mon, 02 Jan 2006 15:04:05 GMT", e.date); err == nil && !skew.early && date.After(skew.notAfter) {
			return Expired
		}
		if alive == OK {
			return SkewedOK
		}
	}
	return alive
}
