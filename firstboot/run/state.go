package run

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/configs/printable"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// begin starts the state of this run. Of an earlier run in the same boot, it keeps only the start
// times.
func (r *Runner) begin(e *machine.Env) {
	e.Log = slog.New(redacting{Handler: e.Log.Handler(), redact: r.redact})
	r.mu.Lock()
	defer r.mu.Unlock()
	now := e.Now()
	r.state = ondisk.State{
		Version: ondisk.StateVersion, Result: ondisk.ResultRunning,
		BootID: machine.BootID(e),
		Plan:   r.Plan, Started: now, Updated: now,
	}
	if old, err := LoadState(e.Root); err == nil && old.BootID == r.state.BootID {
		r.state.Started, r.state.Boot = old.Started, old.Boot // first boot was restarted during this boot
	}
	r.busyTil = now.Add(time.Minute)
	if dev, err := machine.OwnSlot(e); err == nil {
		r.device = dev // the device on which an invalid Site is reported
	}
}

// recordBootClock records when the parts of this boot began. It is called again when first boot is
// done, because systemd's startup ends later. Errors are only logged.
func (r *Runner) recordBootClock(ctx context.Context, e *machine.Env) {
	r.mu.Lock()
	known := r.state.Boot
	r.mu.Unlock()
	if known != nil && known.Finish != 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, clockTimeout)
	defer cancel()
	c, err := e.BootClock(ctx)
	if err != nil {
		e.Log.Info("reading the times of this boot's stages", "error", err)
		return
	}
	if known != nil {
		c.FirstBoot = known.FirstBoot // keep the start of the first run
	}
	r.mu.Lock()
	r.state.Boot = &c
	r.mu.Unlock()
}

// clockTimeout limits the request to systemd.
const clockTimeout = 5 * time.Second

// LoadState reads the state file below root.
func LoadState(root string) (*ondisk.State, error) {
	e := machine.Env{Root: root}
	b, err := e.Read(ondisk.StateFile)
	if err != nil {
		return nil, fmt.Errorf("reading the state of first boot: %w", err)
	}
	var s ondisk.State
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("reading the state of first boot: %w", err)
	}
	if s.Version != ondisk.StateVersion {
		return nil, fmt.Errorf("reading the state of first boot: version %d is not supported (this program supports %d)", s.Version, ondisk.StateVersion)
	}
	return &s, nil
}

// show replaces the list of phases in the state, and keeps the known states of phases. all means
// that phases also contains those of Rest; otherwise a longer list of an earlier pass is kept.
func (r *Runner) show(phases []Phase, all bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []ondisk.PhaseState
	for _, p := range phases {
		ps := ondisk.PhaseState{Name: p.Name, Doc: p.Doc, Status: ondisk.PhasePending}
		if i := slices.IndexFunc(r.state.Phases, func(o ondisk.PhaseState) bool { return o.Name == p.Name }); i >= 0 {
			ps = r.state.Phases[i]
		}
		list = append(list, ps)
	}
	if all || len(list) >= len(r.state.Phases) || r.state.NodeType == "" {
		r.state.Phases = list
	}
}

