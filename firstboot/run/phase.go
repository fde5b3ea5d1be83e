package run

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/firstboot/machine"
)

// Phase is one step of first boot, or of what a person asks for: convert,
// revert and reset. It is made for one pass, or one such request, and may remember
// what its Run did or its Check saw until that ends, e.g. names that an API server's
// certificate has: the next look need not ask again. The next pass makes its phases
// anew, so that they look at the machine alone.
type Phase struct {
	Name, Doc string
	// Check looks at the machine, never at the state file. Nil: Run is always
	// carried out, and believed.
	Check func(context.Context, *machine.Env) (Verdict, error)
	// Run does what Check found missing; it may be killed anywhere.
	Run func(context.Context, *machine.Env) error
	// Undo takes back what a failed Run left; nil: nothing needs to be. It is
	// not called when only a Check failed: the machine may be as it should.
	Undo func(context.Context, *machine.Env) error
	// Timeout bounds one attempt of Run.
	Timeout time.Duration
	// Irreversible is for what cannot be taken back: it is left alone in a pass in
	// which the verdict of a phase before it is Unknown.
	Irreversible bool
}

// Verdict is what Check found.
type Verdict int

const (
	// Todo: Run has work.
	Todo Verdict = iota
	// Done: the machine is as the phase would make it.
	Done
	// Unknown: the machine is offline, say; Run must not try. An
	// enrolled node never joins again because nobody answers.
	Unknown
)

// How long a check, and the undoing of a phase, may take.
const (
	CheckTimeout = 30 * time.Second
	undoTimeout  = 2 * time.Minute
)

// outcome is how an attempt at a phase ended.
type outcome int

const (
	failed       outcome = iota
	foundDone            // there was nothing to do
	ranDone              // Run did it, and Check agrees
	foundUnknown         // Check found Unknown
	startOver            // Run returned ErrRestart
)

type result struct {
	outcome
	err  error // of failed
	ran  bool  // Run was begun
	half bool  // Run failed, and may have left half of its work
}

// ErrRestart begins again at the first phase. A phase whose Run has changed
// what earlier phases use returns it.
var ErrRestart = errors.New("starting over")

// progress is told what an attempt is about to do; either may be nil.
type progress struct{ running, checking func() }

// attempt carries out a phase once: look, do, look again. It is the one way in
// which anything is carried out on a node.
func (p Phase) attempt(ctx context.Context, e *machine.Env, tell progress) result {
	switch v, err := p.Look(ctx, e); {
	case err != nil:
		return result{err: err}
	case v == Done:
		return result{outcome: foundDone}
	case v == Unknown:
		return result{outcome: foundUnknown}
	}
	if tell.running != nil {
		tell.running()
	}
	if err := p.run(ctx, e); errors.Is(err, ErrRestart) {
		return result{outcome: startOver, ran: true}
	} else if err != nil {
		return result{err: err, ran: true, half: true}
	}
	if p.Check == nil {
		return result{outcome: ranDone, ran: true}
	}
	if tell.checking != nil {
		tell.checking()
	}
	switch v, err := p.Look(ctx, e); {
	case err != nil:
		return result{err: err, ran: true}
	case v == Done:
		return result{outcome: ranDone, ran: true}
	case v == Unknown:
		return result{outcome: foundUnknown, ran: true}
	}
	return result{err: errors.New("it succeeded, but its check still fails"), ran: true}
}

func (p Phase) Look(ctx context.Context, e *machine.Env) (Verdict, error) {
	if p.Check == nil {
		return Todo, nil
	}
	ctx, cancel := context.WithTimeout(ctx, CheckTimeout)
	defer cancel()
	return p.Check(ctx, e)
}

// run is bounded by the phase's timeout, and says what it waited for then.
func (p Phase) run(ctx context.Context, e *machine.Env) error {
	bounded, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	waitedFor, own := "", *e
	own.OnWaiting(func(what string) {
		waitedFor = what
		e.Waiting("%s", what)
	})
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
