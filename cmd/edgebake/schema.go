package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/configs/schema"
	"github.com/spf13/cobra"
)

func newSchema(s streams) *cobra.Command {
	return &cobra.Command{
		Use:   "schema KIND",
		Short: "Print the JSON schema of a kind of document",
		Long: `Schema prints a JSON schema (draft 2020-12). Editors use it to complete and check
documents. KIND is image, site, inventory or cluster. edgebake validate also
checks rules that a schema cannot express.`,
		Example: `  edgebake schema site`,
		Args:    cli.Args(1, 1, "image, site, inventory or cluster"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return schema.Kinds(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(c *cobra.Command, a []string) error {
			raw, err := schema.Read(a[0])
			if err != nil {
				return cli.Usage(err)
			}
			_, err = s.Bytes().Write(raw)
			return err
		},
	}
}

func newExplain(s streams) *cobra.Command {
	var recursive bool
	c := &cobra.Command{
		Use:   "explain FIELD",
		Short: "Describe a field of a document",
		Long: `Explain describes a field and the fields below it. A field is named by its path,
beginning with image, site, inventory or cluster.`,
		Example: `  edgebake explain site
  edgebake explain site.network.interfaces
  edgebake explain image.kubernetes.source
  edgebake explain site --recursive   # the names of all fields`,
		Args:              cli.Args(1, 1, "one field, e.g. site.network.interfaces"),
		ValidArgsFunction: completeField,
		RunE: func(c *cobra.Command, a []string) error {
			f, err := schema.Explain(a[0])
			if err != nil {
				return cli.Usage(err)
			}
			if recursive {
				printTree(s.Out, f, "")
			} else {
				printField(s.Out, f)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&recursive, "recursive", false, "print the names and types of all fields below it")
	return c
}

// printTree prints a field and all fields below it, one per line.
func printTree(w io.Writer, f *schema.Field, indent string) {
	name, required := f.Name, ""
	if indent == "" {
		name = f.Path
	}
	if f.Required {
		required = " required"
	}
	fmt.Fprintf(w, "%s%s <%s>%s\n", indent, name, f.Type, required)
	for i := range f.Fields {
		printTree(w, &f.Fields[i], indent+"  ")
	}
}

func printField(w io.Writer, f *schema.Field) {
	fmt.Fprintf(w, "%s <%s>", f.Path, f.Type)
	if f.Required {
		fmt.Fprint(w, " required")
	}
	fmt.Fprintln(w)
	wrap(w, f.Description, "  ")
	if len(f.Values) > 0 {
		fmt.Fprintf(w, "  One of: %s\n", strings.Join(f.Values, ", "))
	}
	if f.Default != "" {
		fmt.Fprintf(w, "  Default: %s\n", f.Default)
	}
	for _, c := range f.Fields {
		required := ""
		if c.Required {
			required = " required"
		}
		fmt.Fprintf(w, "\n  %s <%s>%s\n", c.Name, c.Type, required)
		wrap(w, c.Description, "      ")
	}
}

// wrap prints text in lines of at most 80 columns.
func wrap(w io.Writer, text, indent string) {
	line := indent
	for _, word := range strings.Fields(text) {
		if len(line)+1+len(word) > 80 && line != indent {
			fmt.Fprintln(w, line)
			line = indent
		}
		if line != indent {
			line += " "
		}
		line += word
	}
	if line != indent {
		fmt.Fprintln(w, line)
	}
}

// completeField returns the fields that begin with the typed text, for shell completion.
func completeField(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
	dot := strings.LastIndexByte(typed, '.')
	if dot < 0 {
		return schema.Kinds(), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	}
	f, err := schema.Explain(typed[:dot])
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for _, c := range f.Fields {
		out = append(out, c.Path)
	}
	return out, cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
}
