package lab

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	"github.com/edgebake/edgebake/builder/fetch"
)

// Versions of the control plane.
const (
	KubernetesVersion = "v1.36.3"
	// KubernetesBeforeHub17 is what nodes with yurthub before 1.7 belong to.
	KubernetesBeforeHub17 = "v1.30.3"
	EtcdVersion           = "v3.6.8"
)

// Programs are the paths of what a control plane runs.
type Programs struct {
	Version                                                         string // of Kubernetes
	APIServer, ControllerManager, Scheduler, Kubectl, Kubeadm, Etcd string
}

// BuildPrograms compiles a control plane of this version of Kubernetes from
// the Go module proxy, or takes it from the cache, and lays the programs into
// dir.
func BuildPrograms(ctx context.Context, c *fetch.Cache, version, dir string, log io.Writer) (*Programs, error) {
	p := Programs{Version: version}
	paths := map[string]*string{
		"kube-apiserver":          &p.APIServer,
		"kube-controller-manager": &p.ControllerManager,
		"kube-scheduler":          &p.Scheduler,
		"kubectl":                 &p.Kubectl,
		"kubeadm":                 &p.Kubeadm,
		"server":                  &p.Etcd,
	}
	k8s, err := fetch.KubernetesRecipe(version, runtime.GOARCH,
		"kubeadm", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
	if err != nil {
		return nil, err
	}
	for _, r := range []fetch.GoRecipe{k8s, fetch.EtcdRecipe(EtcdVersion, runtime.GOARCH)} {
		blobs, err := fetch.GoBuild(ctx, c, r, log)
		if err != nil {
			return nil, fmt.Errorf("making a control plane: %w", err)
		}
		for pkg, sha := range blobs {
			name := fetch.ProgramName(pkg)
			if *paths[name], err = install(c, sha, filepath.Join(dir, name)); err != nil {
				return nil, err
			}
		}
	}
	return &p, nil
}

// install copies a blob to path as a program. The name carries the digest:
// a file of that name is the program, whole.
func install(c *fetch.Cache, sha, path string) (string, error) {
	path += "-" + sha[:12]
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", fmt.Errorf("installing %s: %w", path, err)
	}
	in, err := c.OpenBlob(sha)
	if err != nil {
		return "", fmt.Errorf("installing %s: %w", path, err)
	}
	defer in.Close()
	tmp, err := os.CreateTemp(filepath.Dir(path), ".program-")
	if err != nil {
		return "", fmt.Errorf("installing %s: %w", path, err)
	}
	defer os.Remove(tmp.Name())
	if _, err := io.Copy(tmp, io.NewSectionReader(in, 0, 1<<62)); err != nil {
		tmp.Close()
		return "", fmt.Errorf("installing %s: %w", path, err)
	}
	if err := tmp.Chmod(0o755); err != nil {
		tmp.Close()
		return "", fmt.Errorf("installing %s: %w", path, err)
	}
	if err := tmp.Close(); err != nil {
		return "", fmt.Errorf("installing %s: %w", path, err)
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return "", fmt.Errorf("installing %s: %w", path, err)
	}
	return path, nil
}
