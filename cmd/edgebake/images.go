package main

import (
	"fmt"

	"github.com/edgebake/edgebake/builder"
	"github.com/spf13/cobra"
)

func newImages(s streams) *cobra.Command {
	var src source
	var output string
	c := &cobra.Command{
		Use:   "images IMAGE",
		Short: "List the container images an Image takes on board",
		Long: `Images resolves the container images of an Image document: its own, those of
the manifests it names, and the ones its node types need. Registries are asked
for digests; no layer is fetched.`,
		Example: `  edgebake images image.yaml
  edgebake images image.yaml --output json`,
		Args: args(1, 1, "one Image document"),
		RunE: func(c *cobra.Command, a []string) error {
			img, o, err := src.open(s, a[0])
			if err != nil {
				return err
			}
			defer o.Cache.Close()
			list, err := builder.Images(c.Context(), img, o)
			if err != nil {
				return err
			}
			return printAs(s, output, list, func() {
				for _, p := range list {
					var size int64
					for _, l := range p.Layers {
						size += l.Size
					}
					fmt.Fprintf(s.Out, "%s  %s  %d layers, %s to fetch\n", p.Ref, p.Manifest.Digest, len(p.Layers), humanSize(size))
				}
			})
		},
	}
	src.flags(c)
	outputFlag(c, &output)
	return c
}
