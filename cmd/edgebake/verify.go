package main

import (
	"errors"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/signing"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/spf13/cobra"
)

func newVerify(s streams) *cobra.Command {
	var names []string
	var quick bool
	c := &cobra.Command{
		Use:               "verify IMAGE",
		ValidArgsFunction: cli.CompleteFiles(cli.ImageExtensions),
		Short:             "Check that an image is undamaged, and who signed it",
		Long: `Verify reads an image, or a flashed disk that has not booted yet, and compares
everything except the slot with the golden digest. With --key it also checks that
the owner of that key signed the golden digest and image.json (build --sign). The
Site in the slot is not covered by either.

Without --key it detects damage, but not manipulation: the digest is in the image.`,
		Example: `  edgebake verify my-edge.raw.zst
  edgebake verify my-edge.raw.zst --key office.pub`,
		Args: cli.Args(1, 1, "one image"),
		RunE: func(c *cobra.Command, a []string) error {
			keys, err := signing.PublicKeys(names)
			if err != nil {
				return err
			}
			if quick && len(keys) == 0 {
				return cli.Usage(errors.New("--signature-only requires a key: --key PUB"))
			}
			// Open the file only once, so that it cannot be replaced between the check of its
			// signature and the read.
			image, err := media.Open(a[0])
			if err != nil {
				return err
			}
			defer image.Close()
			by := ""
			if len(keys) > 0 {
				if by, err = image.VerifySignature(keys); err != nil {
					return err
				}
				by = ", signed by key " + by
			}
			if quick {
				s.Note("%s: contents not verified%s\n", a[0], by)
				return nil
			}
			show := s.Display(false)
			progress := console.Steps(show)
			err = image.Verify(c.Context(), func(done, total int64) { progress("verify", done, total) }, nil)
			show.Close()
			if err != nil {
				return err
			}
			s.Note("%s: verified%s\n", a[0], by)
			return nil
		},
	}
	keyFlag(c, &names)
	c.Flags().BoolVar(&quick, "signature-only", false, "do not read the image, only check the signature")
	return c
}
