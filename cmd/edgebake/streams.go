package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/printable"
	"golang.org/x/term"
)

// streams are where a command reads and writes. Results go to Out, progress
// and errors to Err.
type streams struct {
	In       io.Reader
	Out, Err io.Writer
	// talk is set by flags, after the commands got their streams.
	talk *talk
}

// results is standard output. What could not be written is noted, for whoever prints
// and does not look: a script must not take half of the results for all of them.
type results struct {
	io.Writer
	lost error // the first error
}

func (r *results) Write(p []byte) (int, error) {
	n, err := r.Writer.Write(p)
	if err != nil && r.lost == nil {
		r.lost = err
	}
	return n, err
}

// talk is how much a command says beside its results.
type talk struct{ quiet, verbose bool }

// printable are the streams of all commands, with out in place of Out. Messages and tables
// quote what servers, images and disks say of themselves, and a terminal obeys control
// characters. What must go out as it is uses bytes.
func (s streams) printable(out *results) streams {
	s.Out, s.Err = printable.To(out), printable.To(s.Err)
	return s
}

// bytes is Out for the contents of files, which nothing may change.
func (s streams) bytes() io.Writer { return printable.Raw(s.Out) }

// json is Out for JSON.
func (s streams) json() io.Writer { return printable.JSON(s.Out) }

func (s streams) quiet() bool   { return s.talk != nil && s.talk.quiet }
func (s streams) verbose() bool { return s.talk != nil && s.talk.verbose }

// note says what a command did. With --quiet the exit code is enough.
func (s streams) note(format string, args ...any) {
	if !s.quiet() {
		fmt.Fprintf(s.Out, format, args...)
	}
}

// hint says what to know of what a command did, beside its results. It is not
// a warning: --quiet suppresses it.
func (s streams) hint(format string, args ...any) {
	if !s.quiet() {
		fmt.Fprintf(s.Err, format, args...)
	}
}

// mark shows the state of a check: in colour on a terminal, unless NO_COLOR is set.
func (s streams) mark(state string) string {
	m := map[string]struct{ sign, color string }{
		cluster.CheckOK: {"✓", "32"}, cluster.CheckFailed: {"✗", "31"}, cluster.CheckUnknown: {"–", "33"},
	}[state]
	out := s.bytes()
	if r, ok := out.(*results); ok {
		out = r.Writer
	}
	f, ok := out.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return m.sign
	}
	return "\x1b[" + m.color + "m" + m.sign + "\x1b[0m"
}

// input is standard input for as long as the context lives: a command that
// waits for somebody to type hears Ctrl-C.
type input struct {
	ctx context.Context
	r   io.Reader
}

func (i *input) Read(p []byte) (int, error) {
	type result struct {
		n   int
		err error
	}
	if err := i.ctx.Err(); err != nil {
		return 0, err
	}
	buf := make([]byte, len(p)) // the read may outlive this call
	done := make(chan result, 1)
	go func() {
		n, err := i.r.Read(buf)
		done <- result{n, err}
	}()
	select {
	case <-i.ctx.Done():
		return 0, i.ctx.Err()
	case r := <-done:
		copy(p, buf[:r.n])
		return r.n, r.err
	}
}

// rawInput is standard input itself, for programs that get it.
func (s streams) rawInput() io.Reader {
	if in, ok := s.In.(*input); ok {
		return in.r
	}
	return s.In
}

// terminal is standard input where somebody sits in front of it.
func (s streams) terminal() (*os.File, bool) {
	f, ok := s.rawInput().(*os.File)
	return f, ok && term.IsTerminal(int(f.Fd()))
}

// askHidden asks for what must not be seen on the terminal. An interrupt gives
// the terminal its echo back.
func (s streams) askHidden(prompt string, f *os.File) (string, error) {
	before, err := term.GetState(int(f.Fd()))
	if err != nil {
		return "", err
	}
	fmt.Fprint(s.Err, prompt)
	defer fmt.Fprintln(s.Err)
	type answer struct {
		text []byte
		err  error
	}
	done := make(chan answer, 1)
	go func() {
		b, err := term.ReadPassword(int(f.Fd()))
		done <- answer{b, err}
	}()
	var ended <-chan struct{}
	in, ok := s.In.(*input)
	if ok {
		ended = in.ctx.Done()
	}
	select {
	case a := <-done:
		return string(a.text), a.err
	case <-ended:
		return "", errors.Join(in.ctx.Err(), term.Restore(int(f.Fd()), before))
	}
}

// warn prints what is allowed in a document, but seldom right.
func (s streams) warn(warnings configs.Problems) {
	for _, w := range warnings {
		fmt.Fprintf(s.Err, "%s (warning)\n", w)
	}
}
