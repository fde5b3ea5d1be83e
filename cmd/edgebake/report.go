package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder/anatomy"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/outputs"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/spf13/cobra"
)

func newReport(s streams) *cobra.Command {
	var output, build, boot string
	var force bool
	c := &cobra.Command{
		Use:               "report IMAGE",
		ValidArgsFunction: cli.CompleteFiles(cli.ImageExtensions),
		Short:             "Write an HTML page about the contents of an image",
		Long: `Report writes one HTML page, without scripts and external files. It shows an
image's partitions, their packages, programs and container images with the largest
files, the times of the build, the pinned inputs and the SBOM. The facts about the
build come from NAME.report.json beside the image; for a stamped copy, from the report
of its golden image in the same directory. --build names another file. --boot adds
the first boot of a node, from report.json of its slot.

The ending of --output selects the format: .html, or .json for the data of the page.
--output json and yaml print the data, --output - prints the page. Reading a
compressed image takes longer.`,
		Example: `  edgebake report my-edge.raw
  edgebake report my-edge.raw -o report.html --boot report.json
  edgebake report my-edge.raw -o json`,
		Args: cli.Args(1, 1, "one image"),
		RunE: func(c *cobra.Command, a []string) error {
			if output == "" {
				output = outputs.Stem(a[0]) + ".report.html"
			}
			printed := slices.Contains([]string{"json", "yaml", "-"}, output)
			asJSON := printed && output != "-" || strings.HasSuffix(output, ".json")
			if !printed && !asJSON && !strings.HasSuffix(output, ".html") {
				return cli.Usage(fmt.Errorf("--output %s: want a name that ends in .html or .json; or print with json, yaml or -", output))
			}
			if !printed {
				if err := file.Check(output, force); err != nil {
					return fmt.Errorf("output %w", err)
				}
				if err := errors.Join(
					file.NotInput("--output", output, "the report of the build", cmp.Or(build, outputs.Report(a[0]))),
					file.NotInput("--output", output, "the report of --boot", boot)); err != nil {
					return err
				}
			}
			return writeReport(s, a[0], build, boot, output, asJSON)
		},
	}
	c.Flags().StringVarP(&output, "output", "o", "", "page to write, .html, or its data, .json; json, yaml and - print (default IMAGE.report.html)")
	_ = c.MarkFlagFilename("output", "html", "json")
	cli.FileFlag(c, &build, "build", "report.json of the image's build (default: NAME.report.json beside the image)", "json")
	cli.FileFlag(c, &boot, "boot", "report.json of a node that booted the image", "json")
	c.Flags().BoolVar(&force, "force", false, "replace an existing page")
	return c
}

func writeReport(s streams, image, build, boot, output string, asJSON bool) error {
	a, err := anatomy.Read(image, build, boot)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	if asJSON {
		raw, err := a.JSON()
		if err != nil {
			return err
		}
		out.Write(raw)
	} else if err := a.HTML(&out); err != nil {
		return err
	}
	switch output {
	case "json", "yaml":
		return console.Form(output).PrintJSON(s, out.Bytes())
	case "-":
		_, err := s.Bytes().Write(out.Bytes())
		return err
	}
	if err := file.Write(output, out.Bytes(), 0o666); err != nil {
		return err
	}
	s.Note("wrote %s\n", output)
	return nil
}

func newDiff(s streams) *cobra.Command {
	var output console.Form
	var exitCode bool
	c := &cobra.Command{
		Use:               "diff A B",
		ValidArgsFunction: cli.CompleteFiles(cli.ImageExtensions),
		Short:             "Compare two images",
		Long: `Diff compares two images: versions and settings, packages, container images,
partitions, sizes, files, and the lines of small files. It does not compare the
slots.`,
		Example: `  edgebake diff my-edge.raw other.raw
  edgebake diff my-edge.raw my-edge.raw.zst --output json
  edgebake diff my-edge.raw my-edge.raw.zst --exit-code`,
		Args: cli.Args(2, 2, "two images"),
		RunE: func(c *cobra.Command, a []string) error {
			d, err := anatomy.Diff(a[0], a[1])
			if err != nil {
				return err
			}
			err = output.Print(s, d, func() { d.Text(s.Out) })
			if err == nil && exitCode && !d.Equal {
				err = errors.New("the images differ")
			}
			return err
		},
	}
	output.Flag(c)
	c.Flags().BoolVar(&exitCode, "exit-code", false, "exit with 1 if the images differ, as diff(1) does")
	return c
}

// printTop prints the n largest groups of files, with a bar for each.
func printTop(w io.Writer, all []media.Contents, n int) {
	type entry struct {
		media.Group
		label string
	}
	var top []entry
	for _, c := range all {
		for _, g := range c.Groups {
			top = append(top, entry{g, c.Label})
		}
	}
	slices.SortStableFunc(top, func(a, b entry) int { return int(max(-1, min(1, b.Bytes-a.Bytes))) })
	top = top[:min(n, len(top))]
	if len(top) == 0 {
		return
	}
	const width = 30
	wide := 0
	for _, e := range top {
		wide = max(wide, len(e.Name))
	}
	wide = min(wide, 48)
	fmt.Fprintf(w, "largest %d\n", len(top))
	for _, e := range top {
		bar := int(width * e.Bytes / max(1, top[0].Bytes))
		fmt.Fprintf(w, "  %-8s %-8s %-*.*s %9s  %s\n", e.label, e.Kind, wide, wide, e.Name, bytesize.Human(e.Bytes), strings.Repeat("█", max(1, bar)))
	}
}
