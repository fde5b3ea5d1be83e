// Package firstboot makes a booted machine the node that its Site describes,
// and checks at every later boot that it still is.
//
// It is a list of phases, each a value: Check looks at the machine and says
// whether the phase has anything to do, Run does it, Undo takes back a Run
// that failed. The Runner owns order, retries, state and what is said about
// it. Effects enter by one struct of funcs, Env, and all paths begin at its
// Root; package host makes the real one.
//
// Invariants:
//   - Check observes the machine, never the state file: state.json explains
//     and never decides. So a machine cut off at any point, or fixed by hand,
//     continues from where it really is.
//   - Every Run can be killed anywhere and carried out again.
//   - Transient failures are retried forever, less and less often. What only a
//     person can fix is a Permanent error: it names its fix and stops the
//     run until the site is corrected.
//   - The bootstrap token is never written to a disk: it is in the slot,
//     where stamping put it, and on /run. No log, state or report has it.
package firstboot
