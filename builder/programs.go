package builder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// programSet is a group of programs from one source.
type programSet struct {
	field   string // field of the Image, for messages
	source  configs.Source
	version string // required version
	// programs lists the programs' names and their paths on the node.
	programs []program
	// recipe returns the recipe that compiles the programs.
	recipe func() (fetch.GoRecipe, error)
	// dir is the directory of the release on the server. archive is the tar in dir that contains
	// all programs, or "" if each program is a file in dir.
	dir, archive string
	// inArchive is the directory of the programs inside the archive.
	inArchive string
}

type program struct{ name, path string }

// sidecars lists the extensions of the files in which release servers publish a digest.
var sidecars = []string{".sha256", ".sha256sum"}

// programSets returns the program sets of an Image.
func programSets(img *configs.Image) []programSet {
	arch := img.Arch
	k8s := programSet{
		field: "kubernetes.source", source: img.Kubernetes.Source, version: img.Kubernetes.Version,
		programs: []program{{"kubelet", "usr/bin/kubelet"}, {"kubeadm", "usr/bin/kubeadm"}},
		dir:      path.Join(img.Kubernetes.Version, "bin/linux", arch),
	}
	if img.Kubernetes.Kubectl {
		k8s.programs = append(k8s.programs, program{"kubectl", "usr/bin/kubectl"})
	}
	k8s.recipe = func() (fetch.GoRecipe, error) {
		var names []string
		for _, p := range k8s.programs {
			names = append(names, p.name)
		}
		return fetch.KubernetesRecipe(img.Kubernetes.Version, arch, names...)
	}
	sets := []programSet{k8s}
	if v := strings.TrimPrefix(img.Containerd.Version, "v"); !img.Containerd.Debian {
		sets = append(sets, programSet{
			field: "containerd.source", source: img.Containerd.Source, version: img.Containerd.Version,
			programs: []program{
				{"containerd", "usr/bin/containerd"},
				{"containerd-shim-runc-v2", "usr/bin/containerd-shim-runc-v2"},
				{"ctr", "usr/bin/ctr"},
			},
			recipe:    func() (fetch.GoRecipe, error) { return fetch.ContainerdRecipe(v, arch) },
			dir:       "v" + v,
			archive:   fmt.Sprintf("containerd-%s-linux-%s.tar.gz", v, arch),
			inArchive: "bin",
		})
	}
	if c := img.Containerd.Crictl; c != nil {
		v := "v" + strings.TrimPrefix(c.Version, "v")
		sets = append(sets, programSet{
			field: "containerd.crictl.source", source: c.Source, version: c.Version,
			programs: []program{{"crictl", "usr/bin/crictl"}},
			recipe:   func() (fetch.GoRecipe, error) { return crictlRecipe(v, arch), nil },
			dir:      v,
			archive:  fmt.Sprintf("crictl-%s-linux-%s.tar.gz", v, arch),
		})
	}
	return sets
}

func (b *resolver) resolvePrograms(ctx context.Context) error {
	var errs []error
	for _, s := range programSets(b.img) {
		if err := b.resolveSet(ctx, s); err != nil {
			errs = append(errs, fieldError(s.field, err))
		}
	}
	if y := b.img.Yurthub; y != nil && y.Binary != nil {
		errs = append(errs, b.fileSource(ctx, inputYurthub, "yurthub.binary", *y.Binary, &plan.Layer{Path: yurthubPath, Mode: tree.ModeRegular | 0o755}))
	}
	return errors.Join(errs...)
}

func crictlRecipe(version, arch string) fetch.GoRecipe {
	const m = "sigs.k8s.io/cri-tools"
	return fetch.GoRecipe{Module: m, Version: version, Packages: []string{m + "/cmd/crictl"}, Arch: arch,
		LDFlags: "-s -w -X " + m + "/pkg/version.Version=" + version}
}

func (b *resolver) resolveSet(ctx context.Context, s programSet) error {
	switch {
	case s.source.GoModule != nil:
		return b.resolveGo(s)
	case s.source.URL != nil:
		return b.resolveURL(ctx, s)
	case s.source.File != nil:
		return b.resolveDir(ctx, s)
	}
	return errors.New("choose one of goModule, url and file")
}

func (b *resolver) resolveGo(s programSet) error {
	r, err := s.recipe()
	if err != nil {
		return err
	}
	for i, p := range s.programs {
		one := r
		one.Packages = r.Packages[i : i+1]
		if err := b.addGo(s.field, p, one); err != nil {
			return err
		}
	}
	return nil
}

