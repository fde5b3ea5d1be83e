package firstboot

import (
	"testing"

	"github.com/edgebake/edgebake/firstboot/hub"
	"github.com/edgebake/edgebake/openyurt"
)

// FuzzKubeadmFlags edits kubelet's flags: doing it twice is doing it once.
func FuzzKubeadmFlags(f *testing.F) {
	f.Add([]byte(`KUBELET_KUBEADM_ARGS="--node-ip=192.0.2.1 --node-labels=a=b"` + "\n"))
	f.Add([]byte(`KUBELET_KUBEADM_ARGS="--node-labels=,=,==, --node-labels="` + "\nX=1"))
	labels := map[string]string{openyurt.LabelEdgeWorker: "true"}
	f.Fuzz(func(t *testing.T, env []byte) {
		once, err := hub.RedirectFlags(env, "", labels)
		if err != nil {
			return
		}
		twice, err := hub.RedirectFlags(once, "", labels)
		if err != nil || string(once) != string(twice) {
			t.Errorf("once %q, twice %q (%v)", once, twice, err)
		}
		hub.Registering(hub.DirectFlags(once), nil) // must return
	})
}
