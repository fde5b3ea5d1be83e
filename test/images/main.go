// Command images makes the container images of the demo and the tests, each
// of one static program, and writes them to an OCI layout. The same source
// and Go release give the same digests.
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
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// images are programs, each with its place in its image and what that image
// is called.
var images = []struct {
	pkg, program, ref, user string
	env                     []string
}{
	{"images/pause", "pause", "edgebake.test/pause:1", "65535:65535", nil},
	{"images/hello", "hello", "edgebake.test/hello:1", "65534:65534", nil},
	// Where yurthub's own image has it, since its pod calls it by name.
	{"yurthub", "usr/local/bin/yurthub", "edgebake.test/yurthub:v1.6.1", "0:0", []string{"YURTHUB_STAND_IN=v1.6.1"}},
}

// sourceDate stamps everything in the images.
var sourceDate = time.Unix(1767225600, 0).UTC()

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	out := flag.String("o", filepath.Join("build", "images"), "folder of the OCI layout")
	arch := flag.String("arch", "amd64", "architecture: amd64 or arm64")
	control := flag.Bool("control-plane", false, "make the images of a control plane instead, from the Go module proxy")
	flag.Parse()
	make := run
	if *control {
		make = controlPlane
	}
	if err := make(ctx, *out, *arch, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out, arch string, log io.Writer) error {
	return writeLayout(out, arch, log, func(add func(ref, program, user string, binary []byte, env []string) error) error {
		for _, im := range images {
			program, err := compile(ctx, im.pkg, arch)
			if err != nil {
				return err
			}
			if err := add(im.ref, im.program, im.user, program, im.env); err != nil {
				return err
			}
		}
		return nil
	})
}

// writeLayout makes an OCI layout of the images that each adds.
func writeLayout(out, arch string, log io.Writer, each func(add func(ref, program, user string, binary []byte, env []string) error) error) error {
	// Made aside and moved into place: a reader never meets half a layout.
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
	err = each(func(ref, program, user string, binary []byte, env []string) error {
		img, err := image(program, user, arch, binary, env)
		if err != nil {
			return fmt.Errorf("making image %s: %w", ref, err)
		}
		digest, err := img.Digest()
		if err != nil {
			return fmt.Errorf("making image %s: %w", ref, err)
		}
		if err := oci.AppendImage(img, layout.WithAnnotations(map[string]string{
			"org.opencontainers.image.ref.name": ref,
			"io.containerd.image.name":          ref,
		}), layout.WithPlatform(v1.Platform{OS: "linux", Architecture: arch})); err != nil {
			return fmt.Errorf("making image %s: %w", ref, err)
		}
		fmt.Fprintf(log, "%s %s\n", ref, digest)
		return nil
	})
	if err != nil {
		return err
	}
	if err := os.RemoveAll(out); err != nil {
		return fmt.Errorf("replacing %s: %w", out, err)
	}
	return os.Rename(dir, out)
}

// compile builds one of the programs, static.
func compile(ctx context.Context, pkg, arch string) ([]byte, error) {
	dir, err := os.MkdirTemp("", "edgebake-images-")
	if err != nil {
		return nil, fmt.Errorf("compiling %s: %w", pkg, err)
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "program")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", file, "github.com/edgebake/edgebake/test/"+pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
	if said, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("compiling %s: %w\n%s", pkg, err, said)
	}
	return os.ReadFile(file)
}

// image wraps a program as the only file of an image.
func image(name, user, arch string, program []byte, env []string) (v1.Image, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	var err error
	for i, c := range name {
		if c == '/' {
			err = errors.Join(err, w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name[:i+1], Mode: 0o755, ModTime: sourceDate, Format: tar.FormatPAX}))
		}
	}
	err = errors.Join(err, w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(program)), ModTime: sourceDate, Format: tar.FormatPAX}))
	_, werr := w.Write(program)
	if err := errors.Join(err, werr, w.Close()); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(b.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err = mutate.Append(img, mutate.Addendum{Layer: layer, MediaType: types.OCILayer,
		History: v1.History{Created: v1.Time{Time: sourceDate}, CreatedBy: "test/images"}})
	if err != nil {
		return nil, err
	}
	cf, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture = "linux", arch
	cf.Created = v1.Time{Time: sourceDate}
	cf.Config = v1.Config{Entrypoint: []string{"/" + name}, User: user, Env: env}
	return mutate.ConfigFile(img, cf)
}
