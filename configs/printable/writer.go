package printable

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// Writer is a stream that people read: what is written to it has no control characters
// that a terminal obeys. A character that two writes divide is kept until it is whole.
type Writer struct {
	to   io.Writer
	text func(string) string
	mu   sync.Mutex
	left []byte
}

// To is the stream w for people.
func To(w io.Writer) *Writer { return &Writer{to: w, text: Text} }

// JSON is w, or the stream below it, for JSON. Of the control characters package json
// escapes those of ASCII; a terminal obeys DEL and those of one byte more, too.
func JSON(w io.Writer) *Writer { return &Writer{to: Raw(w), text: escaped} }

// escaped is JSON whose control characters are escapes, but for those between its
// values. It means the same.
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

// Raw is what a Writer writes to, for files' contents and for programs that draw. Any
// other stream is returned as it is.
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
