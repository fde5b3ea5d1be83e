// Package worldtest is a fake machine and its fake cluster, for tests that boot first boot
// on it. A World is a directory, slots in memory, and API servers in memory. It counts
// every effect of its Env, and can lose its power before any of them.
//
// It spells out the paths and names of the cluster's objects instead of using
// first boot's constants. Only tests may import it, which test/walls checks.
package worldtest
