package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/procgroup"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	// cacheDir is edgebake's cache in a container, for every user.
	cacheDir = "var/cache/edgebake"
	caBundle = "etc/ssl/certs/ca-certificates.crt"
)

// container writes the smaller container image, whose only programs are edgebake's, for all
// architectures. Commands that call other programs do not work in it.
func (p *packages) container() error {
	ca, err := os.ReadFile("/" + caBundle)
	if err != nil {
		return fmt.Errorf("%w: apt-get install ca-certificates", err)
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range p.arch {
		layer, err := p.layer(arch, func(w *layerWriter) {
			w.dir("etc", 0o755)
			w.dir("etc/ssl", 0o755)
			w.dir("etc/ssl/certs", 0o755)
			w.file(caBundle, 0o644, ca)
			w.dir("tmp", 0o1777)
		})
		if err != nil {
			return err
		}
		img, err := p.image(arch, layer)
		if err != nil {
			return err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
	}
	version := debianVersion(p.version, p.date)
	return p.archive(fmt.Sprintf("edgebake_%s.oci.tar", version), func(oci layout.Path) error {
		return oci.AppendIndex(index, layout.WithAnnotations(names("edgebake", version)))
	})
}

// debianPackages lists the packages that edgebake needs for Debian bases and for ISOs. arch-test
// checks that the container's host has an emulator registered for another architecture.
var debianPackages = []string{"arch-test", "ca-certificates", "debian-archive-keyring", "mmdebstrap", "xorriso"}

// debianContainer writes the container image with edgebake on Debian. It supports only this
// computer's architecture, since mmdebstrap runs programs of the new Debian.
func (p *packages) debianContainer(ctx context.Context) error {
	arch := runtime.GOARCH
	if !slices.Contains(p.arch, arch) {
		return fmt.Errorf("the debian container is made for the architecture of this computer only: add --arch %s, or leave debian out of --only", arch)
	}
	base := filepath.Join(p.stage, "debian.tar.gz")
	if err := p.debian(ctx, arch, base); err != nil {
		return err
	}
	below, err := tarball.LayerFromFile(base, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return err
	}
	above, err := p.layer(arch, func(*layerWriter) {})
	if err != nil {
		return err
	}
	img, err := p.image(arch, below, above)
	if err != nil {
		return err
	}
	version := debianVersion(p.version, p.date)
	return p.archive(fmt.Sprintf("edgebake-debian_%s_%s.oci.tar", version, arch), func(oci layout.Path) error {
		return oci.AppendImage(img, layout.WithAnnotations(names("edgebake-debian", version)), layout.WithPlatform(v1.Platform{OS: "linux", Architecture: arch}))
	})
}

// names returns annotations with the image's name, for tools that load an archive.
func names(name, version string) map[string]string {
	ref := "localhost/" + name + ":" + strings.NewReplacer("~", "-", "+", "-").Replace(version)
	return map[string]string{"org.opencontainers.image.ref.name": ref, "io.containerd.image.name": ref}
}

// debian writes a small Debian with the packages that edgebake needs. mmdebstrap makes it, as it
// makes a base.
func (p *packages) debian(ctx context.Context, arch, out string) error {
	mode := "unshare"
	if os.Geteuid() == 0 {
		mode = "root"
	}
	fmt.Fprintf(p.log, "making Debian %s for the container, about a minute\n", p.suite)
	args := []string{"--mode=" + mode, "--variant=minbase", "--format=tar", "--architectures=" + arch,
		"--include=" + strings.Join(debianPackages, ","), `--aptopt=APT::Install-Recommends "false"`,
		"--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*",
		"--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-include=/usr/share/doc/*/copyright",
		"--dpkgopt=force-unsafe-io", p.suite, "-"}
	cmd := procgroup.Command(ctx, "mmdebstrap", append(args, p.sources...)...)
	cmd.Dir = "/"
	cmd.Env = append(cmd.Env, "SOURCE_DATE_EPOCH="+strconv.FormatInt(p.date.Unix(), 10), "LC_ALL=C.UTF-8", "TZ=UTC")
	var log bytes.Buffer
	cmd.Stderr = &log
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	defer f.Close()
	w := gzip.NewWriter(f)
	cmd.Stdout = w
	if err := procgroup.Run(cmd, 30*time.Second); err != nil {
		return fmt.Errorf("mmdebstrap: %w\n%s", err, log.Bytes())
	}
	return errors.Join(w.Close(), f.Close())
}

// image returns an image of these layers.
func (p *packages) image(arch string, layers ...v1.Layer) (v1.Image, error) {
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.AppendLayers(base, layers...)
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", arch
	config.Created = v1.Time{Time: p.date}
	config.Config = v1.Config{
		Entrypoint: []string{"edgebake"},
		Env: []string{
			"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			"EDGEBAKE_CACHE=/" + cacheDir,
		},
		Labels: map[string]string{
			"org.opencontainers.image.title":    "edgebake",
			"org.opencontainers.image.version":  p.version,
			"org.opencontainers.image.licenses": "Apache-2.0",
			"org.opencontainers.image.source":   "https://github.com/edgebake/edgebake",
		},
	}
	return mutate.ConfigFile(img, config)
}

// layer returns a layer with edgebake, its programs, and the files that the function more adds.
func (p *packages) layer(arch string, more func(*layerWriter)) (v1.Layer, error) {
	var b bytes.Buffer
	w := &layerWriter{p: p, w: tar.NewWriter(&b)}
	more(w)
	for _, dir := range []string{"usr", "usr/bin", "usr/lib", "usr/lib/edgebake", "var", "var/cache"} {
		w.dir(dir, 0o755)
	}
	w.dir(cacheDir, 0o1777)
	root := os.DirFS(filepath.Join(p.stage, arch))
	for _, dir := range programDirs {
		files, err := fs.ReadDir(root, dir)
		w.err = errors.Join(w.err, err)
		for _, f := range files {
			data, err := fs.ReadFile(root, dir+"/"+f.Name())
			w.err = errors.Join(w.err, err)
			w.file(dir+"/"+f.Name(), 0o755, data)
		}
	}
	if err := errors.Join(w.err, w.w.Close()); err != nil {
		return nil, fmt.Errorf("packing a layer: %w", err)
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil }, tarball.WithMediaType(types.OCILayer))
}

// layerWriter writes a tar archive and keeps the first error.
type layerWriter struct {
	p   *packages
	w   *tar.Writer
	err error
}

func (l *layerWriter) dir(name string, mode int64) {
	l.add(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode}, nil)
}

func (l *layerWriter) file(name string, mode int64, data []byte) {
	l.add(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(data))}, data)
}

func (l *layerWriter) add(h *tar.Header, data []byte) {
	if l.err != nil {
		return
	}
	h.ModTime, h.Format = l.p.date, tar.FormatPAX
	if l.err = l.w.WriteHeader(h); l.err == nil {
		_, l.err = l.w.Write(data)
	}
}

// archive writes an OCI layout as one file for docker load, podman load, ctr images import and
// skopeo.
func (p *packages) archive(name string, fill func(layout.Path) error) error {
	dir := filepath.Join(p.stage, name)
	oci, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := fill(oci); err != nil {
		return err
	}
	out := filepath.Join(p.out, name)
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	defer f.Close()
	w := &layerWriter{p: p, w: tar.NewWriter(f)}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			w.dir(rel, 0o755)
			return w.err
		}
		data, err := os.ReadFile(path)
		w.file(rel, 0o644, data)
		return errors.Join(err, w.err)
	})
	if err := errors.Join(err, w.w.Close(), f.Close()); err != nil {
		return err
	}
	return p.made(out)
}
