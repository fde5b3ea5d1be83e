package strict

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is a problem of a document with its position.
type Problem struct {
	File string // name given by the caller
	Line int    // from 1; 0 if unknown
	Col  int    // from 1; 0 if unknown
	Path string // "network.interfaces[0].gateway"; empty: the whole document
	Msg  string
	// Missing is set if the problem is that a required field is missing.
	Missing bool
	// meant is the path that was probably meant by an unknown field.
	meant string
	// rest is set for the last problem, which only counts the omitted ones.
	rest bool
}

// Limits of the problems that are reported about one document, and of those in a machine's state.
const (
	MaxProblems = 50
	maxMsg      = 1000 // characters of a message
	maxTold     = 8000 // characters of a message that includes the output of a program
	maxPath     = 200
)

// atMost returns s, truncated to a number of characters.
func atMost(letters int, s string) string {
	if len(s) <= letters {
		return s
	}
	if r := []rune(s); len(r) > letters {
		return string(r[:letters]) + "…"
	}
	return s
}

// NewProblem returns a problem of the field at path.
func NewProblem(path, format string, args ...any) Problem {
	return Problem{Path: path, Msg: atMost(maxMsg, fmt.Sprintf(format, args...))}
}

// FieldError is a problem with a field's value, found by code that does not have the document. The
// caller finds the position of Path.
type FieldError struct {
	Path string
	Err  error
}

func (e *FieldError) Error() string { return e.Path + ": " + e.Err.Error() }

func (e *FieldError) Unwrap() error { return e.Err }

// Error formats the problem as compilers do, so that editors can jump to the position.
func (p Problem) Error() string {
	var b strings.Builder
	if p.File != "" {
		b.WriteString(FileName(p.File))
		if p.Line > 0 {
			fmt.Fprintf(&b, ":%d", p.Line)
			if p.Col > 0 {
				fmt.Fprintf(&b, ":%d", p.Col)
			}
		}
		b.WriteString(": ")
	}
	if p.Path != "" {
		b.WriteString(atMost(maxPath, p.Path))
		b.WriteString(": ")
	}
	b.WriteString(atMost(maxTold, p.Msg))
	return b.String()
}

// FileName returns a file's name for messages; "-" is standard input.
func FileName(name string) string {
	if name == "-" {
		return "standard input"
	}
	return name
}

// Problems are the problems of a document, sorted by position. As an error, they print one problem
// per line.
type Problems []Problem

func (ps Problems) Error() string {
	lines := make([]string, len(ps))
	for i, p := range ps {
		lines[i] = p.Error()
	}
	return strings.Join(lines, "\n")
}

// Err returns ps as an error, or nil if it is empty.
func (ps Problems) Err() error {
	if len(ps) == 0 {
		return nil
	}
	return ps
}

// Add appends a problem of the field at path.
func (ps *Problems) Add(path, format string, args ...any) {
	*ps = append(*ps, NewProblem(path, format, args...))
}

// AddMissing appends a problem of a required field that is missing.
func (ps *Problems) AddMissing(path, format string, args ...any) {
	p := NewProblem(path, format, args...)
	p.Missing = true
	*ps = append(*ps, p)
}

// Sort sorts problems by position.
func (ps Problems) Sort() {
	slices.SortStableFunc(ps, func(a, b Problem) int {
		if a.rest != b.rest {
			if a.rest {
				return 1
			}
			return -1
		}
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Col, b.Col))
	})
}

// First returns the first MaxProblems by position, and a problem that counts the omitted ones. more
// is the number of problems that were counted but not kept.
func (ps Problems) First(file string, more int) Problems {
	ps.Sort()
	return ps.Cut(file, more)
}

// Cut is like First, for problems that are already sorted.
func (ps Problems) Cut(file string, more int) Problems {
	if len(ps) > MaxProblems {
		more += len(ps) - MaxProblems
		ps = ps[:MaxProblems:MaxProblems]
	}
	if more > 0 {
		rest := fmt.Sprintf("%d more problems", more)
		if more == 1 {
			rest = "1 more problem"
		}
		ps = append(ps, Problem{File: file, Msg: "and " + rest, rest: true})
	}
	return ps
}
