package siteconf

import (
	"slices"
	"strings"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/ondisk"
)

// controlPlane reports control-plane images that the image lacks or has with several tags, and a
// kubernetesVersion of another minor version. The machine cannot pull images while its control plane
// starts.
func (c *check) controlPlane() {
	if c.site.NodeType != configs.NodeControlPlane || c.site.ControlPlane == nil {
		return
	}
	docs := c.site.ControlPlane.Documents()
	version := c.img.Info.Kubernetes // the machine runs the patch release of its image
	if v := docs.KubernetesVersion(); kubeadm.Minor(v) != kubeadm.Minor(version) {
		c.add("controlPlane.kubeadm", "kubernetesVersion is %s, but the image has kubelet and kubeadm %s, which have another minor version: build the image with kubernetes.version %s, or correct kubernetesVersion of the Cluster", v, version, v)
	}
	for _, n := range docs.Images(version) {
		if tags := tagsOf(c.img.Info, n.Name); len(tags) == 0 || n.Tag != "" && !slices.Contains(tags, n.Tag) {
			c.add("controlPlane.kubeadm", "the image lacks the container image %s, which the control plane runs: add it to images of the Image (`kubeadm config images list` prints all)", n.Example(version))
		} else if n.Tag == "" && len(tags) > 1 {
			c.add("controlPlane.kubeadm", "the image has %s with several tags (%s): keep one of them in images of the Image, or name the tag in the Cluster's ClusterConfiguration", n.Name, strings.Join(tags, ", "))
		}
	}
}

// tagsOf returns the tags with which the image contains a container image.
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

// EtcdTag returns the tag of the etcd container image that a control-plane node with this image
// runs, or "" if the image contains none.
func EtcdTag(info ondisk.ImageInfo, site *configs.Site) string {
	for _, n := range site.ControlPlane.Documents().Images(info.Kubernetes) {
		if !strings.HasSuffix(n.Name, "/"+kubeadm.ImageEtcd) {
			continue
		}
		if tags := tagsOf(info, n.Name); n.Tag == "" && len(tags) > 0 {
			return tags[0]
		}
		return n.Tag
	}
	return ""
}

// LocalKubeadm returns the version of Kubernetes in this image, and its tags of etcd and CoreDNS
// unless the Cluster sets them.
func LocalKubeadm(info ondisk.ImageInfo, site *configs.Site) kubeadm.Local {
	l := kubeadm.Local{Kubernetes: info.Kubernetes}
	for _, n := range site.ControlPlane.Documents().Images(info.Kubernetes) {
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
