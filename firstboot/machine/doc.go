// Package machine is the only way in which first boot touches the machine and communicates.
// Env has a func for every effect, grouped by subject, and reads files below its Root. Package
// host makes the Env of the running system, package worldtest the Env of a simulated machine.
//
// It makes no decisions. A new kind of effect becomes a func of Env (env.go); disks.go reads
// the kernel's view of disks.
package machine
