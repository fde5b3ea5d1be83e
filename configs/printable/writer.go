package printable

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// Writer replaces control characters in the text written to it, because a terminal would interpret
// them. If a character is split across two writes, its first part is kept until the second write.
type Writer struct {
	to   io.Writer
	text func(string) string
	mu   sync.Mutex
	left []byte
}

// To returns a Writer that writes to w.
func To(w io.Writer) *Writer { return &Writer{to: w, text: Text} }

// JSON returns a Writer that writes JSON to w, or to the stream below w if w is a Writer. Package
// json escapes only the control characters before the space character; this Writer also escapes DEL
// and the C1 controls.
func JSON(w io.Writer) *Writer { return &Writer{to: Raw(w), text: escaped} }

// escaped returns JSON with its control characters escaped, except those between values. The
// meaning of the JSON does not change.
func escaped(s string) string {
	if !strings.ContainsFunc(s, isEscaped) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if isEscaped(r) {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

func isEscaped(r rune) bool { return unicode.IsControl(r) && r > ' ' }

// Raw returns the stream below a Writer, for writing the contents of files and for programs that
// draw. It returns any other stream unchanged.
func Raw(w io.Writer) io.Writer {
	if p, ok := w.(*Writer); ok {
		return p.to
	}
	return w
}

func (w *Writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	b := append(w.left, p...)
	whole := len(b)
	for i := len(b) - 1; i >= 0 && i >= len(b)-utf8.UTFMax; i-- {
		if utf8.RuneStart(b[i]) {
			if !utf8.FullRune(b[i:]) {
				whole = i
			}
			break
		}
	}
	w.left = append([]byte(nil), b[whole:]...)
	if _, err := io.WriteString(w.to, w.text(string(b[:whole]))); err != nil {
		return 0, err
	}
	return len(p), nil
}
