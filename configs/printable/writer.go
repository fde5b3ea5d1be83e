package printable

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// Writer replaces control characters, which a terminal would interpret, in the text that is written
// to it. It keeps the first part of a character that is divided between two writes.
type Writer struct {
	to   io.Writer
	text func(string) string
	mu   sync.Mutex
	left []byte
}

// To returns a Writer that writes to w.
func To(w io.Writer) *Writer { return &Writer{to: w, text: Text} }

// JSON returns a Writer for JSON. Package json escapes only the control characters below the space;
// this Writer also escapes DEL and the C1 controls. If w is itself a Writer, the JSON goes to its
// underlying stream.
func JSON(w io.Writer) *Writer { return &Writer{to: Raw(w), text: escaped} }

// escaped escapes the control characters inside the values of a JSON text. The values stay the
// same.
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

// Raw returns the underlying stream of a Writer, for the contents of files and for programs that
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
