package main

import (
	"fmt"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/spf13/cobra"
)

// listedImage is an image and what the table says of it.
type listedImage struct {
	images.Pinned
	Size   int64 `json:"size"` // as it is shipped
	Shared int64 `json:"shared"`
}

func newImages(s streams) *cobra.Command {
	var flags imageFlags
	var output string
	c := &cobra.Command{
		Use:               "images IMAGE",
		ValidArgsFunction: completeFiles(documentEndings),
		Short:             "List the container images that an Image bakes in",
		Long: `Images resolves the container images of an Image document: its own, those of
the manifests it names, and the ones its node types need. Registries are asked
for digests; no layer is fetched, so sizes are those of the layers as they are
shipped. SHARED is the part that other images of the list have too. What the
images take unpacked is in NAME.report.json, beside a built image.`,
		Example: `  edgebake images image.yaml
  edgebake images image.yaml --output json`,
		Args: args(1, 1, "one Image document"),
		RunE: func(c *cobra.Command, a []string) error {
			t, doc, err := flags.openOne(s, a[0])
			if err != nil {
				return err
			}
			defer t.Cache.Close()
			t.Events = func(e builder.Event) {
				if e.State == builder.StateWarning {
					fmt.Fprintf(s.Err, "WARNING: %s\n", e.Text)
				}
			}
			list, err := builder.Images(c.Context(), t.img, t.Options)
			if err != nil {
				return doc.explain(err)
			}
			sum := images.Summary(list)
			listed := []listedImage{}
			for n, p := range list {
				listed = append(listed, listedImage{p, sum.Images[n].Size, sum.Images[n].Shared})
			}
			return printAs(s, output, listed, func() { fmt.Fprint(s.Out, sum.Text("as they are shipped")) })
		},
	}
	flags.flags(c)
	outputFlag(c, &output)
	return c
}
