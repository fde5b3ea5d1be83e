// Package console prints for edgebake's commands. Results go to standard output, progress and
// warnings to standard error, and questions to a terminal.
package console

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/printable"
	"golang.org/x/term"
)

// Streams are the standard streams of a command.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
	// Talk is shared by all copies of the streams, so that flags can set it later.
	Talk *Talk
}

// Talk configures how much a command prints in addition to its results.
type Talk struct{ Quiet, Verbose bool }

// Results is standard output. It records the first write error, so that a script does not mistake
// incomplete results for complete ones.
type Results struct {
	io.Writer
	Lost error
}

func (r *Results) Write(p []byte) (int, error) {
	n, err := r.Writer.Write(p)
	if err != nil && r.Lost == nil {
		r.Lost = err
	}
	return n, err
}

// Printable returns the streams with out in place of Out. Out and Err then remove control
// characters, which quoted servers, images and disks may contain. Bytes returns Out without this
// protection.
func (s Streams) Printable(out *Results) Streams {
	s.Out, s.Err = printable.To(out), printable.To(s.Err)
	return s
}

// Bytes returns Out for the contents of files, which must not be changed.
func (s Streams) Bytes() io.Writer { return printable.Raw(s.Out) }

// JSON returns Out for writing JSON.
func (s Streams) JSON() io.Writer { return printable.JSON(s.Out) }

func (s Streams) Quiet() bool   { return s.Talk != nil && s.Talk.Quiet }
func (s Streams) Verbose() bool { return s.Talk != nil && s.Talk.Verbose }

// Note prints the result of a command as a sentence, unless --quiet is set.
func (s Streams) Note(format string, args ...any) {
	if !s.Quiet() {
		fmt.Fprintf(s.Out, format, args...)
	}
}

// Hint prints advice, which is neither a result nor a warning, unless --quiet is set.
func (s Streams) Hint(format string, args ...any) {
	if !s.Quiet() {
		fmt.Fprintf(s.Err, format, args...)
	}
}

// Warn prints a warning, even if --quiet is set.
func (s Streams) Warn(format string, args ...any) {
	fmt.Fprintf(s.Err, "WARNING: "+format+"\n", args...)
}

// WarnAll prints warnings about documents, with file and line.
func (s Streams) WarnAll(warnings configs.Problems) {
	for _, w := range warnings {
		at := w.Position()
		if at != "" {
			at += ": "
		}
		fmt.Fprintf(s.Err, "%sWARNING: %s\n", at, w.Text())
	}
}

// Table prints rows in aligned columns, without trailing blanks.
func Table(w io.Writer, rows ...[]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		fmt.Fprintln(t, strings.Join(row, "\t"))
	}
	t.Flush()
}

// file returns standard output if it is a file.
func (s Streams) file() (*os.File, bool) {
	out := s.Bytes()
	if r, ok := out.(*Results); ok {
		out = r.Writer
	}
	f, ok := out.(*os.File)
	return f, ok
}

// ReadByOthers reports whether standard output is a file that other users can read.
func (s Streams) ReadByOthers() bool {
	f, ok := s.file()
	if !ok {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode().IsRegular() && st.Mode().Perm()&0o077 != 0
}

// Colors for Colored.
const (
	Red    = "31"
	Green  = "32"
	Yellow = "33"
)

// Colored returns text with the codes of a color if standard output is a terminal and NO_COLOR is
// not set. The result must be written to Bytes.
func (s Streams) Colored(text, color string) string {
	f, ok := s.file()
	if !ok || !term.IsTerminal(int(f.Fd())) || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return text
	}
	return "\x1b[" + color + "m" + text + "\x1b[0m"
}

// Input returns a reader of r that fails once the context has ended. So Ctrl-C ends a command that
// waits for input.
func Input(ctx context.Context, r io.Reader) io.Reader { return &input{ctx, r} }

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
	buf := make([]byte, len(p)) // a read may continue after this call has returned
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

// RawInput returns standard input itself, for child processes.
func (s Streams) RawInput() io.Reader {
	if in, ok := s.In.(*input); ok {
		return in.r
	}
	return s.In
}

// Terminal returns standard input if it is a terminal.
func (s Streams) Terminal() (*os.File, bool) {
	f, ok := s.RawInput().(*os.File)
	return f, ok && term.IsTerminal(int(f.Fd()))
}

// askHidden asks for a secret without echo. After an interrupt it turns the terminal's echo on
// again.
func (s Streams) askHidden(prompt string, f *os.File) (string, error) {
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

// AskHidden returns a function that asks for a secret at the terminal, or nil if there is none.
func (s Streams) AskHidden() func(prompt string) (string, error) {
	f, ok := s.Terminal()
	if !ok {
		return nil
	}
	return func(prompt string) (string, error) { return s.askHidden(prompt, f) }
}

// Confirm asks a question, and reports whether the answer is yes.
func (s Streams) Confirm(question string) bool {
	fmt.Fprintf(s.Err, "%s [y/N] ", question)
	answer, err := bufio.NewReader(s.In).ReadString('\n')
	if err != nil { // the input ended without a newline
		fmt.Fprintln(s.Err)
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return true
	}
	return false
}
