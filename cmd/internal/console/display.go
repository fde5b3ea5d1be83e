package console

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/printable"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"
)

// Display shows the events of a build: as bars on a terminal, as plain lines elsewhere, or as JSON
// on request.
type Display interface {
	Event(builder.Event)
	Close()
}

// Display returns the display for these streams.
func (s Streams) Display(asJSON bool) Display {
	switch f, ok := printable.Raw(s.Err).(*os.File); {
	case asJSON:
		return &jsonLines{json.NewEncoder(s.JSON()), map[string]time.Time{}}
	case s.Quiet():
		return warnings{s.Err}
	// Bars leave no space for the output of programs, so --verbose disables them.
	case ok && drawsBars(f) && !s.Verbose():
		return &bars{w: f, p: mpb.New(mpb.WithOutput(f), mpb.WithWidth(30)), all: map[string]*bar{}}
	}
	return newPlainLines(s.Err, s.Verbose())
}

// Steps returns a function that shows the progress of steps on d, in the same form as for a build.
func Steps(d Display) func(step string, done, total int64) {
	var begun time.Time
	current, over := "", false
	return func(step string, done, total int64) {
		if step != current {
			current, begun, over = step, time.Now(), false
			d.Event(builder.Event{Step: step, State: builder.StateStart, Text: bytesize.Human(total)})
		}
		d.Event(builder.Event{Step: step, State: builder.StateProgress, Done: done, Total: total})
		if done >= total && !over {
			over = true
			d.Event(builder.Event{Step: step, State: builder.StateDone, Seconds: time.Since(begun).Seconds()})
		}
	}
}

// narrow is the minimum width, in columns, of a terminal that shows bars.
const narrow = 60

// drawsBars reports whether a file is a terminal that can redraw lines.
func drawsBars(f *os.File) bool {
	if !term.IsTerminal(int(f.Fd())) || os.Getenv("TERM") == "dumb" {
		return false
	}
	width, _, err := term.GetSize(int(f.Fd()))
	return err != nil || width == 0 || width >= narrow // 0: unknown
}

// warnings prints only warnings.
type warnings struct{ w io.Writer }

func (w warnings) Event(e builder.Event) {
	if e.State == builder.StateWarning {
		fmt.Fprintf(w.w, "%s: WARNING: %s\n", e.Step, e.Text)
	}
}

func (warnings) Close() {}

// jsonLines prints every event, except that it prints the progress of a step at most once a second.
type jsonLines struct {
	e    *json.Encoder
	last map[string]time.Time
}

func (j *jsonLines) Event(e builder.Event) {
	if e.State == builder.StateProgress {
		if time.Since(j.last[e.Step]) < time.Second {
			return
		}
		j.last[e.Step] = time.Now()
	}
	j.e.Encode(e)
}

func (j *jsonLines) Close() {}

// plainLines prints a line for each event; StateDetail only with details, and the progress of a
// transfer at most every ten seconds. A step without a line for quietFor gets a reminder line.
type plainLines struct {
	w       io.Writer
	details bool // print StateDetail
	stop    func()

	mu    sync.Mutex // the ticker runs concurrently with the events
	steps map[string]*plainStep
	order []string
}

// plainStep is a step that has started.
type plainStep struct {
	begun, last time.Time // last: when its last line was printed
	detail      string    // last line of a program that the step runs
	running     bool
}

// quietFor is the time after which a step that prints nothing gets a reminder line.
const quietFor = 30 * time.Second

func newPlainLines(w io.Writer, details bool) *plainLines {
	p := &plainLines{w: w, details: details, steps: map[string]*plainStep{}}
	ticker, done := time.NewTicker(quietFor/6), make(chan struct{})
	p.stop = sync.OnceFunc(func() { ticker.Stop(); close(done) })
	go func() {
		for {
			select {
			case <-ticker.C:
				p.remind()
			case <-done:
				return
			}
		}
	}()
	return p
}

// remind prints a line for each step that has not printed one for quietFor.
func (p *plainLines) remind() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range p.order {
		s := p.steps[name]
		if !s.running || time.Since(s.last) < quietFor {
			continue
		}
		s.last = time.Now()
		fmt.Fprintf(p.w, "%s: running for %s", name, time.Since(s.begun).Round(time.Second))
		if s.detail != "" {
			fmt.Fprintf(p.w, ": %s", s.detail)
		}
		fmt.Fprintln(p.w)
	}
}

