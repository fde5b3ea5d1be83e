package machine

import (
	"errors"
	"slices"
	"strings"
)

// JoinedErrors returns the errors that err joins, or err itself.
func JoinedErrors(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return []error{err}
}

// EveryErrorIs reports whether each of the errors joined in err is target.
func EveryErrorIs(err, target error) bool {
	return !slices.ContainsFunc(JoinedErrors(err), func(e error) bool { return !errors.Is(e, target) })
}

// OneLine returns the text of an error, perhaps a joined one, on one line.
func OneLine(err error) string {
	if err == nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(err.Error()), "\n")
	return strings.Join(lines, "; ")
}
