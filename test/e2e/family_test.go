package e2e

import (
	"fmt"
	"testing"

	"github.com/edgebake/edgebake/test/lab"
)

// TestIPv6Site checks a Site with only IPv6: masters, VIP and node. The node must come back after a
// power cut, and its own address must be IPv6.
func TestIPv6Site(t *testing.T) {
	nightly(t)
	w := newWorldIn(t, need(t), 2, true)
	w.record = true
	own := w.net.GuestAddr6(0).String()
	vm := w.boot(0, lab.Site{NodeName: "six", Address: fmt.Sprintf("%s/%d", own, lab.GuestsCIDR6), Gateway: lab.Gateway6})
	node := w.ready(vm, nil)
	w.ownAddress(node, own)
	w.cut(vm, func() bool { return true })
	again := w.ready(vm, node)
	if again.Metadata.UID != node.Metadata.UID {
		t.Error("after the power cut the Node has another UID: the machine joined again")
	}
}

// TestDualStackSite checks that a machine with addresses of both families registers with the
// address of its masters' family.
func TestDualStackSite(t *testing.T) {
	nightly(t)
	for name, ipv6 := range map[string]bool{"masters with IPv4": false, "masters with IPv6": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorldIn(t, need(t), 1, ipv6)
			four := fmt.Sprintf("%s/%d", w.net.GuestAddr(0), lab.GuestsCIDR)
			six := fmt.Sprintf("%s/%d", w.net.GuestAddr6(0), lab.GuestsCIDR6)
			own := w.net.GuestAddr(0).String()
			if ipv6 {
				own = w.net.GuestAddr6(0).String()
			}
			w.ownAddress(w.ready(w.boot(0, lab.Site{NodeName: "both", Address: four, Address2: six, Gateway: lab.Gateway}), nil), own)
		})
	}
}

// ownAddress checks the first address that a node registered.
func (w *world) ownAddress(node *lab.Object, want string) {
	w.t.Helper()
	if a := node.Status.Addresses; len(a) == 0 || a[0].Address != want {
		w.t.Errorf("addresses %v, want %s first", a, want)
	}
}
