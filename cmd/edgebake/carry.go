package main

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/carry"
	"github.com/edgebake/edgebake/builder/signing"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/spf13/cobra"
)

// registryFlags declares the flags for access to a registry.
func registryFlags(c *cobra.Command, o *carry.Options) {
	f := c.Flags()
	f.BoolVar(&o.Insecure, "insecure", false, "allow plain HTTP, and a certificate that cannot be verified")
	cli.FileFlag(c, &o.AuthFile, "auth-file", "docker config.json with the login (default: the user's own)", "json")
}

// parseReference parses an image reference from the command line.
func parseReference(s string) (imageref.Ref, error) {
	for _, scheme := range []string{"oci://", "docker://", "https://", "http://"} {
		if rest, ok := strings.CutPrefix(s, scheme); ok {
			return imageref.Ref{}, cli.Usage(fmt.Errorf("reference %q: write it without %q: %s", s, scheme, rest))
		}
	}
	ref, err := imageref.Parse(s)
	if _, missing := os.Stat(s); missing == nil || isFilePath(s) {
		return ref, cli.Usage(fmt.Errorf("%q is the path of a file, not an image in a registry: name HOST/REPOSITORY:TAG, e.g. registry.example.com/edge/my-edge:2026.11", s))
	}
	if err != nil {
		return ref, cli.Usage(err)
	}
	return ref, nil
}

// isFilePath reports whether s looks like a file path. No image reference has these
// forms.
func isFilePath(s string) bool {
	return strings.HasPrefix(s, "/") || strings.HasPrefix(s, ".") || strings.HasPrefix(s, "~") ||
		!strings.Contains(path.Base(s), ":") && slices.Contains([]string{".raw", ".zst", ".tar", ".oci"}, path.Ext(s))
}

// unpinned returns a reference without its digest.
func unpinned(ref imageref.Ref) imageref.Ref {
	ref.Digest = ""
	return ref
}

// carrying sends the progress and warnings of a push or pull to the display show.
func carrying(o *carry.Options, show console.Display) {
	o.Progress = console.Steps(show)
	o.Warn = func(text string) {
		show.Event(builder.Event{Step: "registry", State: builder.StateWarning, Text: text})
	}
}

func newPush(s streams) *cobra.Command {
	var o carry.Options
	c := &cobra.Command{
		Use:               "push IMAGE REFERENCE",
		ValidArgsFunction: cli.CompleteFiles(cli.ImageExtensions),
		Short:             "Push a golden image to a container registry",
		Long: `Push sends a golden image to a registry as an OCI artifact: a few large parts,
and a config with its golden digest, signature and image.json. The image is
verified while it is sent, and gets its tag only when everything has arrived. Parts
that the registry already has are not sent, so the same command resumes after an
interruption.

A stamped image is rejected: its Site has a join token, which everybody who can
read the registry would get. A .raw image is compressed first, in $TMPDIR.`,
		Example: `  edgebake push my-edge.raw.zst registry.example.com/edge/my-edge:2026.11
  edgebake push my-edge.raw.zst registry.example.com/edge/my-edge:2026.11 --auth-file ci.json`,
		Args: cli.Args(2, 2, "an image and a reference, HOST/REPOSITORY:TAG"),
		RunE: func(c *cobra.Command, a []string) error {
			if err := imageFirst(c, a); err != nil {
				return err
			}
			ref, err := parseReference(a[1])
			if err != nil {
				return err
			}
			show := s.Display(false)
			carrying(&o, show)
			o.Insecure = o.Insecure || ref.OnLoopback()
			p, err := carry.Push(c.Context(), a[0], ref, o)
			show.Close()
			if err != nil {
				return err
			}
			had := ""
			if p.Had > 0 {
				had = fmt.Sprintf(", %d of them already in the registry", p.Had)
			}
			s.Note("pushed %s to %s@%s: %s in %s%s, golden %.16s\n", a[0], ref, p.Digest, bytesize.Human(p.Stored), configs.Count(p.Parts, "part"), had, p.Golden)
			return nil
		},
	}
	registryFlags(c, &o)
	return c
}

func newPull(s streams) *cobra.Command {
	var o carry.PullOptions
	var output string
	var keys []string
	c := &cobra.Command{
		Use:               "pull REFERENCE",
		ValidArgsFunction: cobra.NoFileCompletions,
		Short:             "Pull a golden image from a container registry",
		Long: `Pull downloads an image that push sent to a registry, and verifies it on the way:
every part against its digest, and the whole image against its golden digest. With
--key it downloads nothing unless the owner of that key has signed the image. An
image with a Site is rejected.

The file appears when everything is verified. Until then a hidden file beside it
(.NAME.partial) holds the parts that have arrived, and the same command resumes
there after an interruption.`,
		Example: `  edgebake pull registry.example.com/edge/my-edge:2026.11 --output my-edge.raw.zst --key office.pub
  edgebake pull registry.example.com/edge/my-edge:2026.11 --output my-edge.raw`,
		Args: cli.Args(1, 1, "a reference, HOST/REPOSITORY:TAG"),
		RunE: func(c *cobra.Command, a []string) error {
			ref, err := parseReference(a[0])
			if err != nil {
				return err
			}
			if output == "" {
				output = path.Base(ref.Path) + ".raw.zst"
			}
			if !isImageName(output) {
				return cli.Usage(fmt.Errorf("--output %s: the name must end in .raw.zst, or in .raw for an uncompressed image", output))
			}
			if o.Keys, err = signing.PublicKeys(keys); err != nil {
				return err
			}
			show := s.Display(false)
			carrying(&o.Options, show)
			o.Insecure = o.Insecure || ref.OnLoopback()
			p, err := carry.Pull(c.Context(), ref, output, o)
			show.Close()
			var left *carry.InterruptedError
			if errors.As(err, &left) {
				return unfinished{fmt.Errorf("interrupted; %w", left)}
			}
			if err != nil {
				return err
			}
			more := ""
			if p.Had > 0 {
				more = fmt.Sprintf(" (%s of it downloaded before)", bytesize.Human(p.Had))
			}
			by := ""
			if p.Key != "" {
				by = ", signed by key " + p.Key
			}
			s.Note("pulled %s@%s to %s: %s%s, verified, golden %.16s%s\n", unpinned(ref), p.Digest, output, bytesize.Human(p.Stored), more, p.Golden, by)
			return nil
		},
	}
	cli.FileFlag(c, &output, "output", "file to write, .raw.zst or .raw (default: the repository's name.raw.zst)", cli.ImageExtensions...)
	c.Flags().BoolVar(&o.Force, "force", false, "replace an existing file")
	keyFlag(c, &keys)
	registryFlags(c, &o.Options)
	return c
}
