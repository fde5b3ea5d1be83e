// Package network makes sure that a machine has an address and reaches the machines that it needs.
// It makes networkd load new settings, and keeps those that work. If the settings in a corrected
// Site do not work, it restores the former ones. It also sets a clock that is certainly behind.
//
// rollback.go decides which settings are tried and rolled back; uplink.go decides which machines
// must be reached.
package network
