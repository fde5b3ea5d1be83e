package firstboot

import (
	"errors"
	"slices"
	"strings"
)

// joinedErrors are the errors that err joins, or itself.
func joinedErrors(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}

// everyErrorIs reports whether all the errors joined in err are target.
func everyErrorIs(err, target error) bool {
	return !slices.ContainsFunc(joinedErrors(err), func(e error) bool { return !errors.Is(e, target) })
}

// oneLine makes of a joined error one line.
func oneLine(err error) string {
	if err == nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(err.Error()), "\n")
	return strings.Join(lines, "; ")
}
