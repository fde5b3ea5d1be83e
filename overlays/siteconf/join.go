package siteconf

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/kubeadm"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/openyurt"
)

// Join contains the inputs of a join that are not in the Site.
type Join struct {
	NodeName string
	// NodeIP is kubelet's --node-ip. If it is empty, kubelet chooses an address.
	NodeIP string
	// Discovery is the path of the discovery kubeconfig.
	Discovery string
	// Timeout is the time that kubeadm waits for a healthy kubelet; 0 means kubeadm's default.
	// kubeadm waits four times as long for kubelet's certificate, which many nodes may request at
	// once.
	Timeout time.Duration
	// Kubernetes is the version of kubeadm, for example v1.36.3.
	Kubernetes string
}

// joinConfiguration contains the fields of kubeadm.k8s.io/v1beta4 that nodes need. It also encodes
// v1beta3, the latest version that kubeadm before 1.31 supports.
type joinConfiguration struct {
	APIVersion       string           `yaml:"apiVersion"`
	Kind             string           `yaml:"kind"`
	Discovery        discovery        `yaml:"discovery"`
	NodeRegistration nodeRegistration `yaml:"nodeRegistration"`
	SkipPhases       []string         `yaml:"skipPhases,omitempty"`
	Timeouts         *timeouts        `yaml:"timeouts,omitempty"`
}

type discovery struct {
	File              fileDiscovery `yaml:"file"`
	TLSBootstrapToken string        `yaml:"tlsBootstrapToken"`
	Timeout           string        `yaml:"timeout,omitempty"` // only in v1beta3
}

type fileDiscovery struct {
	KubeConfigPath string `yaml:"kubeConfigPath"`
}

type nodeRegistration struct {
	Name                  string          `yaml:"name"`
	CRISocket             string          `yaml:"criSocket"`
	Taints                []configs.Taint `yaml:"taints"` // never null, which means kubeadm's default taints
	IgnorePreflightErrors []string        `yaml:"ignorePreflightErrors,omitempty"`
	// KubeletExtraArgs is a []arg in v1beta4 and a map in v1beta3.
	KubeletExtraArgs any `yaml:"kubeletExtraArgs,omitempty"`
}

type arg struct {
	Name  string `yaml:"name"`
	Value string `yaml:"value"`
}

type timeouts struct {
	TLSBootstrap       string `yaml:"tlsBootstrap"`
	KubeletHealthCheck string `yaml:"kubeletHealthCheck"`
}

// JoinConfiguration returns the file for `kubeadm join --config`. The file contains the token:
// write it only to /run.
func JoinConfiguration(site *configs.Site, j Join) ([]byte, error) {
	args := maps.Clone(site.KubeletExtraArgs)
	if args == nil {
		args = map[string]string{}
	}
	if labels := KubeletLabels(site); len(labels) > 0 {
		var pairs []string
		for _, k := range slices.Sorted(maps.Keys(labels)) {
			pairs = append(pairs, k+"="+labels[k])
		}
		args["node-labels"] = strings.Join(pairs, ",")
	}
	if _, given := args["node-ip"]; j.NodeIP != "" && !given {
		args["node-ip"] = j.NodeIP
	}
	c := joinConfiguration{
		APIVersion: "kubeadm.k8s.io/v1beta4",
		Kind:       "JoinConfiguration",
		Discovery:  discovery{File: fileDiscovery{j.Discovery}, TLSBootstrapToken: site.Credentials.Token.Reveal()},
		NodeRegistration: nodeRegistration{
			Name:                  j.NodeName,
			CRISocket:             site.CRISocket,
			Taints:                append([]configs.Taint{}, site.Taints...),
			IgnorePreflightErrors: site.IgnorePreflightErrors,
		},
		SkipPhases: site.SkipPhases,
	}
	if kubeadm.Before(j.Kubernetes, 31) {
		c.APIVersion = "kubeadm.k8s.io/v1beta3"
		if len(args) > 0 {
			c.NodeRegistration.KubeletExtraArgs = args
		}
		if j.Timeout > 0 {
			c.Discovery.Timeout = j.Timeout.String()
		}
		return toYAML("the JoinConfiguration", c)
	}
	var list []arg
	for _, k := range slices.Sorted(maps.Keys(args)) {
		list = append(list, arg{k, args[k]})
	}
	if list != nil {
		c.NodeRegistration.KubeletExtraArgs = list
	}
	if j.Timeout > 0 {
		c.Timeouts = &timeouts{(4 * j.Timeout).String(), j.Timeout.String()}
	}
	return toYAML("the JoinConfiguration", c)
}

// KubeletLabels returns the labels with which kubelet registers the node. With OpenYurt it always
// sets both labels: yurt-manager would start to convert a node that has the pool's label but no
// edge worker label.
func KubeletLabels(site *configs.Site) map[string]string {
	labels := maps.Clone(site.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	if site.OpenYurt() {
		maps.Copy(labels, openyurt.Labels(site.NodePool, site.NodeType == configs.NodeCloud))
	}
	return labels
}

func toYAML(what string, v any) ([]byte, error) {
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encoding %s: %w", what, err)
	}
	return b.Bytes(), nil
}

// IPVS returns the configuration of ipvscare for this Site, or nil if the Site disables IPVS.
func IPVS(site *configs.Site) *ondisk.IPVS {
	if site.IPVS.Disabled {
		return nil
	}
	return &ondisk.IPVS{
		Version: ondisk.IPVSVersion,
		Servers: []ondisk.IPVSVirtual{{
			VIP:          site.VIPHostPort(),
			Masters:      slices.Clone(site.Masters),
			Host:         site.Endpoint,
			Scheduler:    site.IPVS.Scheduler,
			CAFile:       ondisk.KubeCA,
			ProbePath:    site.IPVS.ProbePath,
			Profile:      site.IPVS.Profile,
			Rise:         site.IPVS.Rise,
			Fall:         site.IPVS.Fall,
			LearnMasters: site.IPVS.LearnMasters,

			SpreadSeconds: site.SpreadSeconds,
		}},
	}
}
