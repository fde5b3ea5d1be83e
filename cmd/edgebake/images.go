package main

import (
	"fmt"
	"io"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/spf13/cobra"
)

// listedImage is a container image that will be baked.
type listedImage struct {
	images.Pinned
	Size   int64 `json:"size"`   // bytes of the compressed layers
	Shared int64 `json:"shared"` // bytes of the layers that other listed images also have
}

// mentionedImage is a container image that is named in a manifest, but not run by any of its pods.
type mentionedImage struct {
	Ref      imageref.Ref `json:"ref"`
	Where    string       `json:"where"`
	NotBaked bool         `json:"notBaked"`
}

// printMentions prints the images that are mentioned in the manifests of imagesFrom but are not
// baked, and the objects that were not searched for images.
func printMentions(w io.Writer, l images.Listing) {
	if len(l.Mentions) > 0 {
		fmt.Fprintln(w, "\nFound in manifests, not baked (add them to images, or to imagesIgnore):")
		var rows [][]string
		for _, m := range l.Mentions {
			rows = append(rows, []string{"  " + m.Ref.String(), m.Where})
		}
		console.Table(w, rows...)
	}
	if len(l.PassedOver) > 0 {
		fmt.Fprintln(w, "\nNot searched, since they have no pod template (their operators may start other images):")
		for _, p := range l.PassedOver {
			fmt.Fprintf(w, "  %s\n", p)
		}
	}
}

func newImages(s streams) *cobra.Command {
	var flags imageFlags
	var output console.Form
	c := &cobra.Command{
		Use:               "images [IMAGE]",
		ValidArgsFunction: cli.CompleteFiles(documents.Extensions),
		Short:             "List the container images that an Image bakes in",
		Long: `Images resolves the container images of an Image document: its own, those of
the manifests it names, and those that its node types need. It asks registries for
digests and fetches no layer, so the sizes are those of compressed layers. SHARED
is the part of an image that other images in the list also have. NAME.report.json
beside a built image has the unpacked sizes.

Images that manifests mention, but that no pod in them runs, are listed
separately: they are not baked in. So are custom resources, whose operators may
start images that no manifest names.`,
		Example: `  edgebake images image.yaml
  edgebake images image.yaml --output json`,
		Args: cli.Args(1, 1, "one Image document"),
		RunE: func(c *cobra.Command, a []string) error {
			t, doc, err := flags.openOne(s, a[0])
			if err != nil {
				return err
			}
			defer t.Options.Cache.Close()
			listing, listErr := images.List(t.Image, t.Options.Dir)
			listedBelow := map[string]bool{}
			for _, n := range listing.MentionNotes() {
				listedBelow[n.Error()] = true
			}
			t.Options.Events = func(e builder.Event) {
				if e.State == builder.StateWarning && !listedBelow[e.Text] {
					s.Warn("%s", e.Text)
				}
			}
			list, err := builder.Images(c.Context(), t.Image, t.Options)
			if err != nil {
				return doc.Explain(err)
			}
			if listErr != nil {
				return doc.Explain(listErr)
			}
			sum := images.Summary(list)
			listed := []any{}
			for n, p := range list {
				listed = append(listed, listedImage{p, sum.Images[n].Size, sum.Images[n].Shared})
			}
			for _, m := range listing.Mentions {
				listed = append(listed, mentionedImage{m.Ref, m.Where, true})
			}
			return output.Print(s, listed, func() {
				fmt.Fprint(s.Out, sum.Text("compressed"))
				printMentions(s.Out, listing)
			})
		},
	}
	flags.declare(c)
	output.Flag(c)
	cli.TakesDocument(s, c, 0, cli.ImageHere())
	return c
}
