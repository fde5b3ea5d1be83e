package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/test/lab"
)

// controlPlane makes the container images that every control plane runs,
// under the names that kubeadm calls them by. kube-proxy and CoreDNS are not
// among them: kube-proxy needs programs that are not Go's.
func controlPlane(ctx context.Context, out string, archs []string, log io.Writer) error {
	dir, err := fetch.DefaultDir()
	if err != nil {
		return err
	}
	cache, err := fetch.Open(dir)
	if err != nil {
		return err
	}
	return writeLayout(out, archs, log, func(arch string, add adder) error {
		k8s, err := fetch.KubernetesRecipe(lab.KubernetesVersion, arch, "kube-apiserver", "kube-controller-manager", "kube-scheduler")
		if err != nil {
			return err
		}
		var images []controlImage
		for _, pkg := range k8s.Packages {
			name := lab.ProgramName(pkg)
			images = append(images, controlImage{name + ":" + lab.KubernetesVersion, []part{{k8s, pkg, name}}})
		}
		// As etcd's own: the one that serves first.
		server, tool := lab.EtcdRecipe(lab.EtcdVersion, arch), lab.EtcdutlRecipe(lab.EtcdVersion, arch)
		images = append(images, controlImage{"etcd:" + lab.EtcdImageTag, []part{{server, server.Module, "etcd"}, {tool, tool.Module, "etcdutl"}}})
		for _, im := range images {
			programs, err := im.compile(ctx, cache, log)
			if err != nil {
				return fmt.Errorf("making a control plane: %w", err)
			}
			// Their pods call them by name.
			if err := add("registry.k8s.io/"+im.ref, "0:0", programs, []string{"PATH=/usr/local/bin"}); err != nil {
				return err
			}
		}
		return nil
	})
}

// controlImage is an image of programs that Go compiles.
type controlImage struct {
	ref   string
	parts []part
}

// part is a program of a recipe.
type part struct {
	recipe    fetch.GoRecipe
	pkg, name string
}

func (im controlImage) compile(ctx context.Context, cache *fetch.Cache, log io.Writer) ([]program, error) {
	var out []program
	for _, p := range im.parts {
		blobs, err := fetch.GoBuild(ctx, cache, p.recipe, log) // once for each recipe
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
