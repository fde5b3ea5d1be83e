package builder

import (
	"errors"
	"reflect"

	"github.com/edgebake/edgebake/configs"
)

// fieldError ties err to a field; where several errors are joined, each of
// them.
func fieldError(path string, err error) error {
	var errs []error
	for _, e := range Each(err) {
		errs = append(errs, &configs.FieldError{Path: path, Err: e})
	}
	return errors.Join(errs...)
}

// Each takes joined errors apart.
func Each(err error) []error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		if err == nil {
			return nil
		}
		return []error{err}
	}
	if reflect.TypeOf(err) != reflect.TypeOf(errors.Join(err)) {
		return []error{err} // it has words of its own around several errors
	}
	var out []error
	for _, p := range joined.Unwrap() {
		out = append(out, Each(p)...)
	}
	return out
}

// Once joins errors, taken apart, and leaves out what one before says too.
func Once(errs ...error) error {
	var out []error
	said := map[string]bool{}
	for _, e := range Each(errors.Join(errs...)) {
		if !said[e.Error()] {
			out = append(out, e)
		}
		said[e.Error()] = true
	}
	return errors.Join(out...)
}
