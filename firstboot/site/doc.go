// Package site decides which Site a machine has, and applies its settings. A Site comes from the
// slot, from an Inventory in the slot, or from a stick. Unless a stick is signed, a member of a
// cluster by default accepts only the fields that it needs to return to its cluster. The package
// also contains the phases that come before the Site: the machine's identity and its disk.
//
// A Site's credentials (token and keys) stay in the slot and in memory; its other secrets are also in
// the settings on this machine's disk. policy.go decides which fields of a stick's
// Site are accepted; apply.go decides which services are restarted for new settings.
package site
