// Package site decides which Site a machine has, and applies its settings. A Site comes from the
// slot, from an Inventory in the slot, or from a stick, from which a member of a cluster accepts
// only few fields. The package also contains the phases that come before the Site: the machine's
// identity and its disk.
//
// Secrets of a Site stay in the slot and in memory. policy.go decides which fields of a stick's
// Site are accepted; apply.go decides which services are restarted for new settings.
package site
