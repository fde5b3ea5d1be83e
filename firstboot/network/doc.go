// Package network makes sure that a machine has an address and reaches what it needs. It makes
// networkd load new settings, keeps those that work, and restores them if the settings in a
// corrected Site do not. It also sets a clock that is certainly behind.
//
// rollback.go decides which settings are tried and rolled back; uplink.go decides what a
// machine must reach.
package network
