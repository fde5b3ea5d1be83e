package firstboot

import (
	"strings"
	"testing"

	"aead.dev/minisign"

	"github.com/edgebake/edgebake/firstboot/worldtest"
	"github.com/edgebake/edgebake/ondisk"
)

// TestUnsignedStick checks what an enrolled node applies from an unsigned stick under each
// policy. By default, this is only repairs, and no users.
func TestUnsignedStick(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		policy        string
		network, user bool
	}{
		{"", true, false}, {ondisk.SitesRepair, true, false}, {ondisk.SitesAlways, true, true},
		{ondisk.SitesNever, false, false}, {ondisk.SitesUntilEnrolled, false, false},
	} {
		t.Run("removable "+c.policy, func(t *testing.T) {
			w := nativeWorld(t)
			if err := w.Boot(); err != nil {
				t.Fatal(err)
			}
			w.setStickPolicy(c.policy)
			w.Plug(w.Site("network: {dns: [192.0.2.123]}", "users: [{name: root, sshAuthorizedKeys: [\"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKHEChAsHYmTqiLyuQ3FqLqWUgFYmWlSTsZKEJpSMEiH x\"]}]"))
			w.PowerOn()
			if err := w.Boot(); err != nil {
				t.Fatalf("%v\n%s", err, strings.Join(w.Console, "\n"))
			}
			if got := w.SlotSite(worldtest.SlotDevice); strings.Contains(got, "192.0.2.123") != c.network || strings.Contains(got, "ssh-ed25519") != c.user {
				t.Errorf("the slot has\n%s", got)
			}
			if w.Has("/root/.ssh/authorized_keys") != c.user {
				t.Errorf("root's keys: %v", !c.user)
			}
			if w.ConsoleHas("are ignored, since the Image allows repairs only (sites.removable): users") != (c.network && !c.user) {
				t.Error(strings.Join(w.Console, "\n"))
			}
		})
	}
}

// setStickPolicy gives the machine an Image with this policy
// (sites.removable), and with the public keys of keys.
func (w *world) setStickPolicy(policy string, keys ...minisign.PrivateKey) {
	w.T.Helper()
	var texts []string
	for _, k := range keys {
		texts = append(texts, k.Public().(minisign.PublicKey).String())
	}
	w.SetStickPolicy(policy, texts...)
}
