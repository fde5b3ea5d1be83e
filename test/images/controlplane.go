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
func controlPlane(ctx context.Context, out, arch string, log io.Writer) error {
	dir, err := fetch.DefaultDir()
	if err != nil {
		return err
	}
	cache, err := fetch.Open(dir)
	if err != nil {
		return err
	}
	k8s, err := fetch.KubernetesRecipe(lab.KubernetesVersion, arch, "kube-apiserver", "kube-controller-manager", "kube-scheduler")
	if err != nil {
		return err
	}
	return writeLayout(out, arch, log, func(add func(ref, program, user string, binary []byte, env []string) error) error {
		for _, r := range []fetch.GoRecipe{k8s, lab.EtcdRecipe(lab.EtcdVersion, arch)} {
			blobs, err := fetch.GoBuild(ctx, cache, r, log)
			if err != nil {
				return fmt.Errorf("making a control plane: %w", err)
			}
			for _, pkg := range r.Packages {
				name, tag := lab.ProgramName(pkg), lab.KubernetesVersion
				if r.Module != k8s.Module {
					name, tag = "etcd", lab.EtcdImageTag
				}
				binary, err := os.ReadFile(cache.BlobPath(blobs[pkg]))
				if err != nil {
					return fmt.Errorf("making a control plane: %w", err)
				}
				// Their pods call them by name.
				if err := add("registry.k8s.io/"+name+":"+tag, "usr/local/bin/"+name, "0:0", binary, []string{"PATH=/usr/local/bin"}); err != nil {
					return err
				}
			}
		}
		return nil
	})
}
