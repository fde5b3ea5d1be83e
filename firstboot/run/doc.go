// Package run carries out phases: a Runner those of first boot, with retries, state and
// reports; NewChange the steps of convert, revert and reset, with a record and undoing.
//
// A Phase is a value, made for one pass: Check looks at the machine and reports whether there
// is anything to do, Run does it, Undo takes back a Run that failed. The package knows no
// particular phase, and of the Site only Node.
//
// phase.go attempts a phase, runner.go repeats failed attempts, and state.go reports them.
// Errors that only a person can fix are marked with NeedsPerson.
package run
