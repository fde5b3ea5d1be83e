package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/update"
	"github.com/spf13/cobra"
)

func newUpdate(s streams) *cobra.Command {
	return cli.Group(&cobra.Command{
		Use:     "update",
		Short:   "Show the cost of updates",
		Example: `  edgebake update cost other.raw my-edge.raw.zst # the bytes that a machine would fetch`,
	}, newUpdateCost(s))
}

func newUpdateCost(s streams) *cobra.Command {
	var output console.Form
	c := &cobra.Command{
		Use:               "cost OLD NEW",
		ValidArgsFunction: cli.CompleteFiles(cli.ImageExtensions),
		Short:             "Count the bytes that a machine fetches for an update",
		Long: `Cost counts the bytes that a machine with the image OLD fetches to update to NEW:
the chunks of NEW's root file system, kernel and initrd that are not in OLD, the
container images that OLD lacks, the index that lists all chunks, and 8 KiB for each
request. firstboot update --max-bytes counts the same way.

OLD is an image or a disk. If OLD is a disk with two systems, Cost uses the one
that the machine keeps. If machines with OLD reject NEW because of its serial or
signature (updates in the Image), Cost warns. NEW is a compressed image (.raw.zst).`,
		Example: `  edgebake update cost other.raw my-edge.raw.zst
  edgebake update cost other.raw my-edge.raw.zst --output json`,
		Args: cli.Args(2, 2, "two images"),
		RunE: func(c *cobra.Command, a []string) error {
			cost, err := media.CostOfUpdate(a[0], media.ImageSource{Name: a[1]})
			if err != nil {
				return err
			}
			for _, why := range cost.Rejected {
				s.Warn("machines with %s reject %s: %s", a[0], a[1], why)
			}
			return output.Print(s, cost, func() { printCost(s.Out, cost) })
		},
	}
	output.Flag(c)
	return c
}

func printCost(w io.Writer, c *media.UpdateCost) {
	line := func(what string, n int64) {
		fmt.Fprintf(w, "%-16s %12d bytes  %5.1f %%\n", what, n, 100*float64(n)/float64(c.Image))
	}
	line("root", c.Root)
	line("kernel, initrd", c.Boot)
	if len(c.Images) > 0 {
		line("container images", c.Data)
	}
	line("index", c.Index)
	line(configs.Count(c.Requests, "request"), int64(c.Requests)*update.RequestBytes)
	line("to fetch", c.Bytes)
	line("whole image", c.Image)
	if len(c.Images) > 0 {
		fmt.Fprintf(w, "%-16s %s\n", "new images", strings.Join(c.Images, ", "))
	}
}
