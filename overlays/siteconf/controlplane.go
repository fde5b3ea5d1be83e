package siteconf

import (
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/ondisk"
)

// controlPlane reports container images of the control plane that are missing
// from the image: they are not pulled while it starts.
func (c *check) controlPlane() {
	if c.site.NodeType != configs.NodeControlPlane || c.site.ControlPlane == nil {
		return
	}
	docs := c.site.ControlPlane.Documents()
	if v := docs.KubernetesVersion(); v != c.img.Info.Kubernetes {
		c.add("controlPlane.kubeadm", "kubernetesVersion is %s, and the image has kubelet and kubeadm %s: build the image with kubernetes.version %s, or correct kubernetesVersion of the Cluster", v, c.img.Info.Kubernetes, v)
	}
	for _, n := range docs.Images() {
		if tags := tagsOf(c.img.Info, n.Name); len(tags) == 0 || n.Tag != "" && !slices.Contains(tags, n.Tag) {
			c.add("controlPlane.kubeadm", "the image has no container image %s on board, which the control plane runs: add it to images of the Image (`kubeadm config images list` prints all)", n.Example(docs.KubernetesVersion()))
		} else if n.Tag == "" && len(tags) > 1 {
			c.add("controlPlane.kubeadm", "the image has %s on board with several tags (%s): keep one of them in images of the Image, or name the tag in the Cluster's ClusterConfiguration", n.Name, strings.Join(tags, ", "))
		}
	}
}

// tagsOf returns the tags of a container image in the image.
func tagsOf(info ondisk.ImageInfo, name string) []string {
	var tags []string
	for _, i := range info.Images {
		ref, _, _ := strings.Cut(i.Ref, "@")
		if tag, ok := strings.CutPrefix(ref, name+":"); ok {
			tags = append(tags, tag)
		}
	}
	return tags
}

// LocalKubeadm returns the tags of etcd and CoreDNS in this image.
func LocalKubeadm(info ondisk.ImageInfo, site *configs.Site) kubeadm.Local {
	var l kubeadm.Local
	for _, n := range site.ControlPlane.Documents().Images() {
		tags := tagsOf(info, n.Name)
		if n.Tag != "" || len(tags) == 0 {
			continue
		}
		switch n.Name[strings.LastIndexByte(n.Name, '/')+1:] {
		case kubeadm.ImageEtcd:
			l.EtcdTag = tags[0]
		case kubeadm.ImageDNS:
			l.DNSTag = tags[0]
		}
	}
	return l
}
