package printable

import (
	"io"
	"sync"
	"unicode/utf8"
)

// Writer is a stream that people read: what is written to it goes through Text. A
// character that two writes divide is kept until it is whole.
type Writer struct {
	to   io.Writer
	mu   sync.Mutex
	left []byte
}

// To is the stream w for people.
func To(w io.Writer) *Writer { return &Writer{to: w} }

// Raw is what a Writer writes to, for files' contents, for JSON, which has escapes of its
// own, and for programs that draw. Any other stream is returned as it is.
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
	if _, err := io.WriteString(w.to, Text(string(b[:whole]))); err != nil {
		return 0, err
	}
	return len(p), nil
}
