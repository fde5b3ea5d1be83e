package firstboot

import (
	"maps"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
)

// TestCorrectedDocuments: a Site with other documents of kubeadm for the whole cluster
// has them uploaded, once, unless somebody else has changed what is there.
func TestCorrectedDocuments(t *testing.T) {
	t.Parallel()
	uploads := func(m *controlPlane) (n int) {
		for _, phase := range m.inits {
			if phase == "upload-config all" {
				n++
			}
		}
		return n
	}
	for name, tt := range map[string]struct {
		change  func(m *controlPlane)
		uploads int
		note    bool
	}{
		"nobody has changed them":   {func(*controlPlane) {}, 1, false},
		"a person has changed them": {func(m *controlPlane) { m.cluster.configs["ClusterConfiguration"] += "# mine" }, 0, true},
		"another one uploaded them": {func(m *controlPlane) {
			documents, err := documentsOf(m.site)
			if err != nil {
				t.Fatal(err)
			}
			m.cluster.configs["ClusterConfiguration"] += "# by m2"
			m.cluster.annotations[documentsKey] = documents
		}, 0, false},
		"the cluster is of a former release": {func(m *controlPlane) { clear(m.cluster.annotations) }, 0, true},
		"so is this machine": {func(m *controlPlane) {
			clear(m.cluster.annotations)
			if err := m.env().Remove(documentsMark); err != nil {
				t.Fatal(err)
			}
		}, 0, false},
		"the disk is new, and the Site may be old": {func(m *controlPlane) {
			if err := m.env().Remove(documentsMark); err != nil {
				t.Fatal(err)
			}
		}, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newControlPlane(t, mintedSites(t, 1))
			m.bootDone()
			m.inits = nil
			m.on()
			m.bootDone()
			if uploads(m) > 0 || len(m.state().Notes) > 0 {
				t.Fatalf("with the same Site kubeadm ran %q, notes %q", m.inits, m.state().Notes)
			}
			corrected := *m.site
			control := *m.site.ControlPlane
			control.Kubeadm = strings.Replace(control.Kubeadm, "clusterName:", "caCertificateValidityPeriod: 90000h0m0s\nclusterName:", 1)
			if control.Kubeadm == m.site.ControlPlane.Kubeadm {
				t.Fatal("the Site is as it was")
			}
			corrected.ControlPlane, corrected.Credentials = &control, configs.Credentials{}
			keys := m.site
			m.site = &corrected
			tt.change(m)
			m.inits = nil
			m.stampSite(m.site)
			m.on()
			m.bootDone()
			notes := strings.Join(m.state().Notes, "\n")
			if uploads(m) != tt.uploads || strings.Contains(notes, "kubeadm init phase upload-config all --config "+documentsFile) != tt.note || m.has(documentsFile) != tt.note {
				t.Errorf("kubeadm ran %q, notes %q", m.inits, notes)
			}
			// What the note says ends it; nothing is uploaded twice.
			documents, err := documentsOf(m.site)
			if err != nil {
				t.Fatal(err)
			}
			if tt.note {
				maps.Copy(m.cluster.annotations, map[string]string{documentsKey: documents})
			}
			m.inits = nil
			m.on()
			m.bootDone()
			if uploads(m) > 0 || len(m.state().Notes) > 0 || m.text(documentsMark) != documents || m.has(documentsFile) {
				t.Errorf("again: kubeadm ran %q, notes %q", m.inits, m.state().Notes)
			}
			m.site = keys
		})
	}
}

func (w *world) text(path string) string { return strings.TrimSpace(w.get(path)) }
