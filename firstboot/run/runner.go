package run

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// Between attempts the pause doubles from backoffFirst to backoffMax. The
// jitter keeps thousands of nodes that came up together from asking together.
const (
	backoffFirst = 2 * time.Second
	backoffMax   = time.Minute
	// Standstill is how often a stopped run looks for a corrected site.
	Standstill = 10 * time.Second
	// repeat is how often it looks, and says, whether it is still so: the fix
	// may have been one in the cluster.
	repeat = 10 * time.Minute
)

// Backoff is the pause after the n-th failed attempt (from 1); r in [0,1)
// spreads it over half to all of the whole.
func Backoff(n int, r float64) time.Duration {
	d := backoffMax
	if n < 6 {
		d = min(backoffFirst<<(n-1), backoffMax)
	}
	return d/2 + time.Duration(r*float64(d/2))
}

// BootDelay is the share of the spread that a node of this identity waits: always the
// same, and evenly distributed over all.
func BootDelay(identity string, spread time.Duration) time.Duration {
	sum := sha256.Sum256([]byte(identity))
	return time.Duration(binary.BigEndian.Uint16(sum[:2])) * spread / (1 << 16)
}

// Node is what the Runner needs to know of the node that the active Site makes.
type Node struct {
	Name, Type string
	// MAC identifies the Site's contents.
	MAC string
	// NotTaken is what is wrong with a newer Site in the slot; nil: nothing.
	NotTaken error
	// Secrets are removed from all that is logged, saved and reported.
	Secrets []string
	// Report is where reports go, Proxy what they go through (environment variables).
	Report configs.Report
	Proxy  []string
	// Spread is the time over which nodes that boot together spread their first requests.
	Spread time.Duration
	// OfflineHealthy judges a boot in which no API server is in reach; nil: it is as good
	// as the last one. ErrUnproven: so far nothing is wrong with it.
	OfflineHealthy func(context.Context, *machine.Env) error
}

// Runner carries out phases.
type Runner struct {
	Env *machine.Env
	// Plan is the image's, for the report.
	Plan string
	// First are the phases that come before the Site is known; the last of them
	// puts one in place.
	First func() []Phase
	// Rest returns the node that the Site makes of this machine, and the phases after
	// First. Both lists are made anew for each pass. Rest is called once in a pass: a Site
	// that is stamped meanwhile takes effect in the next one.
	Rest func() (Node, []Phase)
	// Sources returns a digest of all slots: a run that has stopped starts over
	// when it changes.
	Sources func(*machine.Env) string
	// Update tells, for reports, how far an update is; nil: there is none to speak of.
	Update func(*machine.Env) *ondisk.UpdateState

	mu       sync.Mutex
	state    ondisk.State
	url      string   // where reports go
	reportCA string   // who vouches for the receiver
	proxy    []string // and through what, as environment variables
	spread   bool     // the first words to the API servers were spread
	began    time.Time
	device   string            // the slot
	lastErr  map[string]string // by phase, its gist
	noted    []string          // said by this run, their gists
	waits    []string          // said by this attempt at a phase, their gists
	// unsaved: what a phase waits for is another thing than the state file says, which
	// was last told at waitSaved.
	unsaved   bool
	waitSaved time.Time
	posting   sync.WaitGroup
	reports   atomic.Int64 // sent to url so far
	// secrets has no lock: logging happens under mu too.
	secrets atomic.Pointer[[]string]
	busyTil time.Time // the watchdog is fed until then
}

// Run carries out all phases until the node is done or ctx ends.
func (r *Runner) Run(ctx context.Context) error {
	e := *r.Env
	e.OnWaiting(r.waiting)
	e.OnNote(r.noting)
	r.lastErr = map[string]string{}
	r.began = e.Now()
	r.begin(&e)
	r.recordBootClock(ctx, &e)
	defer r.posting.Wait()
	attempts := map[string]int{}
	for {
		err := r.pass(ctx, &e, attempts)
		if errors.Is(err, ErrRestart) {
			continue
		}
		return err
	}
}

// pass goes through the phases once. A phase that fails ends the pass after a
// pause, and the next begins at the first phase: checks are cheap, and what an
// earlier phase made may be what went wrong.
func (r *Runner) pass(ctx context.Context, e *machine.Env, attempts map[string]int) error {
	defer e.BeginPass()()
	if err := hold(e, false); err != nil { // an API server may be in reach by now
		return err
	}
	unknown := false
	step := func(phases []Phase) error {
		for _, p := range phases {
			if unknown && p.Irreversible {
				continue
			}
			v, err := r.phase(ctx, e, p, attempts)
			if err != nil {
				return err
			}
			unknown = unknown || v == Unknown
		}
		return nil
	}
	first := r.First()
	r.forgetNotes()
	r.show(first, false)
	if err := step(first); err != nil {
		return err
	}
	node, rest := r.Rest()
	r.adopt(e, node)
	if !r.spread {
		// Once, before the first connection to an API server: nodes that wait for the
		// network, or retry, are spread already. The time since the run began is part
		// of the delay: nodes that booted together have spent about the same.
		r.spread = true
		if left := BootDelay(node.Name+machine.ID(e), node.Spread) - e.Now().Sub(r.began); left > 0 {
			if err := r.pause(ctx, e, left); err != nil {
				return err
			}
		}
	}
	r.show(slices.Concat(first, rest), true)
	if err := step(rest); err != nil {
		return err
	}
	if unknown {
		// Offline: the node runs with what it has. Look again, seldom.
		r.result(e, ondisk.ResultWaiting)
		if err := r.judgeOffline(ctx, e, node); err != nil {
			return err
		}
		attempts["offline"]++
		if err := r.pause(ctx, e, Backoff(attempts["offline"], e.Rand())); err != nil {
			return err
		}
		return ErrRestart
	}
	// A stick may have been slower to appear than the first phases were.
	for _, p := range first {
		if v, err := p.Look(ctx, e); err == nil && v == Todo {
			return ErrRestart
		}
	}
	r.recordBootClock(ctx, e)
	r.result(e, ondisk.ResultDone)
	if err := saveHealthy(e); err != nil {
		return err
	}
	r.publish(ctx, e)
	return nil
}

