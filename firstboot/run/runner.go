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

// The pause between attempts doubles from backoffFirst to backoffMax. Its jitter prevents thousands
// of nodes that started together from sending requests together.
const (
	backoffFirst = 2 * time.Second
	backoffMax   = time.Minute
	// Standstill is the interval at which a stopped run looks for a corrected Site.
	Standstill = 10 * time.Second
	// repeat is the interval at which a stopped run retries its phases, because the fix may be in
	// the cluster.
	repeat = 10 * time.Minute
)

// Backoff returns the pause after the n-th failed attempt, counted from 1. r, in [0,1), varies it
// between half of the pause and all of it.
func Backoff(n int, r float64) time.Duration {
	d := backoffMax
	if n < 6 {
		d = min(backoffFirst<<(n-1), backoffMax)
	}
	return d/2 + time.Duration(r*float64(d/2))
}

// BootDelay returns a delay within spread for this identity. It is always the same for one
// identity, and evenly distributed over all identities.
func BootDelay(identity string, spread time.Duration) time.Duration {
	sum := sha256.Sum256([]byte(identity))
	return time.Duration(binary.BigEndian.Uint16(sum[:2])) * spread / (1 << 16)
}

// Node is the part of the active Site that the Runner uses.
type Node struct {
	Name, Type string
	// MAC is the HMAC that identifies the Site's contents.
	MAC string
	// Rejected is the error of a newer Site in the slot that was rejected, or nil if there is none.
	Rejected error
	// Secrets are masked in everything that is logged, saved and reported.
	Secrets []string
	// Report is the receiver of reports. Proxy contains the environment variables of the proxy for
	// it.
	Report configs.Report
	Proxy  []string
	// Spread is the time over which nodes that boot together distribute their first requests.
	Spread time.Duration
	// OfflineHealthy judges a boot without a reachable API server. It returns nil if the boot is
	// healthy, and ErrUnproven if it shows no fault but the update is unproven.
	OfflineHealthy func(context.Context, *machine.Env) error
}

// Runner carries out phases.
type Runner struct {
	Env *machine.Env
	// Plan is the ID of the image's plan, for reports.
	Plan string
	// First returns the phases that run before the Site is known; the last of them reads the Site.
	First func() []Phase
	// Rest returns the node of the active Site, and the phases after First. First and Rest are
	// called once per pass, so a newer Site takes effect in the next pass.
	Rest func() (Node, []Phase)
	// Sources returns a digest of all slots. When it changes, a stopped run starts over.
	Sources func(*machine.Env) string
	// Update returns the state of an update for reports; it may be nil.
	Update func(*machine.Env) *ondisk.UpdateState

	mu         sync.Mutex
	state      ondisk.State
	url        string   // where reports go
	reportCA   string   // CA certificates of the receiver, PEM
	proxy      []string // its proxy, as environment variables
	spreadDone bool     // the boot delay is over
	began      time.Time
	device     string            // the slot
	lastErr    map[string]string // last error by phase, withoutVarying
	noted      []string          // texts of the notes that this run has reported
	waits      []string          // texts of the waits that this attempt at a phase has reported
	// unsaved means that the state file does not have the current Waiting. waitSaved is when a
	// Waiting was last saved.
	unsaved   bool
	waitSaved time.Time
	posting   sync.WaitGroup
	reports   atomic.Int64 // number of reports for url so far
	// secrets is atomic, because code that holds mu logs too.
	secrets atomic.Pointer[[]string]
	busyTil time.Time // the watchdog is fed until then
}

