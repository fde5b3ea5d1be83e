package machine

import (
	"bytes"
	"io"
	"strings"
	"sync"
)

// Tail is a Writer that passes lines to Log, and keeps the last 40 for error messages.
type Tail struct {
	mu    sync.Mutex
	Log   func(string)
	part  []byte
	lines []string
}

var _ io.Writer = (*Tail)(nil)

func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.part = append(t.part, p...)
	for {
		line, rest, ok := bytes.Cut(t.part, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		t.part = rest
		if s := strings.TrimSpace(string(line)); s != "" {
			t.Log(s)
			t.lines = append(t.lines, s)
			if len(t.lines) > 40 {
				t.lines = t.lines[1:]
			}
		}
	}
}

// Last returns the kept lines that look like errors, or the last three if there are none.
func (t *Tail) Last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := t.lines
	if s := strings.TrimSpace(string(t.part)); s != "" {
		lines = append(lines, s)
	}
	var out []string
	for _, l := range lines {
		low := strings.ToLower(l)
		if strings.HasPrefix(low, "error") || strings.Contains(low, "[error") || strings.HasPrefix(low, "fatal") {
			out = append(out, l)
		}
	}
	if len(out) == 0 && len(lines) > 0 {
		out = lines[max(0, len(lines)-3):]
	}
	return strings.Join(out, "; ")
}
