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

// Versions of the control plane.
const (
	KubernetesVersion = configs.ExampleKubernetes
	// KubernetesBeforeHub17 is what nodes with yurthub before 1.7 belong to.
	KubernetesBeforeHub17 = "v1.30.3"
	EtcdVersion           = "v3.7.0"
	// EtcdImageTag is the tag by which kubeadm of KubernetesVersion asks for it.
	EtcdImageTag = "3.7.0-0"
	// CoreDNSVersion is the one that it asks for.
	CoreDNSVersion = "v1.14.6"
)

// Release is a version of Kubernetes, and the etcd that its kubeadm asks for, by that
// image tag.
type Release struct{ Kubernetes, Etcd, EtcdImageTag string }

// Releases are those of which control planes are made from images; the first is the
// one of all other tests.
func Releases() []Release {
	return []Release{
		{KubernetesVersion, EtcdVersion, EtcdImageTag},
		{"v1.36.5", "v3.6.8", "3.6.8-0"},
	}
}

// FindRelease is the release of a version of Kubernetes.
func FindRelease(kubernetes string) (Release, error) {
	for _, r := range Releases() {
		if r.Kubernetes == kubernetes {
			return r, nil
		}
	}
	return Release{}, fmt.Errorf("the lab makes no control plane of Kubernetes %s: it knows %v", kubernetes, Releases())
}

// Programs are the paths of what a control plane runs.
type Programs struct {
	Version                                                         string // of Kubernetes
	APIServer, ControllerManager, Scheduler, Kubectl, Kubeadm, Etcd string
}

// OpenCache opens the user's cache. It stays open: programs run from there.
func OpenCache() (*fetch.Cache, error) {
	dir, err := fetch.DefaultDir()
	if err != nil {
		return nil, err
	}
	return fetch.Open(dir)
}

// CachedPrograms are those of a control plane, from the user's cache.
func CachedPrograms(ctx context.Context, version string, log io.Writer) (*Programs, error) {
	cache, err := OpenCache()
	if err != nil {
		return nil, err
	}
	return BuildPrograms(ctx, cache, version, log)
}

// BuildPrograms compiles a control plane of this version of Kubernetes from
// the Go module proxy, or takes it from the cache, where the programs are laid
// down.
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

// CachedEtcd is the program of etcd alone, from the user's cache.
func CachedEtcd(ctx context.Context, log io.Writer) (string, error) {
	return cachedProgram(ctx, EtcdRecipe(EtcdVersion, runtime.GOARCH), log)
}

// CachedKubeProxy is kube-proxy of this version of Kubernetes, from the user's cache.
func CachedKubeProxy(ctx context.Context, version string, log io.Writer) (string, error) {
	r, err := fetch.KubernetesRecipe(version, runtime.GOARCH, "kube-proxy")
	if err != nil {
		return "", err
	}
	return cachedProgram(ctx, r, log)
}

// cachedProgram compiles a recipe's one program, or takes it from the user's cache.
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

// EtcdRecipe compiles etcd (such as "v3.7.0"), for control planes.
func EtcdRecipe(version, arch string) fetch.GoRecipe {
	const m = "go.etcd.io/etcd/server/v3"
	return fetch.GoRecipe{Module: m, Version: version, Arch: arch, LDFlags: "-s -w", Packages: []string{m}}
}

// EtcdutlRecipe compiles etcd's own tool for snapshots, which the image of etcd
// has too.
func EtcdutlRecipe(version, arch string) fetch.GoRecipe {
	const m = "go.etcd.io/etcd/etcdutl/v3"
	return fetch.GoRecipe{Module: m, Version: version, Arch: arch, LDFlags: "-s -w", Packages: []string{m}}
}

// CoreDNSRecipe compiles CoreDNS (such as "v1.14.6").
func CoreDNSRecipe(version, arch string) fetch.GoRecipe {
	const m = "github.com/coredns/coredns"
	return fetch.GoRecipe{Module: m, Version: version, Arch: arch, LDFlags: "-s -w", Packages: []string{m}}
}

// ProgramName is the file name that the program of a main package goes by.
func ProgramName(pkg string) string {
	prefix, _, ok := module.SplitPathVersion(pkg)
	if !ok {
		prefix = pkg
	}
	return path.Base(prefix)
}
