// Command images makes the container images of the demo and the tests, and writes them to an OCI
// layout. The images have static programs; kube-proxy's also has programs from Debian. The same
// source and Go release give the same digests.
package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/edgebake/edgebake/test/lab"
)

// images lists programs, their paths in their images, and the names of the images.
var images = []struct {
	pkg, program, ref, user string
	env                     []string
}{
	{"images/pause", "pause", "edgebake.test/pause:1", "65535:65535", nil},
	{"images/hello", "hello", "edgebake.test/hello:1", "65534:65534", nil},
	// The path must be as in yurthub's own image, because the pod starts the program by this name.
	{"yurthub", "usr/local/bin/yurthub", "edgebake.test/yurthub:v1.6.1", "0:0", []string{"YURTHUB_STAND_IN=v1.6.1"}},
}

// sourceDate is the time of all files in the images.
var sourceDate = time.Unix(1767225600, 0).UTC()

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	out := flag.String("o", filepath.Join("build", "images"), "directory of the OCI layout")
	archs := flag.String("arch", "amd64", "architectures, separated by commas: amd64, arm64")
	control := flag.Bool("control-plane", false, "make the images of a control plane instead, from the Go module proxy")
	added := flag.Bool("addons", false, "make the images of kube-proxy and CoreDNS instead, from the Go module proxy and from Debian")
	kubernetes := flag.String("kubernetes", lab.KubernetesVersion, "the version of the control plane")
	flag.Parse()
	make := run
	switch {
	case *control:
		make = func(ctx context.Context, out string, archs []string, log io.Writer) error {
			release, err := lab.FindRelease(*kubernetes)
			if err != nil {
				return err
			}
			return controlPlane(ctx, release, out, archs, log)
		}
	case *added:
		make = addons
	}
	if err := make(ctx, *out, strings.Split(*archs, ","), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

// program is a static program and its path in an image.
type program struct {
	path   string
	binary []byte
}

// adder adds an image that starts the first of its programs. below is a tar of other files, or nil.
type adder func(ref, user string, below []byte, programs []program, env []string) error

func run(ctx context.Context, out string, archs []string, log io.Writer) error {
	return writeLayout(out, archs, log, func(arch string, add adder) error {
		for _, im := range images {
			binary, err := compile(ctx, im.pkg, arch)
			if err != nil {
				return err
			}
			if err := add(im.ref, im.user, nil, []program{{im.program, binary}}, im.env); err != nil {
				return err
			}
		}
		return nil
	})
}

// writeLayout calls each once per architecture, and writes the images that it adds as an OCI
// layout. If there are several architectures, the name of an image refers to an index.
func writeLayout(out string, archs []string, log io.Writer, each func(arch string, add adder) error) error {
	// Write to another directory and rename it, so that no reader sees an incomplete layout.
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return fmt.Errorf("making %s: %w", out, err)
	}
	dir, err := os.MkdirTemp(filepath.Dir(out), ".images-")
	if err != nil {
		return fmt.Errorf("making %s: %w", out, err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		return fmt.Errorf("making %s: %w", out, err)
	}
	oci, err := layout.Write(dir, empty.Index)
	if err != nil {
		return fmt.Errorf("making %s: %w", out, err)
	}
	var refs []string // in the order of the first architecture
	made := map[string][]mutate.IndexAddendum{}
	for _, arch := range archs {
		err := each(arch, func(ref, user string, below []byte, programs []program, env []string) error {
			img, err := image(user, arch, below, programs, env)
			if err != nil {
				return fmt.Errorf("making image %s: %w", ref, err)
			}
			digest, err := img.Digest()
			if err != nil {
				return fmt.Errorf("making image %s: %w", ref, err)
			}
			fmt.Fprintf(log, "%s %s %s\n", ref, arch, digest)
			if made[ref] == nil {
				refs = append(refs, ref)
			}
			made[ref] = append(made[ref], mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
			return nil
		})
		if err != nil {
			return err
		}
	}
	for _, ref := range refs {
		if err := appendRef(oci, ref, made[ref]); err != nil {
			return fmt.Errorf("making image %s: %w", ref, err)
		}
	}
	if err := os.RemoveAll(out); err != nil {
		return fmt.Errorf("replacing %s: %w", out, err)
	}
	return os.Rename(dir, out)
}

// appendRef adds an image to a layout under a name.
func appendRef(oci layout.Path, ref string, made []mutate.IndexAddendum) error {
	names := layout.WithAnnotations(map[string]string{
		"org.opencontainers.image.ref.name": ref,
		"io.containerd.image.name":          ref,
	})
	if img, ok := made[0].Add.(v1.Image); ok && len(made) == 1 {
		return oci.AppendImage(img, names, layout.WithPlatform(*made[0].Platform))
	}
	return oci.AppendIndex(mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), made...), names)
}

// compile builds one of the programs statically.
func compile(ctx context.Context, pkg, arch string) ([]byte, error) {
	dir, err := os.MkdirTemp("", "edgebake-images-")
	if err != nil {
		return nil, fmt.Errorf("compiling %s: %w", pkg, err)
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "program")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", file, "github.com/edgebake/edgebake/test/"+pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
	if output, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compiling %s: %w\n%s", pkg, err, output)
	}
	return os.ReadFile(file)
}

// image returns an image with the programs and the files of below.
func image(user, arch string, below []byte, programs []program, env []string) (v1.Image, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	var err error
	made := map[string]bool{}
	for _, p := range programs {
		for i, c := range p.path {
			if dir := p.path[:i+1]; c == '/' && !made[dir] {
				made[dir] = true
				err = errors.Join(err, w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755, ModTime: sourceDate, Format: tar.FormatPAX}))
			}
		}
		err = errors.Join(err, w.WriteHeader(&tar.Header{Name: p.path, Mode: 0o755, Size: int64(len(p.binary)), ModTime: sourceDate, Format: tar.FormatPAX}))
		_, werr := w.Write(p.binary)
		err = errors.Join(err, werr)
	}
	if err := errors.Join(err, w.Close()); err != nil {
		return nil, err
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, files := range [][]byte{below, b.Bytes()} {
		if files == nil {
			continue
		}
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(files)), nil
		}, tarball.WithMediaType(types.OCILayer))
		if err != nil {
			return nil, err
		}
		img, err = mutate.Append(img, mutate.Addendum{Layer: layer, MediaType: types.OCILayer,
			History: v1.History{Created: v1.Time{Time: sourceDate}, CreatedBy: "test/images"}})
		if err != nil {
			return nil, err
		}
	}
	cf, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture = "linux", arch
	cf.Created = v1.Time{Time: sourceDate}
	cf.Config = v1.Config{Entrypoint: []string{"/" + programs[0].path}, User: user, Env: env}
	return mutate.ConfigFile(img, cf)
}
