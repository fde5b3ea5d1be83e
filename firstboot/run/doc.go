// Package run carries out phases. A Runner carries out those of first boot, with retries, state and
// reports. A Change carries out the steps of update, convert, revert and reset, and records them. If
// a step of convert or revert fails, it undoes the steps; update and reset continue when they are run
// again.
//
// A Phase is made for one pass: Check reports whether there is anything to do, Run does it, and
// Undo reverts a failed Run. The package depends on no particular phase, and uses only the part of
// a Site that is in Node.
//
// phase.go attempts a phase, runner.go repeats failed attempts, and state.go reports them.
// NeedsPerson marks errors that only a person can fix.
package run
