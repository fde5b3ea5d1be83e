package run

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// Phase is one step of first boot, update, convert, revert or reset. It is made for one pass or command, so
// it may cache findings of Check and Run, such as the names in an API server's certificate.
type Phase struct {
	Name, Doc string
	// Check examines the machine, never the state file. If it is nil, Run is always called, and its
	// success is not verified.
	Check func(context.Context, *machine.Env) (Verdict, error)
	// Run makes the changes that Check found missing; it may be killed at any point.
	Run func(context.Context, *machine.Env) error
	// Undo reverts the changes of a failed Run; it may be nil. It is not called if only a Check
	// failed, because the machine may be in order.
	Undo func(context.Context, *machine.Env) error
	// Timeout limits one attempt of Run.
	Timeout time.Duration
	// Irreversible phases are skipped in a pass in which the verdict of an earlier phase was
	// Unknown.
	Irreversible bool
}

// Verdict is the result of a Check.
type Verdict int

const (
	// Todo means that Run has work.
	Todo Verdict = iota
	// Done means that the machine is as Run would make it.
	Done
	// Unknown means that the state cannot be determined, for example offline. Run is not called: an
	// enrolled node must not join again only because no API server answers.
	Unknown
)

// Limits of one Check and one Undo.
const (
	CheckTimeout = 30 * time.Second
	undoTimeout  = 2 * time.Minute
)

// outcome is the result of an attempt at a phase.
type outcome int

const (
	failed       outcome = iota
	foundDone            // there was nothing to do
	ranDone              // Run did it, and Check agrees
	foundUnknown         // Check found Unknown
	startOver            // Run returned ErrRestart
)

type attemptResult struct {
	outcome
	err  error // set if outcome is failed
	ran  bool  // Run was called
	half bool  // Run failed, and may have left half of its work
}

// ErrRestart makes the Runner start again at the first phase. A Run returns it after a change on
// which earlier phases depend.
var ErrRestart = errors.New("starting over")

// ErrConfirmed is returned by a Run that has verified its own work, so Check is not called again.
var ErrConfirmed = errors.New("confirmed")

// hooks are the callbacks before Run and before the second Check. Either may be nil.
type hooks struct{ running, checking func() }

// attempt carries out the phase once: Check, Run and, unless Run has confirmed its work, Check
// again.
func (p Phase) attempt(ctx context.Context, e *machine.Env, on hooks) attemptResult {
	switch v, err := p.Look(ctx, e); {
	case err != nil:
		return attemptResult{err: err}
	case v == Done:
		return attemptResult{outcome: foundDone}
	case v == Unknown:
		return attemptResult{outcome: foundUnknown}
	}
	if on.running != nil {
		on.running()
	}
	switch err := p.run(ctx, e); {
	case errors.Is(err, ErrRestart):
		return attemptResult{outcome: startOver, ran: true}
	case errors.Is(err, ErrConfirmed), err == nil && p.Check == nil:
		return attemptResult{outcome: ranDone, ran: true}
	case err != nil:
		return attemptResult{err: err, ran: true, half: true}
	}
	if on.checking != nil {
		on.checking()
	}
	switch v, err := p.Look(ctx, e); {
	case err != nil:
		return attemptResult{err: err, ran: true}
	case v == Done:
		return attemptResult{outcome: ranDone, ran: true}
	case v == Unknown:
		return attemptResult{outcome: foundUnknown, ran: true}
	}
	return attemptResult{err: errors.New("ran without error, but its check still finds work to do"), ran: true}
}

func (p Phase) Look(ctx context.Context, e *machine.Env) (Verdict, error) {
	if p.Check == nil {
		return Todo, nil
	}
	ctx, cancel := context.WithTimeout(ctx, CheckTimeout)
	defer cancel()
	return p.Check(ctx, e)
}

// run calls Run with the phase's timeout. A timeout error describes the wait that was interrupted.
func (p Phase) run(ctx context.Context, e *machine.Env) error {
	bounded, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	waitedFor, own := "", *e
	own.OnWaiting = func(what string) {
		waitedFor = what
		e.Waiting("%s", what)
	}
	err := p.Run(bounded, &own)
	if waitedFor != "" && errors.Is(err, context.DeadlineExceeded) && bounded.Err() != nil && ctx.Err() == nil {
		return fmt.Errorf("timed out after %s, waiting for %s: %w", p.Timeout, printable.Line(waitedFor), err)
	}
	return err
}

func (p Phase) undo(ctx context.Context, e *machine.Env) error {
	if p.Undo == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	return p.Undo(ctx, e)
}
