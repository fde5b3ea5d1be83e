package controlplane_test

import (
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/firstboot/controlplane"
)

// TestCorrectedDocuments checks that documents for the whole cluster that have changed in a Site
// are uploaded once, unless somebody else has changed or uploaded them, or the record of an earlier
// upload is missing.
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
		"a person has changed them": {func(m *controlPlane) { m.Cluster.UploadedConfigs["ClusterConfiguration"] += "# mine" }, 0, true},
		"another one uploaded them": {func(m *controlPlane) {
			documents, err := controlplane.DocumentsOf(m.site)
			if err != nil {
				t.Fatal(err)
			}
			m.Cluster.UploadedConfigs["ClusterConfiguration"] += "# by m2"
			m.Cluster.Annotations[controlplane.DocumentsKey] = documents
		}, 0, false},
		"the cluster is of a former release": {func(m *controlPlane) { clear(m.Cluster.Annotations) }, 0, true},
		"so is this machine": {func(m *controlPlane) {
			clear(m.Cluster.Annotations)
			if err := m.Env().Remove(controlplane.DocumentsMark); err != nil {
				t.Fatal(err)
			}
		}, 0, false},
		"the disk is new, and the Site may be old": {func(m *controlPlane) {
			if err := m.Env().Remove(controlplane.DocumentsMark); err != nil {
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
			if uploads(m) > 0 || len(m.State().Notes) > 0 {
				t.Fatalf("with the same Site kubeadm ran %q, notes %q", m.inits, m.State().Notes)
			}
			keys := m.site
			m.site = m.corrected("clusterName:", "caCertificateValidityPeriod: 90000h0m0s\nclusterName:")
			tt.change(m)
			m.inits = nil
			m.stampSite(m.site)
			m.on()
			m.bootDone()
			notes := strings.Join(m.State().Notes, "\n")
			if uploads(m) != tt.uploads || strings.Contains(notes, "kubeadm init phase upload-config all --config "+controlplane.DocumentsFile) != tt.note || m.Has(controlplane.DocumentsFile) != tt.note {
				t.Errorf("kubeadm ran %q, notes %q", m.inits, notes)
			}
			// After the fix in the note, the note is gone. Nothing is uploaded twice.
			documents, err := controlplane.DocumentsOf(m.site)
			if err != nil {
				t.Fatal(err)
			}
			if tt.note {
				maps.Copy(m.Cluster.Annotations, map[string]string{controlplane.DocumentsKey: documents})
			}
			m.inits = nil
			m.on()
			m.bootDone()
			if uploads(m) > 0 || len(m.State().Notes) > 0 || strings.TrimSpace(m.Get(controlplane.DocumentsMark)) != documents || m.Has(controlplane.DocumentsFile) {
				t.Errorf("again: kubeadm ran %q, notes %q", m.inits, m.State().Notes)
			}
			m.site = keys
		})
	}
}

// corrected returns the machine's Site with changed kubeadm documents and without keys.
func (m *controlPlane) corrected(old, with string) *configs.Site {
	m.T.Helper()
	site, control := *m.site, *m.site.ControlPlane
	control.Kubeadm = strings.Replace(control.Kubeadm, old, with, 1)
	if control.Kubeadm == m.site.ControlPlane.Kubeadm {
		m.T.Fatal("the Site did not change")
	}
	site.ControlPlane, site.Credentials = &control, configs.Credentials{}
	return &site
}

// TestUploadThatWasCutOff checks that an interrupted upload is completed. It does not count as
// somebody else's change.
func TestUploadThatWasCutOff(t *testing.T) {
	t.Parallel()
	m := newControlPlane(t, mintedSites(t, 1))
	m.bootDone()
	m.stampSite(m.corrected("clusterName:", "certificateValidityPeriod: 9000h0m0s\nclusterName:"))
	files := m.Files()
	for name, interrupt := range map[string]func(c *controlPlane){
		"before the upload":         func(c *controlPlane) { c.CutPowerBefore("kubeadm uploads ClusterConfiguration") },
		"within the upload":         func(c *controlPlane) { c.CutPowerBefore("kubeadm uploads kubelet") },
		"the cluster takes no note": func(c *controlPlane) { c.Cluster.DocumentsNoteFails, c.Patience = true, time.Minute },
		"before this machine's":     func(c *controlPlane) { c.CutPowerBefore("write " + controlplane.DocumentsMark) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := m.CloneWith(t, files)
			c.on()
			interrupt(c)
			if err := c.Boot(); err == nil {
				t.Fatal("the power was not cut")
			}
			c.Cluster.DocumentsNoteFails, c.PowerCutAt, c.BeforeEffect, c.Patience = false, 0, nil, m.Patience
			c.on()
			c.bootDone()
			if notes := c.State().Notes; len(notes) > 0 || c.Has(controlplane.DocumentsFile) || len(c.Cluster.Annotations) != 3 {
				t.Errorf("notes %q, annotations %q", notes, c.Cluster.Annotations)
			}
			for key, text := range c.Cluster.UploadedConfigs {
				if key != "config.conf" && !strings.Contains(text, "certificateValidityPeriod: 9000h0m0s") {
					t.Errorf("%s is not of the corrected Site:\n%s", key, text)
				}
			}
		})
	}
}

// TestKubeProxyDiffers checks that a Site with a different kube-proxy configuration does not change
// the cluster's; a note reports the difference and the fix.
func TestKubeProxyDiffers(t *testing.T) {
	t.Parallel()
	const document = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: "
	sites := mintedSites(t, 1)
	control := *sites[0].Site.ControlPlane
	control.Kubeadm += "---\n" + document + "iptables\n"
	sites[0].Site.ControlPlane = &control
	m := newControlPlane(t, sites)
	m.bootDone()
	m.stampSite(m.corrected("mode: iptables", "mode: nftables"))
	for _, differs := range []bool{true, true, false} {
		if !differs {
			m.Cluster.UploadedConfigs["config.conf"] = strings.Replace(m.Cluster.UploadedConfigs["config.conf"], "mode: iptables", "mode: nftables", 1)
		}
		m.inits = nil
		m.on()
		m.bootDone()
		notes := strings.Join(m.State().Notes, "\n")
		if strings.Contains(notes, "(mode is iptables in the cluster, but nftables in the Site)") != differs || strings.Contains(strings.Join(m.inits, "\n"), "addon") {
			t.Errorf("notes %q, kubeadm ran %q", notes, m.inits)
		}
	}
}
