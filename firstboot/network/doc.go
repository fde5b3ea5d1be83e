// Package network sees that a machine has an address and reaches who it needs. It has
// networkd read new settings, keeps those that work, and brings them back when a
// corrected Site's reach nobody. It also sets a clock that is certainly behind.
//
// What changes here: which settings are tried and rolled back, and what counts as
// reached.
package network
