package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/spf13/cobra"
)

func newValidate(s streams) *cobra.Command {
	var docs cli.DocumentFlags
	var output console.Form
	c := &cobra.Command{
		Use:               "validate [FILE...]",
		ValidArgsFunction: cli.CompleteFiles(documents.Extensions),
		Short:             "Check Image, Site, Inventory and Cluster documents",
		Long: `Validate checks documents of any kind and prints every problem as
FILE:LINE:COLUMN: FIELD: what is wrong. It fetches and writes nothing. The kubeadm
documents after a Cluster, and its manifests, are checked too.

In a directory (without an operand, the current one) it checks every YAML file that
contains an edgebake document, even one whose apiVersion is wrong or missing. It reports
files that cannot be read.`,
		Example: `  edgebake validate
  edgebake validate image.yaml site.yaml
  edgebake validate -f image.yaml`,
		Args: cli.Args(1, -1, "at least one document"),
		RunE: func(c *cobra.Command, files []string) error {
			files, err := inDirectories(files)
			if err != nil {
				return err
			}
			var all configs.Problems
			for _, name := range files {
				err := docs.Reader(s).Validate(name)
				if err == nil && output == console.Text {
					s.Note("%s: ok\n", configs.FileName(name))
				}
				for _, e := range joined.Errors(err) {
					var p configs.Problems
					if !errors.As(e, &p) {
						p = configs.Problems{{Msg: e.Error()}}
					}
					all = append(all, p...)
				}
			}
			if output == console.Text {
				return all.Err()
			}
			found := []problem{}
			for _, p := range all {
				found = append(found, problem{p.File, p.Line, p.Col, p.Path, p.Msg})
			}
			err = output.Print(s, map[string]any{"problems": found}, nil)
			if err == nil && len(found) > 0 {
				err = errors.New(configs.Count(len(found), "problem"))
			}
			return err
		},
	}
	output.Flag(c)
	docs.Secrets(c)
	cli.TakesDocument(s, c, 0, cli.AllHere())
	return c
}

// inDirectories replaces each directory in names with the documents in it.
func inDirectories(names []string) (all []string, err error) {
	for _, name := range names {
		st, err := os.Stat(name)
		if name == "-" || err != nil || !st.IsDir() {
			all = append(all, name)
			continue
		}
		found, err := documents.In(name)
		if err != nil {
			return nil, fmt.Errorf("looking for documents: %w", err)
		}
		if len(found) == 0 {
			return nil, cli.Usage(fmt.Errorf("%s contains no edgebake document (*.yaml with apiVersion %s)", name, configs.APIVersion))
		}
		all = append(all, found...)
	}
	return all, nil
}

// problem is the JSON form of a configs.Problem.
type problem struct {
	File    string `json:"file,omitempty"`
	Line    int    `json:"line,omitempty"`
	Column  int    `json:"column,omitempty"`
	Field   string `json:"field,omitempty"`
	Message string `json:"message"`
}

func newRender(s streams) *cobra.Command {
	var docs cli.DocumentFlags
	c := &cobra.Command{
		Use:               "render SITE",
		ValidArgsFunction: cli.CompleteFiles(documents.Extensions),
		Short:             "Print a Site as an Ignition config",
		Long: `Render prints a Site's operating-system settings (network, users, files) as an
Ignition v3 config, as first boot applies them. Flatcar and Fedora CoreOS can use
the config too. The node's name is left out where it depends on the machine. The
output contains the Site's passwords and keys, but never its join token.`,
		Example: `  edgebake render site.yaml`,
		Args:    cli.Args(1, 1, "one Site document"),
		RunE: func(c *cobra.Command, a []string) error {
			out, err := docs.Reader(s).Rendered(a[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(s.Bytes(), strings.TrimRight(string(out), "\n"))
			return err
		},
	}
	c.Flags().Bool("ignition", true, "print an Ignition v3 config, the only form")
	docs.IdentityFlag(c)
	cli.TakesDocument(s, c, 0, nil)
	return c
}

func newVersion(s streams) *cobra.Command {
	var output console.Form
	c := &cobra.Command{
		Use:     "version",
		Short:   "Print the version of edgebake",
		Example: `  edgebake version --output json`,
		Args:    cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			v := struct {
				Version  string   `json:"version"`
				Go       string   `json:"go"`
				Platform string   `json:"platform"`
				Reads    []string `json:"reads"`
			}{version.OfSource(), runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH, []string{configs.APIVersion}}
			if info, ok := debug.ReadBuildInfo(); ok {
				v.Go = info.GoVersion
			}
			return output.Print(s, v, func() {
				fmt.Fprintf(s.Out, "edgebake %s (%s, %s), reads documents of %s\n", v.Version, v.Go, v.Platform, strings.Join(v.Reads, ", "))
			})
		},
	}
	output.Flag(c)
	return c
}
