package siteconf

import (
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
)

// TestVersionsOfAControlPlane checks that every image of the Site's minor version accepts the Site
// of a control-plane node, and that the machine runs the patch release of its image.
func TestVersionsOfAControlPlane(t *testing.T) {
	site := &configs.Site{NodeType: configs.NodeControlPlane, ControlPlane: &configs.SiteControlPlane{Kubeadm: `apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: v1.36.3
proxy: {disabled: true}
dns: {disabled: true}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
`}}
	of := func(version, etcd string) ondisk.ImageInfo {
		info := ondisk.ImageInfo{Kubernetes: version}
		for _, ref := range []string{"kube-apiserver:" + version, "kube-controller-manager:" + version, "kube-scheduler:" + version, "etcd:" + etcd} {
			info.Images = append(info.Images, ondisk.ImageRef{Ref: "registry.k8s.io/" + ref})
		}
		return info
	}
	for _, version := range []string{"v1.36.3", "v1.36.0", "v1.36.12"} {
		info := of(version, "3.6.9-0")
		if probs := CheckInfo(info, site); len(probs) > 0 {
			t.Errorf("%s: %v", version, probs)
		}
		l := LocalKubeadm(info, site)
		text, err := site.ControlPlane.Documents().EncodeFor(l)
		if err != nil || !strings.Contains(string(text), `kubernetesVersion: "`+version+`"`) || EtcdTag(info, site) != "3.6.9-0" {
			t.Errorf("%s: %v, etcd %s\n%s", version, err, EtcdTag(info, site), text)
		}
	}
	for _, version := range []string{"v1.35.3", "v1.37.3"} {
		if err := CheckInfo(of(version, "3.6.9-0"), site).Err(); err == nil || !strings.Contains(err.Error(), "kubernetesVersion is v1.36.3, but the image has kubelet and kubeadm "+version+", which have another minor version") {
			t.Errorf("%s: %v", version, err)
		}
	}
	old := of("v1.36.5", "3.6.9-0")
	old.Images[0].Ref = "registry.k8s.io/kube-apiserver:v1.36.3"
	if err := CheckInfo(old, site).Err(); err == nil || !strings.Contains(err.Error(), "lacks the container image registry.k8s.io/kube-apiserver:v1.36.5") {
		t.Errorf("an image with another API server than kubelet: %v", err)
	}
}
