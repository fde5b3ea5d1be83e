package configs

import (
	"fmt"
	"net/netip"
	"strconv"

	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/openyurt"
)

// Versions in the examples, and in messages that show the format.
const (
	ExampleKubernetes = "v1.37.2"
	ExampleContainerd = "2.3.7"
	ExampleCrictl     = "v1.37.0"
)

// newestContainerd is the newest tested minor version of containerd 2.
const newestContainerd = 4

// endedKubernetes maps minor versions of Kubernetes 1.x whose support has ended to the last day of
// support, from the release pages of Kubernetes.
var endedKubernetes = map[int]string{
	30: "28 June 2025",
	31: "11 November 2025",
	32: "28 February 2026",
	33: "28 June 2026",
	34: "27 October 2026",
}

// endedContainerd maps minor versions of containerd whose support has ended to the last day of
// support, from the release policy of containerd.
var endedContainerd = map[string]string{
	"1.7": "30 September 2026",
	"2.0": "7 November 2025",
	"2.1": "5 May 2026",
	"2.2": "6 November 2026",
}

const (
	// kubelet asks containerd for its cgroup driver, but containerd before 2.0 does not answer.
	// kubelet before this version then uses its own configuration.
	firstKubernetesWithoutFallback = 38
	// From this version on, kubelet warns if containerd does not answer.
	firstKubernetesWarning = 36
)

// debianContainerd maps Debian releases to their minor versions of containerd.
var debianContainerd = map[string]string{"bookworm": "1.6", "trixie": "1.7"}

// containerdSeries returns the minor version, such as "2.3" for containerd 2.3.7. It returns "" if
// the Image does not determine the version.
func (i *Image) containerdSeries() string {
	if i.Containerd.Debian {
		if b := i.Base.Debian; b != nil && len(b.Sources) == 0 {
			return debianContainerd[b.Suite]
		}
		return ""
	}
	if m := containerdVersion.FindStringSubmatch(i.Containerd.Version); m != nil {
		return m[1] + "." + m[2]
	}
	return ""
}

// containerdField returns the field that determines the version of containerd.
func (i *Image) containerdField() string {
	if i.Containerd.Debian {
		return "containerd.debian"
	}
	return "containerd.version"
}

// validatePair rejects versions that do not work together.
func (i *Image) validatePair(probs *Problems) {
	if i.Containerd.Debian && i.containerdSeries() == "1.6" {
		probs.Add("containerd.debian", "Debian %s has containerd 1.6, which is not supported (1.7 and 2.x are): give a version and a source, e.g. version: %s and source: {goModule: {}}", i.Base.Debian.Suite, ExampleContainerd)
	}
	if minor := kubeadm.Minor(i.Kubernetes.Version); minor >= firstKubernetesWithoutFallback && i.containerdSeries() == "1.7" {
		probs.Add(i.containerdField(), "kubelet v1.%d does not start with containerd 1.7, which cannot report its cgroup driver: use containerd %s", minor, ExampleContainerd)
	}
}

// KubernetesWarning returns a warning if the support of a version has ended, or if the version is
// newer than the tested versions. Otherwise, it returns "".
func KubernetesWarning(version string) string {
	minor, newest := kubeadm.Minor(version), kubeadm.Minor(ExampleKubernetes)
	switch end, ended := endedKubernetes[minor]; {
	case ended:
		return fmt.Sprintf("Kubernetes v1.%d has had no security fixes since %s: use %s", minor, end, ExampleKubernetes)
	case minor > newest:
		return fmt.Sprintf("Kubernetes v1.%d is newer than this edgebake, which was tested with v1.%d and earlier", minor, newest)
	}
	return ""
}

// Warnings returns settings of a valid Image that are allowed but rarely correct. Each has the
// path of its field.
func (i *Image) Warnings() Problems {
	var w Problems
	minor, series := kubeadm.Minor(i.Kubernetes.Version), i.containerdSeries()
	if old := KubernetesWarning(i.Kubernetes.Version); old != "" {
		w.Add("kubernetes.version", "%s", old)
	}
	if y := i.Yurthub; y != nil && minor > openyurt.NewestKubernetes && !openyurt.RunsAsPod(y.Version) {
		w.Add("yurthub.version", "%s is certified by OpenYurt up to Kubernetes v1.%d and was tested here up to v1.%d, not with v1.%d", y.Version, openyurt.CertifiedKubernetes, openyurt.NewestKubernetes, minor)
	}
	field := i.containerdField()
	// Debian supports its own package of containerd as long as the suite.
	if end, ok := endedContainerd[series]; ok && !i.Containerd.Debian {
		w.Add(field, "containerd %s has had no security fixes since %s: use %s", series, end, ExampleContainerd)
	}
	if m := containerdVersion.FindStringSubmatch(i.Containerd.Version); m != nil {
		if n, _ := strconv.Atoi(m[2]); m[1] == "2" && n > newestContainerd {
			w.Add(field, "containerd %s is newer than this edgebake, which was tested with 2.%d and earlier", series, newestContainerd)
		}
	}
	if series == "1.7" && minor >= firstKubernetesWarning && minor < firstKubernetesWithoutFallback {
		w.Add(field, "containerd 1.7 works with Kubernetes v1.%d, but not with v1.%d and later: use %s", minor, firstKubernetesWithoutFallback, ExampleContainerd)
	}
	if len(i.Updates.Keys) > 0 && i.Updates.Serial == 0 {
		w.Add("updates.serial", "machines with this image accept every image that is signed with updates.keys, also older ones: set it to 1, and raise it in each image")
	}
	if p, err := netip.ParsePrefix(i.CNI.PodCIDR); err == nil && p.Contains(defaultVIP) {
		w.Add("cni.podCIDR", "%s contains %s, the default virtual address of API servers: choose another network, or set vip in each Site", p, defaultVIP)
	}
	i.Kernel.contradictions(&w)
	return w
}
