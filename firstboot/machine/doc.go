// Package machine is the only interface through which first boot uses the machine and the network.
// Env has a func for every effect, grouped by subject, and reads files below its Root. Package host
// makes the Env of the running system, package worldtest that of a simulated machine.
//
// This package makes no decisions. A new kind of effect becomes a func of Env (env.go). disks.go
// reads the kernel's description of disks.
package machine