// step returns the state of a step.
func (p *plainLines) step(name string) *plainStep {
	s := p.steps[name]
	if s == nil {
		s = &plainStep{begun: time.Now()}
		p.steps[name], p.order = s, append(p.order, name)
	}
	return s
}

// pace returns the speed and the remaining time, or "" if they are not known yet.
func pace(done, total int64, since time.Duration) string {
	if since < time.Second || done <= 0 || total < done {
		return ""
	}
	left := time.Duration(float64(since) * float64(total-done) / float64(done)).Round(time.Second)
	return fmt.Sprintf(", %s/s, %s left", bytesize.Human(int64(float64(done)/since.Seconds())), left)
}

func (p *plainLines) Event(e builder.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	step, now := p.step(e.Step), time.Now()
	line := func(format string, args ...any) {
		step.last = now
		fmt.Fprintf(p.w, "%s: %s\n", e.Step, fmt.Sprintf(format, args...))
	}
	switch e.State {
	case builder.StateStart:
		*step = plainStep{begun: now, running: true}
		line("%s", e.Text)
	case builder.StateLog:
		line("%s", e.Text)
	case builder.StateDetail:
		step.detail = e.Text
		if p.details {
			line("%s", e.Text)
		}
	case builder.StateWarning:
		line("WARNING: %s", e.Text)
	case builder.StateProgress:
		if now.Sub(step.last) < 10*time.Second {
			return
		}
		if e.Total > 0 {
			line("%s of %s (%d %%)%s", bytesize.Human(e.Done), bytesize.Human(e.Total), e.Done*100/e.Total, pace(e.Done, e.Total, now.Sub(step.begun)))
		} else {
			line("%s", bytesize.Human(e.Done))
		}
	case builder.StateDone:
		step.running = false
		line("done in %.1f s", e.Seconds)
	}
}

// Close stops the reminders about running steps.
func (p *plainLines) Close() { p.stop() }

// bars shows one line per step, which is redrawn in place. Warnings are printed above the bars, or
// below them after Close.
type bars struct {
	w        io.Writer
	p        *mpb.Progress
	all      map[string]*bar
	warnings []string
}

type bar struct {
	*mpb.Bar
	begun time.Time
	mu    sync.Mutex // text is drawn by another goroutine
	text  string
}

func (b *bar) set(s string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.text = printable.Text(s)
}

func (b *bar) shown(decor.Statistics) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r := []rune(b.text); len(r) > 60 {
		return string(r[:60])
	}
	return b.text
}

func (b *bars) Event(e builder.Event) {
	if e.State == builder.StateWarning {
		text := fmt.Sprintf("%s: WARNING: %s", e.Step, e.Text)
		if _, err := fmt.Fprintln(printable.To(b.p), text); err != nil {
			b.warnings = append(b.warnings, text)
		}
		return
	}
	at, ok := b.all[e.Step]
	if !ok || e.State == builder.StateStart {
		at = &bar{text: printable.Text(e.Text), begun: time.Now()}
		at.Bar = b.p.New(0, mpb.BarStyle().Lbound("").Rbound("").Filler("━").Tip("━").Padding(" "),
			mpb.BarFillerClearOnComplete(),
			mpb.PrependDecorators(decor.Name(e.Step, decor.WCSyncSpaceR), decor.Elapsed(decor.ET_STYLE_MMSS, decor.WCSyncSpace)),
			mpb.AppendDecorators(decor.Any(at.shown)))
		b.all[e.Step] = at
	}
	switch e.State {
	case builder.StateLog, builder.StateDetail:
		at.set(e.Text)
	case builder.StateProgress:
		at.SetTotal(e.Total, false)
		at.SetCurrent(e.Done)
		at.set(bytesize.Human(e.Done) + pace(e.Done, e.Total, time.Since(at.begun)))
	case builder.StateDone:
		at.set("done")
		at.SetTotal(-1, true)
	}
}

// Close leaves the lines of finished steps on the screen and removes the others.
func (b *bars) Close() {
	for _, at := range b.all {
		if !at.Completed() {
			at.Abort(true)
		}
	}
	b.p.Wait()
	for _, w := range b.warnings {
		fmt.Fprintln(printable.To(b.w), w)
	}
}