// Run carries out all phases until the node is done or ctx ends.
func (r *Runner) Run(ctx context.Context) error {
	e := *r.Env
	e.OnWaiting, e.OnNote = r.waiting, r.noting
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

// pass runs the phases once. If one fails, the pass ends after a pause, and the next pass begins at
// the first phase: checks are cheap, and an earlier phase may be the cause.
func (r *Runner) pass(ctx context.Context, e *machine.Env, attempts map[string]int) error {
	e.Pass = machine.NewPass()
	defer e.Pass.Close()
	if err := hold(e, false); err != nil { // an API server may be reachable now
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
	if err := r.spreadBoots(ctx, e, node); err != nil {
		return err
	}
	r.show(slices.Concat(first, rest), true)
	if err := step(rest); err != nil {
		return err
	}
	if unknown {
		return r.waitOffline(ctx, e, node, attempts)
	}
	// A stick may have appeared after the first phases ran.
	for _, p := range first {
		if v, err := p.Look(ctx, e); err == nil && v == Todo {
			return ErrRestart
		}
	}
	r.recordBootClock(ctx, e)
	r.setResult(e, ondisk.ResultDone)
	if err := saveHealthy(e); err != nil {
		return err
	}
	r.publish(ctx, e)
	return nil
}

// spreadBoots waits once, before the first connection to an API server, until this node's boot
// delay has passed since the start of the run.
func (r *Runner) spreadBoots(ctx context.Context, e *machine.Env, node Node) error {
	if r.spreadDone {
		return nil
	}
	r.spreadDone = true
	if left := BootDelay(node.Name+machine.ID(e), node.Spread) - e.Now().Sub(r.began); left > 0 {
		return r.pause(ctx, e, left)
	}
	return nil
}

// waitOffline pauses at the end of a pass in which a phase could not be checked. The node keeps its
// current settings.
func (r *Runner) waitOffline(ctx context.Context, e *machine.Env, node Node, attempts map[string]int) error {
	r.setResult(e, ondisk.ResultWaiting)
	if err := r.judgeOffline(ctx, e, node); err != nil {
		return err
	}
	attempts["offline"]++
	if err := r.pause(ctx, e, Backoff(attempts["offline"], e.Rand())); err != nil {
		return err
	}
	return ErrRestart
}

// judgeOffline decides whether a boot counts as healthy although no API server is reachable.
func (r *Runner) judgeOffline(ctx context.Context, e *machine.Env, node Node) error {
	err := node.OfflineHealthy(ctx, e)
	if err == nil {
		return saveHealthy(e)
	}
	e.Log.Info("comparing this boot with the last healthy one", "error", err)
	return hold(e, errors.Is(err, ErrUnproven) && e.Now().Sub(r.began) < holdLimit)
}

// phase makes one attempt at a phase. Any result except success or Unknown is returned as an error
// and ends the pass.
func (r *Runner) phase(ctx context.Context, e *machine.Env, p Phase, attempts map[string]int) (Verdict, error) {
	r.busy(e, CheckTimeout)
	res := p.attempt(ctx, e, hooks{
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
		return Todo, ctx.Err() // stopped from outside: the next run continues
	}
	return Todo, r.failed(ctx, e, p, attempts, res)
}

// failed reports a failure, undoes a half-finished Run, and pauses before the next pass.
func (r *Runner) failed(ctx context.Context, e *machine.Env, p Phase, attempts map[string]int, res attemptResult) error {
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
	r.setResult(e, ondisk.ResultWaiting)
	if n&(n-1) == 0 { // 1, 2, 4, 8 …
		r.publish(ctx, e)
	}
	if err := r.pause(ctx, e, Backoff(n, e.Rand())); err != nil {
		return err
	}
	return ErrRestart
}

// stop waits after a permanent failure until the Site changes, or until it is time to retry,
// because the fix may be in the cluster.
func (r *Runner) stop(ctx context.Context, e *machine.Env, p Phase, attempts map[string]int, err error) error {
	r.mark(e, p, ondisk.PhaseFailed, attempts[p.Name], err)
	r.setResult(e, ondisk.ResultFailed)
	r.publish(ctx, e)
	// Draw the jitter once. If each look drew a new one, the smallest value would win, and all
	// nodes stopped by the same fault of the cluster would resume together.
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

// pause extends the watchdog's deadline by d, and sleeps.
func (r *Runner) pause(ctx context.Context, e *machine.Env, d time.Duration) error {
	r.busy(e, d)
	return e.Sleep(ctx, d)
}

// busy announces that the next step may take d. The watchdog is fed until a minute after that.
func (r *Runner) busy(e *machine.Env, d time.Duration) {
	r.mu.Lock()
	r.busyTil = e.Now().Add(d + time.Minute)
	r.mu.Unlock()
	e.Notify("WATCHDOG=1")
}

// Alive reports whether the current step is within its announced time. Otherwise the host does not
// feed the watchdog.
func (r *Runner) Alive(now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return now.Before(r.busyTil)
}

// redact masks every secret of the Site in s.
func (r *Runner) redact(s string) string {
	if secrets := r.secrets.Load(); secrets != nil {
		for _, secret := range *secrets {
			s = strings.ReplaceAll(s, secret, configs.Mask)
		}
	}
	return s
}
