package main

import (
	"os"
	"strings"

	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

func newMan(s streams) *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use:    "man",
		Hidden: true, // whoever packages edgebake knows where to look
		Short:  "Write the manual pages",
		Long: `Man writes a manual page of each command to a directory, as packages have them. Their
date is SOURCE_DATE_EPOCH's where that is set.`,
		Example: `  edgebake man --output man1`,
		Args:    args(0, 0, "no argument"),
		RunE: func(*cobra.Command, []string) error {
			if err := os.MkdirAll(dir, 0o777); err != nil {
				return err
			}
			root := newRoot(s)
			root.DisableAutoGenTag = true
			forManual(root)
			return doc.GenManTree(root, &doc.GenManHeader{Source: "edgebake " + version.OfSource(), Manual: "edgebake"}, dir)
		},
	}
	c.Flags().StringVarP(&dir, "output", "o", "man1", "directory to write to")
	_ = c.MarkFlagDirname("output")
	return c
}

// forManual makes the texts of a command and those below it Markdown, which
// pages are made of.
func forManual(c *cobra.Command) {
	c.Long, c.Short = markdown(c.Long), markdown(c.Short)
	for _, sub := range c.Commands() {
		forManual(sub)
	}
}

// markdown keeps a text's words and its indented lines as they are.
func markdown(text string) string {
	escape := strings.NewReplacer(`\`, `\\`, "*", `\*`, "_", `\_`, "`", "\\`", "<", `\<`, "[", `\[`, "#", `\#`)
	var b strings.Builder
	indented := false
	for line := range strings.Lines(text) {
		if in := strings.HasPrefix(line, "  ") || strings.HasPrefix(line, "\t"); in != indented {
			b.WriteString("\n") // a block of its own
			indented = in
		}
		if indented {
			b.WriteString("    " + line)
			continue
		}
		b.WriteString(escape.Replace(line))
	}
	return b.String()
}
