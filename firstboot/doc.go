// Package firstboot runs at every boot. It makes a booted machine the node that its Site
// describes, and at later boots checks that it still is.
//
// The work is a list of phases (phases.go), which package run carries out. All effects go
// through machine.Env; package host makes the real one.
//
// Invariants:
//   - Check looks at the machine and never at state.json, which is only a report. So a machine
//     that was interrupted at any point, or fixed by hand, continues from its real state.
//   - Every Run may be killed at any point and run again.
//   - Transient failures are retried forever, with growing pauses. An error that only a
//     person can fix is marked with run.NeedsPerson, with the fix. The run then waits for
//     another Site, but also retries every ten minutes: the fix may be in the cluster.
//   - The bootstrap token is only in the slot, where stamping put it, and on /run: it is never
//     written to DATA or a root. No log, state or report contains it.
package firstboot
