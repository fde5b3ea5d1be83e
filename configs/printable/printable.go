// Package printable makes untrusted text safe to print. Messages quote texts from servers, disks
// and documents, which may contain control characters that a terminal would obey.
package printable

import (
	"fmt"
	"net/netip"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Line returns s with a space in place of each character that is not printable.
func Line(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, s)
}

// Text returns s with a question mark in place of each control character, except line breaks and
// tabs.
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

// Short returns Line(s), shortened to at most n characters.
func Short(s string, n int) string {
	if utf8.RuneCountInString(s) > n {
		s = string([]rune(s)[:n-1]) + "…"
	}
	return Line(s)
}

// Names returns the first five names of an unverified certificate, separated by commas, and counts
// the others.
func Names(names []string) string {
	const most, longest = 5, 64
	var out []string
	for _, n := range names[:min(most, len(names))] {
		out = append(out, Short(n, longest))
	}
	if n := len(names) - most; n > 0 {
		out = append(out, fmt.Sprintf("and %d more", n))
	}
	return strings.Join(out, ", ")
}

// WithoutLocalAddr removes the local addresses of connections from the text of an error, as in
// "read udp 192.0.2.50:40001->192.0.2.1:53". Otherwise, repeated errors would differ in their
// ports.
func WithoutLocalAddr(text string) string {
	const arrow = "->"
	var b strings.Builder
	for {
		before, after, found := strings.Cut(text, arrow)
		if !found {
			return b.String() + text
		}
		word := strings.LastIndexAny(before, " \"(") + 1
		if _, err := netip.ParseAddrPort(before[word:]); err == nil {
			b.WriteString(before[:word])
		} else {
			b.WriteString(before + arrow)
		}
		text = after
	}
}
