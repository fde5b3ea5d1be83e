package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/importer"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/spf13/cobra"
)

func newInventory(s streams) *cobra.Command {
	return cli.Group(&cobra.Command{
		Use:     "inventory",
		Short:   "Prepare the Sites of many machines",
		Example: `  edgebake inventory import stores.csv --template site.yaml -o inventory.yaml`,
	}, newInventoryImport(s))
}

// importFlags are the flags of `edgebake inventory import`.
type importFlags struct {
	cli.DocumentFlags
	template, output string
	columns          []string
	force            bool
}

func newInventoryImport(s streams) *cobra.Command {
	var o importFlags
	c := &cobra.Command{
		Use:               "import TABLE --template SITE",
		ValidArgsFunction: cli.CompleteFiles(documents.TableExtensions),
		Short:             "Make an Inventory from a table (CSV) and a Site",
		Long: `Import makes an Inventory from a table and from a Site with the fields that all
rows have in common. The first line of the table names the columns; each other
row becomes a Site.

The name of a column is the field that it sets: name, macs, serial, uuid,
assetTag, or any field of a Site by its path (nodePool, network.dns,
labels.example.com/region, network.interfaces[0].gateway). Short names such as
address, gateway, dns and mac work too. --map assigns a field to a column with
another name, or leaves the column out. Blanks separate several values in one cell.
The template may lack the fields that columns set. If it names no interface for the
addresses, a column named interface must: a name, or a pattern such as en*.

Commas, semicolons, tabs or bars separate the columns. Quotes, a byte order mark
and Windows line ends are accepted.`,
		Example: `  edgebake inventory import stores.csv --template site.yaml -o inventory.yaml
  edgebake inventory import stores.csv --template site.yaml --map "S/N=serial" --map Manager=-`,
		Args: cli.Args(1, 1, "one table (CSV)"),
		RunE: func(c *cobra.Command, a []string) error {
			if o.output == "-" {
				o.output = ""
			}
			return importTable(s, a[0], o)
		},
	}
	f := c.Flags()
	cli.FileFlag(c, &o.template, "template", "Site document with the fields that all rows have in common", documents.Extensions...)
	cli.FileFlag(c, &o.output, "output", "Inventory to write (default: standard output)", documents.Extensions...)
	f.StringArrayVar(&o.columns, "map", nil, "`COLUMN=FIELD`, repeatable; FIELD - leaves the column out")
	f.BoolVar(&o.force, "force", false, "replace an existing output")
	o.IdentityFlag(c)
	return c
}

func importTable(s streams, name string, o importFlags) error {
	if o.template == "" {
		return cli.Usage(errors.New("edgebake inventory import requires a Site with the fields that all rows have in common: --template FILE"))
	}
	if name == "-" && o.template == "-" {
		return cli.Usage(errors.New("the table and the template cannot both come from standard input"))
	}
	columns := map[string]string{}
	for _, m := range o.columns {
		i := strings.LastIndexByte(m, '=')
		if i <= 0 || i == len(m)-1 {
			return cli.Usage(fmt.Errorf("--map %s: want COLUMN=FIELD, or COLUMN=- to leave a column out", m))
		}
		columns[m[:i]] = m[i+1:]
	}
	if o.output != "" {
		if err := errors.Join(
			file.Check(o.output, o.force),
			file.NotInput("--output", o.output, "the table", name),
			file.NotInput("--output", o.output, "the template", o.template)); err != nil {
			return err
		}
	}
	reader := o.Reader(s)
	table, err := reader.Read(name)
	if err != nil {
		return err
	}
	template, err := reader.ReadDecrypted(o.template)
	if err != nil {
		return err
	}
	out, sites, err := importer.CSV(name, table.Data, o.template, template.Data, importer.Options{Map: columns, Path: func(p string) string {
		return fromOutput(template.Path(p), o.output)
	}, Warn: func(text string) { s.Warn("%s", text) }})
	if err != nil {
		return err
	}
	if err := checkReadable(name, len(out), sites); err != nil {
		return err
	}
	if o.output == "" {
		_, err := s.Bytes().Write(out)
		return err
	}
	if err := file.Write(o.output, out, 0o600); err != nil { // readable by the owner only: it may contain tokens
		return err
	}
	s.Note("wrote %s: %s\n", o.output, configs.Count(sites, "site"))
	return nil
}

// checkReadable rejects a table whose Inventory would be too large for other commands to read.
func checkReadable(table string, size, sites int) error {
	if size <= documents.MaxSize {
		return nil
	}
	return fmt.Errorf("%s: an Inventory of %s would have %s, but a document has at most %s: split the table",
		table, configs.Count(sites, "site"), bytesize.Human(int64(size)), bytesize.Human(documents.MaxSize))
}

// fromOutput converts a path so that it is relative to the directory of the written Inventory.
func fromOutput(p, output string) string {
	if filepath.IsAbs(p) {
		return p
	}
	dir := "."
	if output != "" {
		dir = filepath.Dir(output)
	}
	rel, err := filepath.Rel(dir, p)
	if err != nil {
		return p
	}
	return rel
}
