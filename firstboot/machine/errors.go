package machine

import "strings"

// OneLine returns the text of an error on one line, with "; "
// between the lines of a joined error.
func OneLine(err error) string {
	if err == nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(err.Error()), "\n")
	return strings.Join(lines, "; ")
}
