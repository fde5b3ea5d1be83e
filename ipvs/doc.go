// Package ipvs keeps the way from a node to the API servers (masters) open: a virtual
// address that the kernel's IPVS balances to the kube-apiservers, a local
// route that makes the node its own load balancer, and a line in /etc/hosts
// that names it.
//
// The parts, from pure to touching:
//
//   - diff and choose are values in, values out: which real servers should
//     stand behind the virtual server, and which steps lead there.
//   - [Health] turns the outcomes of probes into a state, one per API server.
//   - a watcher per API server holds one HTTP/2 connection and senses by it.
//   - the keeper is the one goroutine that talks to the [Kernel]; it puts back
//     within a second whatever somebody else changed.
//   - [Daemon] ties them together and follows the files it was told of.
//
// Invariants: the last real server is never removed; an API server that cannot
// prove its identity never receives traffic, not even as the last one; a wrong
// clock never removes an API server; other virtual servers are never touched;
// sockets are destroyed only when IPVS maps them to a dead API server.
package ipvs
