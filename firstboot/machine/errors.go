package machine

import "strings"

// OneLine returns the text of an error on one line. Lines of a joined error are separated by "; ".
func OneLine(err error) string {
	if err == nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(err.Error()), "\n")
	return strings.Join(lines, "; ")
}
