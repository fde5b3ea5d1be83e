package builder

import (
	"errors"
	"reflect"

	"github.com/edgebake/edgebake/configs"
)

// fieldError adds a field to err, or to each of joined errors.
func fieldError(path string, err error) error {
	var errs []error
	for _, e := range SplitErrors(err) {
		errs = append(errs, &configs.FieldError{Path: path, Err: e})
	}
	return errors.Join(errs...)
}

// SplitErrors splits joined errors.
func SplitErrors(err error) []error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		if err == nil {
			return nil
		}
		return []error{err}
	}
	if reflect.TypeOf(err) != reflect.TypeOf(errors.Join(err)) {
		return []error{err} // an error with its own text around several
	}
	var out []error
	for _, p := range joined.Unwrap() {
		out = append(out, SplitErrors(p)...)
	}
	return out
}

// JoinDistinct joins errors, without repetitions of the same text.
func JoinDistinct(errs ...error) error {
	var out []error
	said := map[string]bool{}
	for _, e := range SplitErrors(errors.Join(errs...)) {
		if !said[e.Error()] {
			out = append(out, e)
		}
		said[e.Error()] = true
	}
	return errors.Join(out...)
}
