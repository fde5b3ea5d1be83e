// Package worldtest is a fake machine and its fake cluster, for tests that boot first boot
// on it. A World is a directory, slots in memory, and API servers in memory. It counts
// every effect of its Env, and can lose its power before any of them.
//
// It knows the paths and objects of the cluster by their own names, not by the constants of
// first boot. Only tests may import it, which test/walls checks.
package worldtest
