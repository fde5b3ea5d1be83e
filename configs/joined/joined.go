// Package joined splits errors made by errors.Join.
package joined

import (
	"errors"
	"slices"
)

// Errors returns the errors that are joined in err, including nested ones. If nothing is joined in
// err, it returns err itself. For nil, it returns none. An error that wraps several others in a
// text of its own counts as one error.
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

// Each returns the errors that are joined in err, each wrapped by the function wrap.
func Each(err error, wrap func(error) error) error {
	var out []error
	for _, e := range Errors(err) {
		out = append(out, wrap(e))
	}
	return join(out)
}

// join is like errors.Join, but it returns a single error unchanged.
func join(errs []error) error {
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// Distinct joins errors. It leaves out an error whose text has occurred before.
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

// AllAre reports whether err is not nil and every error joined in it is target.
func AllAre(err, target error) bool {
	return err != nil && !slices.ContainsFunc(Errors(err), func(e error) bool { return !errors.Is(e, target) })
}
