package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// ErrAlready means that the machine is in the requested state already.
var ErrAlready = errors.New("there is nothing to do")

// Step is the result of one step of update, convert, revert or reset, or a note for the operator.
type Step struct {
	Name, Status string // waiting, note, done, as it should be, failed, undone
	Detail       string
}

// Recorded lists the files (without secrets) that are copied before and after a change, and the
// units whose journal is copied.
type Recorded struct{ Files, Units []string }

// Change carries out the steps of update, convert, revert or reset, and records their results.
type Change struct {
	e        *machine.Env
	tell     func(Step)
	dir      string // directory of the record
	recorded Recorded
	steps    []Step
	// Resumed means that, if a step fails, steps that needed no change are undone too, because an
	// earlier run that was killed made their changes.
	Resumed bool
	// ChangedAt names the step after which nothing is undone: the node has changed, and only
	// cleanup is left.
	ChangedAt string
	// Onward means that a failure undoes nothing: the next run continues.
	Onward bool
}

// NewChange begins the change with the name what, such as "reset", and records it in a new
// directory below ondisk.LogDir. tell receives each Step.
func NewChange(e *machine.Env, what string, recorded Recorded, tell func(Step)) *Change {
	own := *e // a copy, because OnWaiting is replaced
	return &Change{e: &own, tell: tell, recorded: recorded, dir: ondisk.LogDir + "/" + what + "-" + e.Now().UTC().Format("20060102T150405Z")}
}

// WithoutTimer stops first boot's timer during CarryOut, because first boot would undo the change.
// If WithoutTimer is killed, first boot runs again at the next boot.
func (c *Change) WithoutTimer(ctx context.Context, steps []Phase) error {
	state, err := c.e.UnitState(ctx, ondisk.UnitAgain)
	if err != nil {
		return err
	}
	if state != "active" {
		return c.CarryOut(ctx, steps)
	}
	if err := c.e.Unit(ctx, "stop", ondisk.UnitAgain); err != nil {
		return fmt.Errorf("stopping %s: %w", ondisk.UnitAgain, err)
	}
	err = Idle(ctx, c.e) // the timer may have started it just before
	if err == nil {
		err = c.CarryOut(ctx, steps)
	}
	if start := c.e.Unit(context.WithoutCancel(ctx), "start", ondisk.UnitAgain); start != nil {
		err = errors.Join(err, fmt.Errorf("starting %s again: %w", ondisk.UnitAgain, start))
	}
	return err
}

// CarryOut runs the steps in order. If a step fails, it and the steps before it are undone in
// reverse order, unless Onward or ChangedAt forbids that.
func (c *Change) CarryOut(ctx context.Context, steps []Phase) error {
	c.copyFiles("before")
	var did []Phase
	changed := false
	for _, s := range steps {
		res := c.step(ctx, s)
		if res.ran || c.Resumed && res.outcome == foundDone {
			did = append(did, s)
		}
		switch {
		case res.err == nil:
		case c.Onward:
			return Advise(fmt.Errorf("%s: %w", s.Name, res.err), "run the same command again: it continues")
		case changed:
			c.finish(context.WithoutCancel(ctx))
			return Advise(fmt.Errorf("%s: %w (the earlier steps are done and stay; the log is in %s)", s.Name, res.err, c.dir),
				"run the same command again: it does the remaining steps")
		default:
			// Undo even if ctx has ended, because a half-changed node would be worse.
			undo := context.WithoutCancel(ctx)
			err := c.undo(undo, did, res.err)
			c.finish(undo)
			return fmt.Errorf("%s: %w (rolled back; the log is in %s)", s.Name, err, c.dir)
		}
		changed = changed || s.Name == c.ChangedAt
	}
	if !c.Onward {
		c.finish(ctx)
	}
	return nil
}

// step attempts one step and reports its progress.
func (c *Change) step(ctx context.Context, s Phase) attemptResult {
	last := ""
	c.e.OnWaiting = func(what string) {
		if what != last {
			last = what
			c.tell(Step{s.Name, "waiting", what})
		}
	}
	res := s.attempt(ctx, c.e, hooks{})
	c.e.OnWaiting = nil
	if res.outcome == startOver {
		res.err = ErrRestart
	}
	switch res.outcome {
	case foundDone:
		c.Record(Step{s.Name, "as it should be", s.Doc})
	case ranDone:
		c.Record(Step{s.Name, "done", s.Doc})
	default:
		c.Record(Step{s.Name, "failed", machine.OneLine(res.err)})
	}
	return res
}

// undo undoes the steps in reverse order. It returns why, joined with the errors of the undo.
func (c *Change) undo(ctx context.Context, did []Phase, why error) error {
	for _, s := range slices.Backward(did) {
		if s.Undo == nil {
			continue
		}
		if err := s.undo(ctx, c.e); err != nil {
			c.Record(Step{s.Name, "failed", "undoing it: " + machine.OneLine(err)})
			why = errors.Join(why, fmt.Errorf("undoing %s: %w", s.Name, err))
			continue
		}
		c.Record(Step{s.Name, "undone", ""})
	}
	return why
}

func (c *Change) Record(s Step) {
	c.steps = append(c.steps, s)
	c.tell(s)
	b, err := json.MarshalIndent(c.steps, "", "  ")
	if err == nil {
		err = c.e.WriteFile(c.dir+"/steps.json", append(b, '\n'), machine.Mode(0o600))
	}
	if err != nil {
		c.e.Log.Warn("recording the change", "error", err)
	}
}

func (c *Change) copyFiles(when string) {
	for _, p := range c.recorded.Files {
		b, err := c.e.Read(p)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			err = c.e.WriteFile(c.dir+"/"+when+p, b, machine.Mode(0o600))
		}
		if err != nil {
			c.e.Log.Warn("recording the change", "file", p, "error", err)
		}
	}
}

func (c *Change) finish(ctx context.Context) {
	c.copyFiles("after")
	var out strings.Builder
	args := []string{"journalctl", "--no-pager", "-n", "400"}
	for _, u := range c.recorded.Units {
		args = append(args, "-u", u)
	}
	err := c.e.Run(ctx, machine.Cmd{Args: args, Output: &out})
	if err == nil {
		err = c.e.WriteFile(c.dir+"/journal.txt", []byte(out.String()), machine.Mode(0o600))
	}
	if err != nil {
		c.e.Log.Warn("recording the change", "error", err)
	}
}
