package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"
)

func newMan(s streams) *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use:    "man",
		Hidden: true, // needed only to build distribution packages
		Short:  "Write the manual pages",
		Long: `Man writes a manual page for each command to a directory, for packages. The pages
have the date of SOURCE_DATE_EPOCH, if it is set.`,
		Example: `  edgebake man --output man1`,
		Args:    cli.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := os.MkdirAll(dir, 0o777); err != nil {
				return err
			}
			root := newRoot(s)
			root.DisableAutoGenTag = true
			root.InitDefaultVersionFlag()
			forManual(root)
			return errors.Join(
				doc.GenManTree(root, &doc.GenManHeader{Source: "edgebake " + version.OfSource(), Manual: "edgebake"}, dir),
				flagsAsInHelp(root, dir))
		},
	}
	cli.DirFlag(c, &dir, "output", "man1", "directory to write to")
	return c
}

// forManual converts the texts of a command and its subcommands to Markdown. From that, cobra makes
// manual pages.
func forManual(c *cobra.Command) {
	c.Long, c.Short = markdown(c.Long), markdown(c.Short)
	for _, sub := range c.Commands() {
		forManual(sub)
	}
}

// flagsAsInHelp changes the flags in the manual pages of a command and its subcommands to the form
// of --help. cobra writes, for example, --arch=[] and -f[=false].
func flagsAsInHelp(c *cobra.Command, dir string) error {
	name := filepath.Join(dir, strings.ReplaceAll(c.CommandPath(), " ", "-")+".1")
	page, err := os.ReadFile(name)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // hidden commands have no page
		}
		return err
	}
	page = manualFlag.ReplaceAllFunc(page, func(b []byte) []byte {
		m := manualFlag.FindSubmatch(b)
		f := c.Flag(string(m[2]))
		if f == nil {
			return b
		}
		value, usage := pflag.UnquoteUsage(f)
		if value != "" {
			value = ` \fI` + value + `\fP`
		}
		if set := f.DefValue; !slices.Contains([]string{"", "0", "false", "[]"}, set) {
			if f.Value.Type() == "string" {
				set = strconv.Quote(set)
			}
			usage += " (default " + set + ")"
		}
		return []byte(string(m[1]) + value + "\n\t" + usage + "\n")
	})
	errs := []error{os.WriteFile(name, page, 0o666)}
	for _, sub := range c.Commands() {
		errs = append(errs, flagsAsInHelp(sub, dir))
	}
	return errors.Join(errs...)
}

// manualFlag matches a flag in a manual page made by cobra: its names (group 1, with the long name
// as group 2) and its description.
var manualFlag = regexp.MustCompile(`(?m)^((?:\\fB-\w\\fP, )?\\fB--([\w-]+)\\fP).*\n\t.*\n`)

// markdown escapes a text, so that Markdown keeps its words and indented lines.
func markdown(text string) string {
	escape := strings.NewReplacer(`\`, `\\`, "*", `\*`, "_", `\_`, "`", "\\`", "<", `\<`, "[", `\[`, "#", `\#`)
	var b strings.Builder
	indented := false
	for line := range strings.Lines(text) {
		if in := strings.HasPrefix(line, "  ") || strings.HasPrefix(line, "\t"); in != indented {
			b.WriteString("\n") // starts a separate block
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
