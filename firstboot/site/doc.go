// Package site decides which Site a machine has, and applies its settings.
// Sites come from the slot, from an Inventory in it, and from sticks, of
// which a member of a cluster accepts little. The package also has the
// phases that come before the Site: the machine's identity and its disk.
//
// Secrets of a Site stay in the slot and in memory. policy.go decides which fields of a
// stick's Site are accepted; apply.go decides which services are restarted for new settings.
package site
