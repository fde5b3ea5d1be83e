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
	for _, e := range SplitErrors(err) {
		errs = append(errs, &configs.FieldError{Path: path, Err: e})
	}
	return errors.Join(errs...)
}

// SplitErrors takes joined errors apart.
func SplitErrors(err error) []error {
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
		out = append(out, SplitErrors(p)...)
	}
	return out
}

// JoinDistinct joins errors, taken apart; of several with one text it keeps the first.
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
