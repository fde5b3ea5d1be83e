package join_test

import (
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/join"
	"github.com/edgebake/edgebake/firstboot/kubeadm"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/firstboot/member"
	"github.com/edgebake/edgebake/firstboot/site"
)

// TestPendingKeyIsKept checks a join that failed while the node's CSR was pending. It is repeated
// with the same key, so kubelet finds its CSR. A reset removes the key.
func TestPendingKeyIsKept(t *testing.T) {
	t.Parallel()
	w := nativeWorld(t)
	w.MustBoot()
	e := w.Env()
	const key = "-----BEGIN EC PRIVATE KEY-----"
	if err := e.WriteFile(member.PendingKey, []byte(key), machine.Mode(0o600)); err != nil {
		t.Fatal(err)
	}
	if err := e.Remove(member.ClientCert); err != nil { // not enrolled yet
		t.Fatal(err)
	}
	phase := join.Phase(&site.Active{Site: new(configs.Site)})
	if err := phase.Undo(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	if w.Has(member.KubeadmFlags) || w.Has(member.ClientCert) || !strings.Contains(w.Get(member.PendingKey), key) {
		t.Errorf("flags: %t, certificate: %t, key: %q", w.Has(member.KubeadmFlags), w.Has(member.ClientCert), w.Get(member.PendingKey))
	}
	if err := kubeadm.UndoJoin(t.Context(), e); err != nil || w.Has(member.PendingKey) {
		t.Errorf("the key is still there: %v", err)
	}
}
