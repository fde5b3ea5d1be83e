package machine

import "strings"

// OneLine returns the text of an error, perhaps a joined one, on one line.
func OneLine(err error) string {
	if err == nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(err.Error()), "\n")
	return strings.Join(lines, "; ")
}
