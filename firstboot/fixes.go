package firstboot

import (
	"errors"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/firstboot/machine"
)

// permanent is an error that no retry fixes.
type permanent struct {
	err error
	fix string
}

func (p *permanent) Error() string { return p.err.Error() }
func (p *permanent) Unwrap() error { return p.err }

// Permanent marks err as one that no retry fixes; fix is what a person
// does about it.
func Permanent(err error, fix string) error { return &permanent{err, fix} }

// Fix returns the fix of a Permanent error, and whether err is one.
func Fix(err error) (string, bool) {
	var p *permanent
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
		case *permanent:
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

// withAdvice is OneLine, and what a person can do about it.
func withAdvice(err error) string {
	if a := Advice(err); a != "" {
		return machine.OneLine(err) + " (" + a + ")"
	}
	return machine.OneLine(err)
}
