package lab

import (
	"context"
	"fmt"
	"io"
	"path"
	"runtime"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/configs"
	"golang.org/x/mod/module"
)

// Versions of the control plane's programs.
const (
	KubernetesVersion = configs.ExampleKubernetes
	// KubernetesBeforeHub17 is the version for clusters of nodes that have yurthub before 1.7.
	KubernetesBeforeHub17 = "v1.30.3"
	EtcdVersion           = "v3.7.0"
	// EtcdImageTag is the tag of etcd's image that kubeadm of KubernetesVersion uses.
	EtcdImageTag = "3.7.0-0"
	// CoreDNSVersion is the version that kubeadm of KubernetesVersion installs.
	CoreDNSVersion = "v1.14.6"
)

// Release is a version of Kubernetes, the version of etcd that its kubeadm installs, and the tag of
// etcd's image.
type Release struct{ Kubernetes, Etcd, EtcdImageTag string }

// Releases returns the releases for which control planes are made from images. Other tests use the
// first one.
func Releases() []Release {
	return []Release{
		{KubernetesVersion, EtcdVersion, EtcdImageTag},
		{"v1.36.5", "v3.6.8", "3.6.8-0"},
	}
}

// FindRelease returns the release that has this version of Kubernetes.
func FindRelease(kubernetes string) (Release, error) {
	for _, r := range Releases() {
		if r.Kubernetes == kubernetes {
			return r, nil
		}
	}
	return Release{}, fmt.Errorf("the lab cannot make a control plane of Kubernetes %s, only of %v", kubernetes, Releases())
}

// Programs has the paths of the programs of a control plane.
type Programs struct {
	Version                                                         string // version of Kubernetes
	APIServer, ControllerManager, Scheduler, Kubectl, Kubeadm, Etcd string
}

// OpenCache opens the user's cache. It must stay open as long as programs run from it.
func OpenCache() (*fetch.Cache, error) {
	dir, err := fetch.DefaultDir()
	if err != nil {
		return nil, err
	}
	return fetch.Open(dir)
}

// CachedPrograms returns the programs of a control plane from the user's cache.
func CachedPrograms(ctx context.Context, version string, log io.Writer) (*Programs, error) {
	cache, err := OpenCache()
	if err != nil {
		return nil, err
	}
	return BuildPrograms(ctx, cache, version, log)
}

// BuildPrograms compiles the programs of a control plane of this version of Kubernetes from the Go
// module proxy, unless they are in the cache. The programs run from the cache.
func BuildPrograms(ctx context.Context, c *fetch.Cache, version string, log io.Writer) (*Programs, error) {
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
	for _, r := range []fetch.GoRecipe{k8s, EtcdRecipe(EtcdVersion, runtime.GOARCH)} {
		blobs, err := fetch.GoBuild(ctx, c, r, log)
		if err != nil {
			return nil, fmt.Errorf("making a control plane: %w", err)
		}
		for pkg, sha := range blobs {
			name := ProgramName(pkg)
			if *paths[name], err = c.Program(sha, name); err != nil {
				return nil, err
			}
		}
	}
	return &p, nil
}

// CachedEtcd returns the path of etcd in the user's cache.
func CachedEtcd(ctx context.Context, log io.Writer) (string, error) {
	return cachedProgram(ctx, EtcdRecipe(EtcdVersion, runtime.GOARCH), log)
}

// CachedKubeProxy returns the path of kube-proxy of this version of Kubernetes
// in the user's cache.
func CachedKubeProxy(ctx context.Context, version string, log io.Writer) (string, error) {
	r, err := fetch.KubernetesRecipe(version, runtime.GOARCH, "kube-proxy")
	if err != nil {
		return "", err
	}
	return cachedProgram(ctx, r, log)
}

// cachedProgram returns the path of the only program of a recipe, which it compiles if it is not
// cached.
func cachedProgram(ctx context.Context, r fetch.GoRecipe, log io.Writer) (string, error) {
	cache, err := OpenCache()
	if err != nil {
		return "", err
	}
	pkg := r.Packages[0]
	blobs, err := fetch.GoBuild(ctx, cache, r, log)
	if err != nil {
		return "", fmt.Errorf("building %s: %w", pkg, err)
	}
	return cache.Program(blobs[pkg], ProgramName(pkg))
}

// EtcdRecipe returns the recipe for compiling a version of etcd, such as "v3.7.0".
func EtcdRecipe(version, arch string) fetch.GoRecipe {
	const m = "go.etcd.io/etcd/server/v3"
	return fetch.GoRecipe{Module: m, Version: version, Arch: arch, LDFlags: "-s -w", Packages: []string{m}}
}

// EtcdutlRecipe returns the recipe for compiling etcdutl, etcd's tool for snapshots, which is also
// in etcd's image.
func EtcdutlRecipe(version, arch string) fetch.GoRecipe {
	const m = "go.etcd.io/etcd/etcdutl/v3"
	return fetch.GoRecipe{Module: m, Version: version, Arch: arch, LDFlags: "-s -w", Packages: []string{m}}
}

// CoreDNSRecipe returns the recipe for compiling a version of CoreDNS, such as "v1.14.6".
func CoreDNSRecipe(version, arch string) fetch.GoRecipe {
	const m = "github.com/coredns/coredns"
	return fetch.GoRecipe{Module: m, Version: version, Arch: arch, LDFlags: "-s -w", Packages: []string{m}}
}

// ProgramName returns the file name of the program that Go compiles from a main package.
func ProgramName(pkg string) string {
	prefix, _, ok := module.SplitPathVersion(pkg)
	if !ok {
		prefix = pkg
	}
	return path.Base(prefix)
}
