// Package ipvs keeps the API servers (masters) reachable from a node. It
// maintains a virtual address that the kernel's IPVS balances to the
// kube-apiservers, a local route that makes the node its own load balancer, and a
// line in /etc/hosts with the address's name.
//
// The parts, from pure functions to the kernel:
//
//   - choose maps values to values: which real servers the virtual server has.
//     Package kernel has the steps that lead there.
//   - package probe asks one API server.
//   - health turns the outcomes of probes into a state, one per API server.
//   - a watcher per API server holds one HTTP/2 connection and probes over it.
//   - the keeper is the one goroutine that uses the [kernel.Kernel]; within a second it
//     restores what somebody else changed.
//   - [Daemon] connects them and follows changes of its files.
//
// Invariants: the last real server is removed only if a slow one, which still accepts
// connections, takes its place, or if it is an alien, one that cannot prove its
// identity or shows another cluster: an alien never receives traffic, not even as the
// last one; a wrong clock never removes an API server; other virtual servers are never
// touched; sockets are destroyed only if they are connected to an API server that is
// dead, an alien or no longer listed (through IPVS or, where the kernel has none,
// directly), or through a virtual server that is removed.
package ipvs
