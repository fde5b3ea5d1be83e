// Package printable makes text from elsewhere safe to print. Messages quote
// servers, disks and documents, and a terminal obeys the control characters in
// such text.
package printable

import (
	"strings"
	"unicode"
)

// Line is s in one line: whatever does not print is a space.
func Line(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, s)
}

// Text keeps line breaks and tabs; other control characters are replaced by a
// question mark.
func Text(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\r':
			return -1
		case unicode.IsControl(r) && r != '\n' && r != '\t':
			return '?'
		}
		return r
	}, s)
}
