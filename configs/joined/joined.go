// Package joined takes apart the errors that errors.Join makes.
package joined

import (
	"errors"
	"slices"
)

// Errors returns the errors joined in err, also in joined ones, or err itself; none for nil.
// An error with text of its own around several others is one error.
func Errors(err error) []error {
	if err == nil {
		return nil
	}
	several, ok := err.(interface{ Unwrap() []error })
	if !ok || err.Error() != errors.Join(several.Unwrap()...).Error() {
		return []error{err}
	}
	var out []error
	for _, e := range several.Unwrap() {
		out = append(out, Errors(e)...)
	}
	return out
}

// Each returns the errors joined in err, each wrapped by wrap.
func Each(err error, wrap func(error) error) error {
	var out []error
	for _, e := range Errors(err) {
		out = append(out, wrap(e))
	}
	return join(out)
}

// join is errors.Join, except that a single error stays as it is.
func join(errs []error) error {
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// Distinct joins errors, without repetitions of the same text.
func Distinct(errs ...error) error {
	var out []error
	seen := map[string]bool{}
	for _, e := range Errors(errors.Join(errs...)) {
		if text := e.Error(); !seen[text] {
			out, seen[text] = append(out, e), true
		}
	}
	return join(out)
}

// AllAre reports whether all the errors joined in err, at least one, are target.
func AllAre(err, target error) bool {
	return err != nil && !slices.ContainsFunc(Errors(err), func(e error) bool { return !errors.Is(e, target) })
}
