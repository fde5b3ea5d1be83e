// Package firstboot runs at every boot. It turns a machine into the node that its Site describes,
// and at later boots checks that it still is that node.
//
// The work is a list of phases (phases.go), which package run carries out. All effects go through
// machine.Env; package host makes the real one.
//
// Invariants:
//   - Check examines the machine and never state.json, which is only a report. So a machine
//     that was interrupted at any point, or repaired by hand, continues from its real state.
//   - Every Run may be killed at any point and run again.
//   - Transient failures are retried forever, with growing pauses. An error that only a
//     person can fix is marked with run.NeedsPerson, which adds the fix. The run then waits for
//     another Site, and retries about every ten minutes, because the fix may be in the cluster.
//   - The bootstrap token is only in the slot, where stamping put it, and in /run. It is never
//     written to DATA or to a root file system, and no log, state or report contains it.
package firstboot
