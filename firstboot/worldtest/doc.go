// Package worldtest simulates a machine and its cluster, for tests that run first boot on it. A
// World is a directory, with slots and API servers in memory. It counts every effect of its Env,
// and can lose its power before any of them.
//
// The package repeats some paths and names instead of using first boot's constants, because a test
// that compares a constant with itself proves nothing. Only tests may import it; test/walls checks
// that.
package worldtest
