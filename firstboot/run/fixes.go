package run

import (
	"errors"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
)

// needsPerson is an error that a person must fix.
type needsPerson struct {
	err error
	fix string
}

func (p *needsPerson) Error() string { return p.err.Error() }
func (p *needsPerson) Unwrap() error { return p.err }

// NeedsPerson marks err as one that only a person can fix, and how. It is looked at again
// every ten minutes, since the fix may be in the cluster.
func NeedsPerson(err error, fix string) error { return &needsPerson{err, fix} }

// Fix returns the fix of an error that NeedsPerson has marked, and whether err is one.
func Fix(err error) (string, bool) {
	var p *needsPerson
	if errors.As(err, &p) {
		return p.fix, true
	}
	return "", false
}

// advised is an error that is tried again, with a word on what a person may
// do meanwhile.
type advised struct {
	err    error
	advice string
}

func (a *advised) Error() string { return a.err.Error() }
func (a *advised) Unwrap() error { return a.err }

// Advise adds to an error what a person can do about it; it is tried again
// nevertheless.
func Advise(err error, advice string) error { return &advised{err, advice} }

// Advice gathers what the errors in err say that a person can do; "": nothing.
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

// WithAdvice is OneLine, and what a person can do about it.
func WithAdvice(err error) string {
	if a := Advice(err); a != "" {
		return machine.OneLine(err) + " (" + a + ")"
	}
	return machine.OneLine(err)
}
