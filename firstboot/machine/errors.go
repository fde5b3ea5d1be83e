package machine

import (
	"errors"
	"slices"
	"strings"
)

// JoinedErrors are the errors that err joins, or itself.
func JoinedErrors(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}

// EveryErrorIs reports whether all the errors joined in err are target.
func EveryErrorIs(err, target error) bool {
	return !slices.ContainsFunc(JoinedErrors(err), func(e error) bool { return !errors.Is(e, target) })
}

// OneLine makes of a joined error one line.
func OneLine(err error) string {
	if err == nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(err.Error()), "\n")
	return strings.Join(lines, "; ")
}