// judgeOffline decides about a boot in which no API server is in reach.
func (r *Runner) judgeOffline(ctx context.Context, e *machine.Env, node Node) error {
	err := node.OfflineHealthy(ctx, e)
	if err == nil {
		return saveHealthy(e)
	}
	e.Log.Info("whether this boot is as good as the last is unknown", "error", err)
	return hold(e, errors.Is(err, ErrUnproven) && e.Now().Sub(r.began) < holdLimit)
}

// phase makes one attempt at a phase. Unless it succeeds, or its result is unknown,
// the error ends the pass.
func (r *Runner) phase(ctx context.Context, e *machine.Env, p Phase, attempts map[string]int) (Verdict, error) {
	r.busy(e, CheckTimeout)
	res := p.attempt(ctx, e, progress{
		running: func() {
			attempts[p.Name]++
			r.mark(e, p, ondisk.PhaseRunning, attempts[p.Name], nil)
			r.busy(e, p.Timeout)
		},
		checking: func() { r.busy(e, CheckTimeout) },
	})
	switch res.outcome {
	case foundDone, ranDone:
		r.done(e, p, attempts[p.Name])
		return Done, nil
	case foundUnknown:
		r.mark(e, p, ondisk.PhaseWaiting, attempts[p.Name], nil)
		return Unknown, nil
	case startOver:
		r.mark(e, p, ondisk.PhasePending, attempts[p.Name], nil)
		return Todo, ErrRestart
	}
	if !res.ran {
		attempts[p.Name]++
	}
	if ctx.Err() != nil {
		return Todo, ctx.Err() // stopped from outside: the next run goes on
	}
	return Todo, r.failed(ctx, e, p, attempts, res)
}

// failed reports a failure, undoes what Run left, and waits for the time to
// begin again.
func (r *Runner) failed(ctx context.Context, e *machine.Env, p Phase, attempts map[string]int, res result) error {
	n := attempts[p.Name]
	r.recordFailure(e, p, n, res.err)
	if res.half {
		r.busy(e, undoTimeout)
		if err := p.undo(ctx, e); err != nil {
			e.Log.Error(r.redact(fmt.Sprintf("undoing %s: %v", p.Name, err)))
		}
	}
	if _, ok := Fix(res.err); ok {
		return r.stop(ctx, e, p, attempts, res.err)
	}
	r.result(e, ondisk.ResultWaiting)
	if n&(n-1) == 0 { // 1, 2, 4, 8 …
		r.publish(ctx, e)
	}
	if err := r.pause(ctx, e, Backoff(n, e.Rand())); err != nil {
		return err
	}
	return ErrRestart
}

// stop stays after a permanent failure, visible, until there is another site
// or it is time to look whether the cluster was fixed.
func (r *Runner) stop(ctx context.Context, e *machine.Env, p Phase, attempts map[string]int, err error) error {
	r.mark(e, p, ondisk.PhaseFailed, attempts[p.Name], err)
	r.result(e, ondisk.ResultFailed)
	r.publish(ctx, e)
	// The jitter is drawn once: of a moment drawn at each look the earliest counts, and
	// all nodes that a fault of the cluster has stopped would come back together.
	sources, end := r.Sources(e), e.Now().Add(repeat+time.Duration(e.Rand()*float64(repeat)/4))
	for {
		if err := r.pause(ctx, e, max(0, min(Standstill, end.Sub(e.Now())))); err != nil {
			return err
		}
		if r.Sources(e) != sources {
			e.Log.Info("there is another Site: starting over")
			e.Console("another Site was found: starting over")
			clear(attempts)
			return ErrRestart
		}
		if !e.Now().Before(end) {
			return ErrRestart
		}
	}
}

// pause waits; systemd hears that we are alive meanwhile.
func (r *Runner) pause(ctx context.Context, e *machine.Env, d time.Duration) error {
	r.busy(e, d)
	return e.Sleep(ctx, d)
}

// busy says how long the next step may take: until then, and a while longer,
// the watchdog is fed.
func (r *Runner) busy(e *machine.Env, d time.Duration) {
	r.mu.Lock()
	r.busyTil = e.Now().Add(d + time.Minute)
	r.mu.Unlock()
	e.Notify("WATCHDOG=1")
}

// Alive reports whether the run still moves as it promised; the host feeds
// the watchdog with it.
func (r *Runner) Alive(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return now.Before(r.busyTil)
}

// redact takes every secret of the site out of s.
func (r *Runner) redact(s string) string {
	if secrets := r.secrets.Load(); secrets != nil {
		for _, secret := range *secrets {
			s = strings.ReplaceAll(s, secret, configs.Mask)
		}
	}
	return s
}
