// Package ipvs keeps the API servers (masters) reachable from a node. It
// maintains a virtual address that the kernel's IPVS balances across the
// kube-apiservers, a local route that makes the node its own load balancer, and
// a line in /etc/hosts with the address's name.
//
// The parts, from pure functions to the kernel:
//
//   - choose computes the real servers of a virtual server. Package kernel computes
//     the steps that bring the kernel's table to that state.
//   - Package probe sends requests to one API server.
//   - health computes the state of an API server from the outcomes of probes.
//   - A schedule decides when the next PING or request is sent.
//   - An inquiry distinguishes a slow API server from a dead one.
//   - Joined (guard.go) checks that an API server belongs to the cluster that the node joined.
//   - A watcher per API server holds one HTTP/2 connection and probes over it.
//   - The learner (learn.go) reads the list of API servers from the cluster.
//   - The reconciler makes the kernel's table match these states; only its goroutine uses the
//     [kernel.Kernel]. It reverts changes by other programs within a second.
//   - [Daemon] connects these parts and applies changes of its files.
//
// Invariants:
//
//   - The last real server is removed only if it is an alien, or if it is replaced by a
//     slow API server that still accepts connections.
//   - An alien is an API server that cannot prove its identity or belongs to another
//     cluster. It never receives traffic, even if it is the only API server.
//   - A wrong clock never removes an API server.
//   - Virtual servers of other programs are never changed.
//   - A socket is closed only if it is connected to an API server that is down, an alien
//     or removed from the list, or if it is connected through a virtual server that is removed.
package ipvs
