// Package firstboot makes a booted machine the node that its Site describes, and
// checks at every later boot that it still is.
//
// It is a list of phases. A phase is a value, made for one pass: Check looks at the
// machine and says whether there is anything to do, Run does it, Undo takes back a Run
// that failed. The Runner has the order, the retries, the state and the reports.
// Effects enter through the funcs of Env, and all paths begin at its Root;
// package host makes the real Env.
//
// Invariants:
//   - Check looks at the machine, never at the state file: state.json only
//     explains. So a machine that was cut off at any point, or fixed by hand,
//     continues from where it really is.
//   - Every Run may be killed at any point and run again.
//   - Transient failures are retried forever, with growing pauses. What only a
//     person can fix is a Permanent error: it says how to fix it. The run then
//     waits for another Site, and tries again every ten minutes anyway: the fix
//     may be in the cluster.
//   - The bootstrap token is never written to DATA or ROOT: it is in the slot,
//     where stamping put it, and on /run. No log, state or report contains it.
package firstboot
