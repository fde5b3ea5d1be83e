package run

import (
	"errors"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
)

// needsPerson is an error that only a person can fix.
type needsPerson struct {
	err error
	fix string
}

func (p *needsPerson) Error() string { return p.err.Error() }
func (p *needsPerson) Unwrap() error { return p.err }

// NeedsPerson marks err as an error that only a person can fix, and adds the fix. The phase is
// retried after ten to twelve and a half minutes, because the fix may be in the cluster.
func NeedsPerson(err error, fix string) error { return &needsPerson{err, fix} }

// Fix returns the fix of an error marked by NeedsPerson. It returns false for other errors.
func Fix(err error) (string, bool) {
	var p *needsPerson
	if errors.As(err, &p) {
		return p.fix, true
	}
	return "", false
}

// advised is an error with advice for a person. The phase is retried.
type advised struct {
	err    error
	advice string
}

func (a *advised) Error() string { return a.err.Error() }
func (a *advised) Unwrap() error { return a.err }

// Advise adds advice for a person to err. Unlike after NeedsPerson, the phase is retried as usual.
func Advise(err error, advice string) error { return &advised{err, advice} }

// Advice joins all fixes and advice in err. It returns "" if there are none.
func Advice(err error) string {
	var all []string
	var walk func(error)
	walk = func(err error) {
		switch x := err.(type) {
		case *needsPerson:
			all = append(all, x.fix)
		case *advised:
			all = append(all, x.advice)
		case interface{ Unwrap() []error }:
			for _, e := range x.Unwrap() {
				walk(e)
			}
		case interface{ Unwrap() error }:
			walk(x.Unwrap())
		}
	}
	walk(err)
	slices.Sort(all)
	return strings.Join(slices.Compact(all), "; ")
}

// WithAdvice returns err on one line, followed by its advice in parentheses.
func WithAdvice(err error) string {
	if a := Advice(err); a != "" {
		return machine.OneLine(err) + " (" + a + ")"
	}
	return machine.OneLine(err)
}
