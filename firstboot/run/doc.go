// Package run carries out phases. A Runner carries out those of first boot,
// with retries, state and reports. A change, made by NewChange, carries out
// the steps of convert, revert and reset, and records and undoes them.
//
// A Phase is made for one pass: Check reports whether there is anything to do, Run does it, Undo
// reverts a failed Run. The package depends on no particular phase, and uses only Node of the
// Site.
//
// phase.go attempts a phase, runner.go repeats failed attempts, and state.go reports them.
// Errors that only a person can fix are marked with NeedsPerson.
package run