// adopt puts the Site's node into the state. From now on the run uses its secrets, report URL and
// proxy.
func (r *Runner) adopt(e *machine.Env, node Node) {
	if node.Rejected != nil {
		e.Note("the Site in the slot is rejected, and the previous Site stays in use: %s", machine.OneLine(node.Rejected))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state.Node, r.state.NodeType, r.state.SiteMAC = node.Name, node.Type, node.MAC
	r.secrets.Store(&node.Secrets)
	r.url, r.reportCA, r.proxy = node.Report.URL, node.Report.CACert, node.Proxy
}

// set changes the state of one phase and saves it. place is the position of the phase, for example
// "[3/17]".
func (r *Runner) set(e *machine.Env, name string, change func(*ondisk.PhaseState)) (ps ondisk.PhaseState, changed bool, place string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.state.Phases {
		if r.state.Phases[i].Name != name {
			continue
		}
		p := &r.state.Phases[i]
		old, now := *p, e.Now()
		change(p)
		if p.Status != old.Status {
			if old.Status == ondisk.PhaseRunning {
				p.Seconds += now.Sub(old.Since).Seconds()
			}
			p.Since = now
		}
		changed = *p != old
		old.Waiting = p.Waiting
		switch {
		case changed && p.Status == ondisk.PhaseDone && p.Attempts == 0:
			// A check that finds nothing to do is not saved here, but at the end of the pass.
		case changed && *p != old: // more than Waiting has changed
			r.waitSaved = time.Time{}
			r.save(e)
		case changed || r.unsaved:
			if r.unsaved = true; now.Sub(r.waitSaved) >= waitSavedEvery {
				r.waitSaved = now
				r.save(e)
			}
		}
		if r.state.NodeType == "" { // the number of phases depends on the Site
			return *p, changed, fmt.Sprintf("[%d]", i+1)
		}
		return *p, changed, fmt.Sprintf("[%d/%d]", i+1, len(r.state.Phases))
	}
	return ondisk.PhaseState{}, false, ""
}

// waitSavedEvery limits how often Waiting is saved: it may change every two seconds for hours, and
// each write is synced.
const waitSavedEvery = time.Minute

// save writes the state; the caller holds mu. Errors are only logged, because they must not prevent
// a node from joining.
func (r *Runner) save(e *machine.Env) {
	r.state.Updated, r.unsaved = e.Now(), false
	b, err := json.MarshalIndent(r.state, "", "  ")
	if err == nil {
		err = e.WriteFile(ondisk.StateFile, append(b, '\n'), machine.Mode(0o600))
	}
	if err != nil {
		e.Log.Error("writing the state of first boot", "error", err)
	}
}

func (r *Runner) mark(e *machine.Env, p Phase, status string, attempts int, err error) {
	ps, changed, place := r.set(e, p.Name, func(ps *ondisk.PhaseState) {
		ps.Status, ps.Attempts, ps.Waiting = status, attempts, ""
	})
	switch {
	case status == ondisk.PhaseRunning && attempts == 1:
		r.say(e, fmt.Sprintf("%s %s: started (goal: %s)", place, p.Name, p.Doc))
	case status == ondisk.PhaseRunning:
		e.Notify(fmt.Sprintf("STATUS=%s %s (attempt %d)", place, p.Name, attempts))
		e.Log.Info("trying again", "phase", p.Name, "attempt", attempts)
	case status == ondisk.PhaseWaiting && changed && ps.Error == "":
		r.say(e, fmt.Sprintf("%s %s: cannot be checked now; the current settings stay", place, p.Name))
	case status == ondisk.PhaseFailed:
		r.sayFailure(e, p, err)
	}
}

func (r *Runner) done(e *machine.Env, p Phase, attempts int) {
	ps, changed, place := r.set(e, p.Name, func(ps *ondisk.PhaseState) {
		ps.Status, ps.Attempts, ps.Waiting, ps.Error, ps.Fix = ondisk.PhaseDone, attempts, "", "", ""
	})
	r.mu.Lock()
	delete(r.lastErr, p.Name)
	r.mu.Unlock()
	if !changed {
		return
	}
	if attempts == 0 {
		r.say(e, fmt.Sprintf("%s %s: as it should be", place, p.Name))
		return
	}
	r.say(e, fmt.Sprintf("%s %s: done in %.1f s", place, p.Name, ps.Seconds))
}

// recordFailure records a failed attempt, and reports each new error once.
func (r *Runner) recordFailure(e *machine.Env, p Phase, attempts int, err error) {
	what := printable.Line(r.cleaned(machine.OneLine(err)))
	fix := printable.Text(r.cleaned(Advice(err)))
	_, _, place := r.set(e, p.Name, func(ps *ondisk.PhaseState) {
		ps.Status, ps.Attempts, ps.Error, ps.Fix = ondisk.PhaseWaiting, attempts, what, fix
	})
	r.mu.Lock()
	same := r.lastErr[p.Name] == withoutVarying(what)
	r.lastErr[p.Name] = withoutVarying(what)
	r.mu.Unlock()
	if _, permanent := Fix(err); permanent {
		return // reported by sayFailure
	}
	if same {
		e.Log.Info("still failing", "phase", p.Name, "attempt", attempts)
		return
	}
	r.say(e, fmt.Sprintf("%s %s: will be tried again: %s", place, p.Name, what))
	if fix != "" {
		r.say(e, "    "+fix)
	}
}

func (r *Runner) sayFailure(e *machine.Env, p Phase, err error) {
	fix, _ := Fix(err)
	r.say(e, fmt.Sprintf("FAILED %s: %s", p.Name, r.cleaned(machine.OneLine(err))))
	r.say(e, "    to fix: "+r.cleaned(fix))
}

func (r *Runner) waiting(what string) {
	e := r.Env
	what = printable.Line(r.cleaned(what))
	r.mu.Lock()
	name := ""
	for _, p := range r.state.Phases {
		if p.Status == ondisk.PhaseRunning {
			name = p.Name
			if p.Waiting == "" { // the phase has just started
				r.waits = nil
			}
		}
	}
	repeated := slices.Contains(r.waits, withoutVarying(what))
	if !repeated {
		r.waits = append(r.waits, withoutVarying(what))
	}
	r.mu.Unlock()
	_, changed, place := r.set(e, name, func(ps *ondisk.PhaseState) { ps.Waiting = what })
	if changed {
		e.Notify(fmt.Sprintf("STATUS=%s %s: waiting for %s", place, name, what))
	}
	if changed && !repeated { // two errors may alternate
		e.Log.Info("waiting", "phase", name, "for", what)
		e.Console(fmt.Sprintf("%s %s: waiting for %s", place, name, what))
	}
}

// noting adds a note to the report, and prints it once per run.
func (r *Runner) noting(what string) {
	what = printable.Text(r.cleaned(what))
	r.mu.Lock()
	if !slices.Contains(r.state.Notes, what) {
		r.state.Notes = append(r.state.Notes, what)
	}
	repeated := slices.Contains(r.noted, withoutVarying(what))
	if !repeated {
		r.noted = append(r.noted, withoutVarying(what))
	}
	r.mu.Unlock()
	if !repeated {
		r.say(r.Env, what)
	}
}

// forgetNotes clears the notes at the start of a pass. The pass adds those that still apply.
func (r *Runner) forgetNotes() {
	r.mu.Lock()
	r.state.Notes = nil
	r.mu.Unlock()
}

// say writes a line to the console, systemd's status and the journal.
func (r *Runner) say(e *machine.Env, line string) {
	line = printable.Line(line)
	e.Console(line)
	e.Notify("STATUS=" + line)
	e.Log.Info(line)
}

func (r *Runner) setResult(e *machine.Env, value string) {
	r.mu.Lock()
	changed := r.state.Result != value
	r.state.Result = value
	if changed {
		r.save(e)
	}
	name := r.state.Node
	r.mu.Unlock()
	if changed && value == ondisk.ResultDone {
		r.say(e, fmt.Sprintf("node %s is Ready", name))
	}
}

// publish writes the report to the slot and sends it to the Site's URL in the background. Errors
// are only logged.
func (r *Runner) publish(ctx context.Context, e *machine.Env) {
	r.mu.Lock()
	state, device, url, ca, proxy := r.state, r.device, r.url, r.reportCA, r.proxy
	state.Phases, state.Notes = slices.Clone(state.Phases), slices.Clone(state.Notes)
	r.mu.Unlock()
	if r.Update != nil {
		state.Update = r.Update(e)
	}
	text := ReportText(&state)
	body, err := json.MarshalIndent(state, "", "  ")
	if err != nil {
		e.Log.Error("writing the report", "error", err)
		return
	}
	body = append(body, '\n')
	if device != "" {
		if err := e.ReportSlot(device, []byte(text), body); err != nil {
			e.Log.Error("writing the report to the slot", "error", err)
		}
	}
	if url == "" {
		return
	}
	report := r.reports.Add(1)
	final := state.Result == ondisk.ResultDone || state.Result == ondisk.ResultFailed
	r.posting.Go(func() {
		for n := 1; ; n++ {
			post, cancel := context.WithTimeout(ctx, 10*time.Second)
			err := e.Post(post, url, ca, body, proxy)
			cancel()
			if err == nil || ctx.Err() != nil {
				return
			}
			e.Log.Warn("sending the report", "error", err)
			// A final report is retried until there is a newer report.
			if !final || n == ReportTries || r.reports.Load() != report {
				return
			}
			if e.Sleep(ctx, Backoff(n, e.Rand())) != nil {
				return
			}
		}
	})
}

// ReportTries is how often a final report is sent, over about a minute.
const ReportTries = 6

// ReportText formats the state for people.
func ReportText(s *ondisk.State) string {
	var b strings.Builder
	node := s.Node
	if node == "" {
		node = "(no name yet)"
	}
	fmt.Fprintf(&b, "edgebake first boot\nnode:    %s\n", node)
	if s.NodeType != "" {
		fmt.Fprintf(&b, "type:    %s\n", s.NodeType)
	}
	fmt.Fprintf(&b, "result:  %s\nstarted: %s\nupdated: %s\n\n", s.Result, s.Started.UTC().Format(time.RFC3339), s.Updated.UTC().Format(time.RFC3339))
	if s.Update != nil {
		fmt.Fprintf(&b, "update: %s\n", updateText(s.Update))
	}
	if s.Order != nil {
		fmt.Fprintf(&b, "order: %s\n    %s\n", s.Order.Order, strings.TrimSuffix(s.Order.State+": "+s.Order.Reason, ": "))
	}
	for _, n := range s.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	if len(s.Notes) > 0 || s.Update != nil || s.Order != nil {
		b.WriteByte('\n')
	}
	for _, p := range s.Phases {
		fmt.Fprintf(&b, "%-16s %-8s", p.Name, p.Status)
		if p.Seconds >= 0.05 {
			fmt.Fprintf(&b, " %6.1f s", p.Seconds)
		}
		if p.Attempts > 1 {
			fmt.Fprintf(&b, "  %d attempts", p.Attempts)
		}
		b.WriteByte('\n')
		for _, l := range []struct{ key, text string }{{"waits for", p.Waiting}, {"error", p.Error}, {"fix", p.Fix}} {
			if l.text != "" {
				fmt.Fprintf(&b, "    %s: %s\n", l.key, l.text)
			}
		}
	}
	return printable.Text(b.String())
}

// updateText describes the state of an update.
func updateText(u *ondisk.UpdateState) string {
	switch u.Status {
	case ondisk.UpdateRunning:
		what := fmt.Sprintf("writing %s to %s, step %s", u.Image, u.Root, u.Phase)
		if u.Detail != "" {
			what += ": " + u.Detail
		}
		return what
	case ondisk.UpdatePending:
		return fmt.Sprintf("the new system on %s runs after the next restart", u.Root)
	case ondisk.UpdateTrial:
		return fmt.Sprintf("the new system, on %s, is on trial until the Node is Ready", u.Root)
	case ondisk.UpdateFailed:
		return fmt.Sprintf("the new system on %s failed to start, and the previous system runs again; `journalctl --list-boots` lists the boots", u.Root)
	case ondisk.UpdateInterrupted:
		return "interrupted; run the same `firstboot update` again to continue"
	}
	return u.Status
}

// redacting is a slog.Handler that removes secrets.
type redacting struct {
	slog.Handler
	redact func(string) string
	// with contains the attributes and groups of With and WithGroup. They are redacted when a
	// record is logged, because a secret may have become known by then.
	with []func(slog.Handler) slog.Handler
}

func (h redacting) Handle(ctx context.Context, rec slog.Record) error {
	out := slog.NewRecord(rec.Time, rec.Level, h.redact(rec.Message), rec.PC)
	rec.Attrs(func(a slog.Attr) bool {
		out.AddAttrs(h.attr(a))
		return true
	})
	to := h.Handler
	for _, with := range h.with {
		to = with(to)
	}
	return to.Handle(ctx, out)
}

func (h redacting) attr(a slog.Attr) slog.Attr {
	return slog.String(h.redact(a.Key), h.redact(a.Value.Resolve().String()))
}

func (h redacting) WithAttrs(attrs []slog.Attr) slog.Handler {
	return h.and(func(to slog.Handler) slog.Handler {
		var redacted []slog.Attr
		for _, a := range attrs {
			redacted = append(redacted, h.attr(a))
		}
		return to.WithAttrs(redacted)
	})
}

func (h redacting) WithGroup(name string) slog.Handler {
	return h.and(func(to slog.Handler) slog.Handler { return to.WithGroup(h.redact(name)) })
}

func (h redacting) and(with func(slog.Handler) slog.Handler) slog.Handler {
	h.with = append(slices.Clone(h.with), with)
	return h
}
