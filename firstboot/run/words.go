package run

import (
	"regexp"

	"github.com/edgebake/edgebake/configs/printable"
)

// A wait may last for weeks, and its text comes from an error that recurs every
// two seconds. Varying parts that are of no use to a person must not make it a
// new message: each message is a line on the console and a write to flash.

// words returns s for people: without secrets and without this machine's end of each
// connection, whose port differs each time.
func (r *Runner) words(s string) string { return printable.WithoutLocalAddr(r.redact(s)) }

// varying matches parts that are worth reading but do not make a new message: times,
// durations, the head of a klog line.
var varying = regexp.MustCompile(`\b[IWEF]\d{4} [\d:.]+ +\d+ ` +
	`|\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z| ?[+-]\d\d:?\d\d)?` +
	`|\b\d\d:\d\d:\d\d(?:\.\d+)?\b` +
	`|\b(?:\d+h)?(?:\d+m)?\d+(?:\.\d+)?(?:h|m|s|ms|us|µs|ns)\b`)

// withoutVarying returns s without its varying parts, to compare messages.
func withoutVarying(s string) string { return varying.ReplaceAllString(s, "…") }