// addGo adds a program that is compiled from the module proxy.
func (b *resolver) addGo(field string, p program, r fetch.GoRecipe) error {
	raw, err := canonical(r)
	if err != nil {
		return err
	}
	b.add(origin{field: field}, p.name, plan.Input{Make: makeGo, Recipe: raw}, p.layer())
	return nil
}

func (p program) layer() *plan.Layer {
	return &plan.Layer{Path: p.path, Mode: tree.ModeRegular | 0o755}
}

func (b *resolver) resolveURL(ctx context.Context, s programSet) error {
	base := strings.TrimRight(s.source.URL.Base, "/") + "/" + s.dir
	if s.archive != "" {
		members := map[string]string{}
		for _, p := range s.programs {
			members[path.Join(s.inArchive, p.name)] = p.path
		}
		return b.resolveRelease(ctx, s.field, s.programs[0].name, base+"/"+s.archive, *s.source.URL, &plan.Layer{Members: members})
	}
	var errs []error
	for _, p := range s.programs {
		errs = append(errs, b.resolveRelease(ctx, s.field, p.name, base+"/"+p.name, *s.source.URL, p.layer()))
	}
	return errors.Join(errs...)
}

// resolveRelease pins a file of a release server. The digest comes from the Image, else from the
// lock, else from the server.
func (b *resolver) resolveRelease(ctx context.Context, field, name, url string, src configs.URLSource, layer *plan.Layer) error {
	in := plan.Input{Fetch: []string{url}, SHA256: src.Sum(b.img.Arch, path.Base(url))}
	if _, locked := b.Lock.Pinned(name, in); in.SHA256 == "" && !locked {
		switch {
		case b.Locked:
			return fmt.Errorf("%s is not in the lock", fetch.Redact(url))
		case !src.SHA256FromServer:
			return fmt.Errorf("no digest is known for %s: set it in sha256 (%s: <hex>), or set sha256FromServer: true", fetch.Redact(url), path.Base(url))
		}
		sha, err := b.publishedDigest(ctx, url)
		if err != nil {
			return err
		}
		in.SHA256 = sha
	}
	b.add(origin{field: field}, name, in, layer)
	return nil
}

var hexDigest = regexp.MustCompile(`^[0-9a-f]{64}$`)

func (b *buildEnv) publishedDigest(ctx context.Context, url string) (string, error) {
	var errs []error
	for _, ext := range sidecars {
		sha, err := fetch.Head(ctx, b.Cache, url+ext, maxSidecar)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("reading the published digest: %w", err) // the next sidecar would fail too
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		f, err := b.Cache.OpenBlob(sha)
		if err != nil {
			return "", err
		}
		head := make([]byte, maxSidecar)
		n, _ := f.ReadAt(head, 0)
		f.Close()
		if fields := strings.Fields(string(head[:n])); len(fields) > 0 && hexDigest.MatchString(fields[0]) {
			return fields[0], nil
		}
		errs = append(errs, fmt.Errorf("%s%s contains no SHA-256", fetch.Redact(url), ext))
	}
	return "", fmt.Errorf("the server publishes no digest of %s: check the version, or set the digest in sha256 (%s: <hex>)\n%w", fetch.Redact(url), path.Base(url), errors.Join(errs...))
}

func (b *resolver) resolveDir(ctx context.Context, s programSet) error {
	var errs []error
	for _, p := range s.programs {
		dir := s.source.File.Dir
		file := filepath.Join(dir, p.name)
		if _, err := os.Stat(b.path(file)); errors.Is(err, fs.ErrNotExist) {
			if in := filepath.Join(dir, "bin", p.name); fileExists(b.path(in)) {
				file = in
			}
		}
		sha, err := b.importNamed(ctx, file, s.source.File.Sum(b.img.Arch, p.name))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		b.add(origin{field: s.field}, p.name, plan.Input{File: file, SHA256: sha}, p.layer())
		err = b.checkFile(sha, p.path, file)
		if err == nil {
			err = b.checkVersion(sha, file, strings.TrimSuffix(s.field, ".source")+".version", s.version)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func fileExists(p string) bool {
	fi, err := os.Stat(p)
	return err == nil && fi.Mode().IsRegular()
}

// goModuleOf returns the module and version that an input is compiled from, or "".
func goModuleOf(in plan.Input) (mod, version string) {
	var r fetch.GoRecipe
	if in.Make != "go" || json.Unmarshal(in.Recipe, &r) != nil {
		return "", ""
	}
	return r.Module, r.Version
}
