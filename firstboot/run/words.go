package run

import (
	"regexp"

	"github.com/edgebake/edgebake/configs/printable"
)

// A wait may last for weeks, and its error recurs every two seconds. Each new message costs a
// console line and a write to flash. Therefore parts that vary, such as times, do not make a
// message new.

// cleaned returns s without secrets and without connections' local addresses, whose ports always
// differ.
func (r *Runner) cleaned(s string) string { return printable.WithoutLocalAddr(r.redact(s)) }

// varying matches parts that are shown but do not make a message new: times, durations and the
// beginnings of klog lines.
var varying = regexp.MustCompile(`\b[IWEF]\d{4} [\d:.]+ +\d+ ` +
	`|\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z| ?[+-]\d\d:?\d\d)?` +
	`|\b\d\d:\d\d:\d\d(?:\.\d+)?\b` +
	`|\b(?:\d+h)?(?:\d+m)?\d+(?:\.\d+)?(?:h|m|s|ms|us|µs|ns)\b`)

// withoutVarying returns s without the parts that vary, to compare messages.
func withoutVarying(s string) string { return varying.ReplaceAllString(s, "…") }
