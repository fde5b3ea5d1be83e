// Package run carries out phases: the Runner those of first boot, with retries, state and
// reports; a Change the steps that a person asks for, with evidence and undoing.
//
// A Phase is a value, made for one pass: Check looks at the machine and says whether
// there is anything to do, Run does it, Undo takes back a Run that failed. The package
// knows no phase, and of the Site only what it must (Node).
//
// What changes here: how a phase is attempted, and what is said of it. Errors that only
// a person can fix are marked with NeedsPerson.
package run
