package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/spf13/cobra"
)

func newPlan(s streams) *cobra.Command {
	var flags imageFlags
	var output console.Form
	c := &cobra.Command{
		Use:               "plan [IMAGE]",
		ValidArgsFunction: cli.CompleteFiles(documents.Extensions),
		Short:             "Print the inputs of a build, pinned, without building",
		Long: `Plan resolves an Image: it finds the digests of files, releases and container
images. For an input that is made on this computer, the digest is in the lock; before
the first build it is unknown. When all digests are known, the plan has an ID: plans
with the same ID build the same image, byte for byte. --output json prints the whole
plan, with the recipes.`,
		Example: `  edgebake plan image.yaml
  edgebake plan image.yaml --locked --output json`,
		Args: cli.Args(1, 1, "one Image document"),
		RunE: func(c *cobra.Command, args []string) error {
			t, doc, err := flags.openOne(s, args[0])
			if err != nil {
				return err
			}
			defer t.Options.Cache.Close()
			p, err := builder.Resolve(c.Context(), t.Image, t.Options)
			if err != nil {
				return doc.Explain(err)
			}
			id, err := p.ID()
			if err != nil && !errors.Is(err, plan.ErrUnpinned) {
				return err
			}
			if output == console.Text {
				printPlan(s.Out, p, id)
				return nil
			}
			out, err := p.Encode()
			if err != nil {
				return err
			}
			return output.PrintJSON(s, out)
		},
	}
	flags.declare(c)
	output.Flag(c)
	cli.TakesDocument(s, c, 0, cli.ImageHere())
	return c
}

// printPlan prints the inputs of an image. id is the plan's ID, or empty if the ID is unknown
// because some input has never been made.
func printPlan(w io.Writer, p *plan.Plan, id string) {
	fmt.Fprintf(w, "image  %s, %s, date %s\n", p.Name, p.Arch, time.Unix(p.SourceDate, 0).UTC().Format(time.RFC3339))
	wide := 0
	for name := range p.Inputs {
		wide = max(wide, len(name))
	}
	for _, name := range slices.Sorted(maps.Keys(p.Inputs)) {
		in := p.Inputs[name]
		digest := cmp.Or(in.SHA256, strings.TrimPrefix(in.Digest, "sha256:"))
		if digest == "" {
			digest = "to be made"
		}
		fmt.Fprintf(w, "  %-*s  %-12.12s  %s\n", wide, name, digest, in.From())
	}
	if id == "" {
		id = "no ID yet: build makes the inputs whose digest is missing, and writes their digests to the lock"
	}
	fmt.Fprintf(w, "plan   %s\n", id)
}
