package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/lab"
)

// TestBridgeOnBond checks a node that reaches its cluster through a bridge on a bond of two cards.
// Its network has no default route, so programs on the host reach Services through the default
// route that first boot adds with the lowest priority.
func TestBridgeOnBond(t *testing.T) {
	nightly(t)
	w := newWorld(t, 1)
	if err := w.c.LetLogsBeRead(t.Context()); err != nil {
		t.Fatal(err)
	}
	file := w.site(0, lab.Site{NodeName: "edge1"})
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	doc, _, ok := strings.Cut(string(text), "network:\n")
	if !ok {
		t.Fatalf("the Site has no network:\n%s", text)
	}
	doc += fmt.Sprintf(`network:
  interfaces:
    - {name: bond0, bond: {interfaces: [enp0s2, enp0s3, enp0s4]}} # of which the machine has two
    - {name: br0, bridge: [bond0], addresses: [%s/%d]}
`, w.net.GuestAddr(0), lab.GuestsCIDR)
	if err := os.WriteFile(file, []byte(doc), 0o600); err != nil {
		t.Fatal(err)
	}
	image := w.lab.Dir + "/edge1.raw"
	w.must(w.bin, "stamp", w.golden, file, "--output", image)
	second := w.net.NIC(1)
	vm := w.start(lab.VMConfig{Name: "edge1", Image: image, NIC: &second})
	w.ready(vm, nil)
	w.saysOnNode(vm, `grep -E 'Bonding Mode|Slave Interface|MII Status' /proc/net/bonding/bond0; ip -br link; bridge link; ip -4 -br addr show br0; ip -4 route
ip route get 10.96.0.1
systemd-analyze cat-config systemd/timesyncd.conf | grep -vE '^ *(#|;|$)'`,
		"active-backup", "master br0", "default dev br0 proto static scope link metric 65535", "10.96.0.1 dev br0", "ConnectionRetrySec=5min")
	w.off(vm)
}
