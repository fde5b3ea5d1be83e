package run

import "regexp"

// A wait may last for weeks, and what is said of it is the text of an error that comes
// back every two seconds. What differs in it from one time to the next and tells a
// person nothing must not make it a new message: each is a line on the console, and
// wears the flash that the state is kept on.

// localEnd is this machine's end of a connection in Go's network errors, whose port is
// another one each time: 192.0.2.50:40112->192.0.2.11:6443.
var localEnd = regexp.MustCompile(`(?:\[[0-9A-Za-z:.%]+\]|\d+(?:\.\d+){3}):\d+->`)

// words is s as it is said: without secrets, and without what changes by itself.
func (r *Runner) words(s string) string { return localEnd.ReplaceAllString(r.redact(s), "") }

// varying are parts of a message that a person may want to read, and that do not make
// it another message: the time, how long something took, the head of a line of klog.
var varying = regexp.MustCompile(`\b[IWEF]\d{4} [\d:.]+ +\d+ ` +
	`|\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z| ?[+-]\d\d:?\d\d)?` +
	`|\b\d\d:\d\d:\d\d(?:\.\d+)?\b` +
	`|\b(?:\d+h)?(?:\d+m)?\d+(?:\.\d+)?(?:h|m|s|ms|us|µs|ns)\b`)

// gist is the same for two messages that say the same.
func gist(s string) string { return varying.ReplaceAllString(s, "…") }
