package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/test/emulator"
)

// Serial is the console of a machine: every line, with its time. If the kernel panics, all waiting
// calls fail at once.
type Serial struct {
	start time.Time
	raw   io.Writer
	each  func(Line) // may be nil

	mu      sync.Mutex
	part    []byte
	lines   []Line
	ended   error
	changed chan struct{} // closed and replaced whenever something changes
}

// Line is one line of the console.
type Line struct {
	At   time.Duration // time since power-on
	Text string
}

func newSerial(raw io.Writer, each func(Line)) *Serial {
	return &Serial{start: time.Now(), raw: raw, each: each, changed: make(chan struct{})}
}

// escapes matches terminal control sequences, which firmware and systemd use to color and position
// text.
var escapes = regexp.MustCompile(`\x1b(\[[0-9;?=]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9]|[=>c78])`)

// fatal matches a line after which the machine does nothing more.
var fatal = regexp.MustCompile(`Kernel panic - not syncing|You are in emergency mode|edgebake: this boot failed|No bootable option or device was found`)

// Write receives the machine's output.
func (s *Serial) Write(p []byte) (int, error) {
	if _, err := s.raw.Write(p); err != nil {
		return 0, err
	}
	s.mu.Lock()
	s.part = append(s.part, p...)
	var fresh []Line
	for {
		i := bytes.IndexByte(s.part, '\n')
		if i < 0 {
			break
		}
		text := strings.TrimRight(escapes.ReplaceAllString(string(s.part[:i]), ""), "\r \t")
		s.part = s.part[i+1:]
		fresh = append(fresh, Line{time.Since(s.start), text})
	}
	s.lines = append(s.lines, fresh...)
	s.notify()
	s.mu.Unlock()
	if s.each != nil {
		for _, l := range fresh {
			s.each(l)
		}
	}
	return len(p), nil
}

// notify wakes all waiting calls. The caller must hold mu.
func (s *Serial) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// end records that the output has ended.
func (s *Serial) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = err
	s.notify()
}

// Mark returns the current position in the console's text, for Expect.
func (s *Serial) Mark() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.lines)
}

// Lines returns all lines after the mark from.
func (s *Serial) Lines(from int) []Line {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lines[from:len(s.lines):len(s.lines)]
}

// Expect waits for a matching line after the mark from. It returns the line and the mark after it.
// It fails if the machine panics or ends, or if ctx ends; the error includes the last lines.
func (s *Serial) Expect(ctx context.Context, from int, re *regexp.Regexp) (Line, int, error) {
	for i := from; ; {
		s.mu.Lock()
		lines, ended, changed := s.lines, s.ended, s.changed
		s.mu.Unlock()
		for ; i < len(lines); i++ {
			if re.MatchString(lines[i].Text) {
				return lines[i], i + 1, nil
			}
			if s.final(lines, i) {
				return Line{}, i, fmt.Errorf("expecting %q on the console: %w", re, s.gaveUp(lines[i]))
			}
		}
		if ended != nil {
			return Line{}, i, fmt.Errorf("expecting %q on the console: the machine ended: %w; its last lines:\n%s", re, ended, s.Tail(30))
		}
		select {
		case <-ctx.Done():
			return Line{}, i, fmt.Errorf("expecting %q on the console: %w; its last lines:\n%s", re, context.Cause(ctx), s.Tail(30))
		case <-changed:
		}
	}
}

// Broken returns a *FatalError if the machine has panicked or given up.
func (s *Serial) Broken() error {
	lines := s.Lines(0)
	for i, l := range lines {
		if s.final(lines, i) {
			return s.gaveUp(l)
		}
	}
	return nil
}

// powerOn matches the firmware's text at the beginning of each boot.
var powerOn = regexp.MustCompile(`BdsDxe: (loading|starting) Boot`)

// final reports whether line i is a fatal one. A panic because of the emulator is not: the kernel of
// every image restarts the machine after a panic, which it must survive like a power cut.
func (s *Serial) final(lines []Line, i int) bool {
	if !fatal.MatchString(lines[i].Text) {
		return false
	}
	boot := i
	for boot >= 0 && !powerOn.MatchString(lines[boot].Text) {
		boot--
	}
	// Without firmware it is a test's own kernel, which does not restart the machine after a panic.
	return boot < 0 || staleTranslation(lines[boot:i]) == ""
}

func (s *Serial) gaveUp(at Line) *FatalError {
	return &FatalError{Line: at, Tail: s.Tail(30), Emulator: s.EmulatorsFault()}
}

// EmulatorsFault returns the lines which prove that the guest failed because of QEMU, or "". Such a
// boot proves nothing about the machine's disk.
func (s *Serial) EmulatorsFault() string { return staleTranslation(s.Lines(0)) }

func staleTranslation(lines []Line) string {
	return emulator.StaleTranslation(func(yield func(string) bool) {
		for _, l := range lines {
			if !yield(l.Text) {
				return
			}
		}
	})
}

// Tail returns the last n lines, each with its time.
func (s *Serial) Tail(n int) string {
	lines := s.Lines(0)
	var b strings.Builder
	for _, l := range lines[max(0, len(lines)-n):] {
		fmt.Fprintf(&b, "  %6.1f  %s\n", l.At.Seconds(), l.Text)
	}
	return b.String()
}

// FatalError means that the system of a machine has given up.
type FatalError struct {
	Line Line
	Tail string
	// Emulator is the evidence on the console that QEMU is the cause, or "".
	Emulator string
}

func (e *FatalError) Error() string {
	blame := ""
	if e.Emulator != "" {
		blame = "; the emulator failed: " + e.Emulator
	}
	return fmt.Sprintf("the machine gave up after %.1f s (%q%s); its last lines:\n%s", e.Line.At.Seconds(), e.Line.Text, blame, e.Tail)
}

var errPoweredOff = errors.New("QEMU ended")
