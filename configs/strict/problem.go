package strict

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is a problem of a document, with its position.
type Problem struct {
	File string // name as given by the caller
	Line int    // begins at 1; 0 if unknown
	Col  int    // begins at 1; 0 if unknown
	Path string // such as "network.interfaces[0].gateway"; empty for the whole document
	Msg  string
	// Missing means that a required field is missing.
	Missing bool
	// meant is the path that an unknown field was probably meant to be.
	meant string
	// rest means that this is the last problem, which only counts those that are not reported.
	rest bool
}

// Limits for the problems of a document, and for the problems in a machine's state.
const (
	MaxProblems = 50
	maxMsg      = 1000 // characters in a message
	maxTold     = 8000 // characters in a message with the output of a program
	maxPath     = 200
)

// atMost returns s, shortened to this number of characters.
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

// FieldError is a problem with the value of a field, found by code that does not have the document.
// The caller finds the position of Path.
type FieldError struct {
	Path string
	Err  error
}

func (e *FieldError) Error() string { return e.Path + ": " + e.Err.Error() }

func (e *FieldError) Unwrap() error { return e.Err }

// Error formats the problem like a compiler, so that editors can jump to the position.
func (p Problem) Error() string {
	if at := p.Position(); at != "" {
		return at + ": " + p.Text()
	}
	return p.Text()
}

// Position returns the file with line and column, or "" if the file is unknown.
func (p Problem) Position() string {
	if p.File == "" {
		return ""
	}
	at := FileName(p.File)
	if p.Line > 0 {
		at += fmt.Sprintf(":%d", p.Line)
		if p.Col > 0 {
			at += fmt.Sprintf(":%d", p.Col)
		}
	}
	return at
}

// Text returns the field and the message, without the position.
func (p Problem) Text() string {
	msg := atMost(maxTold, p.Msg)
	if p.Path == "" {
		return msg
	}
	return atMost(maxPath, p.Path) + ": " + msg
}

// FileName returns the name of a file for messages: "-" becomes "standard input".
func FileName(name string) string {
	if name == "-" {
		return "standard input"
	}
	return name
}

// Problems contains the problems of a document; Sort and First sort them by position. As an error,
// it prints one problem per line.
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

// AddMissing appends a problem of a missing required field.
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

// First returns the first MaxProblems problems by position, and a problem that counts the others.
// more is the number of problems that were only counted.
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
