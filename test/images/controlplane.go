package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/test/lab"
)

// controlPlane makes the container images of a kubeadm control plane.
func controlPlane(ctx context.Context, release lab.Release, out string, archs []string, log io.Writer) error {
	return fromModules(ctx, out, archs, log, func(cache *fetch.Cache, arch string) ([]controlImage, error) {
		k8s, err := fetch.KubernetesRecipe(release.Kubernetes, arch, "kube-apiserver", "kube-controller-manager", "kube-scheduler")
		if err != nil {
			return nil, err
		}
		var images []controlImage
		for _, pkg := range k8s.Packages {
			name := lab.ProgramName(pkg)
			images = append(images, controlImage{ref: name + ":" + release.Kubernetes, parts: []part{{k8s, pkg, name}}})
		}
		// The server is the first program, as in etcd's own image.
		server, tool := lab.EtcdRecipe(release.Etcd, arch), lab.EtcdutlRecipe(release.Etcd, arch)
		return append(images, controlImage{ref: "etcd:" + release.EtcdImageTag, parts: []part{{server, server.Module, "etcd"}, {tool, tool.Module, "etcdutl"}}}), nil
	})
}

// addons makes the container images of kubeadm's addons: kube-proxy and
// CoreDNS.
func addons(ctx context.Context, out string, archs []string, log io.Writer) error {
	return fromModules(ctx, out, archs, log, func(cache *fetch.Cache, arch string) ([]controlImage, error) {
		k8s, err := fetch.KubernetesRecipe(lab.KubernetesVersion, arch, "kube-proxy")
		if err != nil {
			return nil, err
		}
		below, err := netfilter(ctx, cache, arch, log)
		if err != nil {
			return nil, err
		}
		dns := lab.CoreDNSRecipe(lab.CoreDNSVersion, arch)
		return []controlImage{
			{ref: "kube-proxy:" + lab.KubernetesVersion, parts: []part{{k8s, k8s.Packages[0], "kube-proxy"}}, below: below},
			{ref: "coredns/coredns:" + lab.CoreDNSVersion, parts: []part{{dns, dns.Module, "coredns"}}},
		}, nil
	})
}

// fromModules makes images of programs that it compiles from Go modules, under the names that
// kubeadm uses.
func fromModules(ctx context.Context, out string, archs []string, log io.Writer, of func(cache *fetch.Cache, arch string) ([]controlImage, error)) error {
	cache, err := lab.OpenCache()
	if err != nil {
		return err
	}
	return writeLayout(out, archs, log, func(arch string, add adder) error {
		images, err := of(cache, arch)
		if err != nil {
			return err
		}
		for _, im := range images {
			programs, err := im.compile(ctx, cache, log)
			if err != nil {
				return fmt.Errorf("making %s: %w", im.ref, err)
			}
			// Pods call programs by name, without a path.
			if err := add("registry.k8s.io/"+im.ref, "0:0", im.below, programs, []string{"PATH=/usr/local/bin:/usr/sbin"}); err != nil {
				return err
			}
		}
		return nil
	})
}

// controlImage is a container image of programs that Go compiles.
type controlImage struct {
	ref   string
	parts []part
	below []byte // a tar of other files, or nil
}

// part is one program that a recipe compiles.
type part struct {
	recipe    fetch.GoRecipe
	pkg, name string
}

func (im controlImage) compile(ctx context.Context, cache *fetch.Cache, log io.Writer) ([]program, error) {
	var out []program
	for _, p := range im.parts {
		blobs, err := fetch.GoBuild(ctx, cache, p.recipe, log) // compiles once per recipe
		if err != nil {
			return nil, err
		}
		binary, err := os.ReadFile(cache.BlobPath(blobs[p.pkg]))
		if err != nil {
			return nil, err
		}
		out = append(out, program{"usr/local/bin/" + p.name, binary})
	}
	return out, nil
}
