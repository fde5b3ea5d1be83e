package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/configs"
	"github.com/spf13/cobra"
)

// schemaDir is where init puts the schemas that the documents' first lines
// name for editors.
const schemaDir = ".edgebake"

func newInit(s streams) *cobra.Command {
	var dir, join, key string
	var force bool
	c := &cobra.Command{
		Use:   "init",
		Short: "Write a commented Image and Site to start from",
		Long: `Init writes a commented image.yaml and site.yaml. Where only you know what
belongs there, the Site has placeholders, which validate tells you to replace:
a token, the CA's hash, an SSH key. --join 'kubeadm join ...' fills in the first
two from the line that kubeadm prints on a control-plane node (kubeadm token
create --print-join-command); --join - reads it from standard input, which keeps
the token out of the shell's history.

For editors that know YAML schemas, these are written to ` + schemaDir + `.`,
		Example: `  edgebake init
  edgebake init --dir sites/berlin`,
		Args: args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			site, err := startSite(s, join, key)
			if err != nil {
				return err
			}
			return writeStart(s, dir, site, force)
		},
	}
	f := c.Flags()
	f.StringVar(&dir, "dir", ".", "directory to write to")
	_ = c.MarkFlagDirname("dir")
	f.StringVar(&join, "join", "", "kubeadm's line for machines that join, in quotes; - reads it from standard input")
	f.StringVar(&key, "ssh-key", "", "file of the public key that may log in")
	_ = c.MarkFlagFilename("ssh-key", "pub")
	f.BoolVarP(&force, "force", "f", false, "replace files that are there")
	return c
}

// startSite makes the Site that init writes.
func startSite(s streams, line, keyFile string) ([]byte, error) {
	var join *configs.Join
	var errs []error
	if line == "-" {
		data, err := io.ReadAll(io.LimitReader(s.In, 64<<10))
		if err != nil {
			return nil, err
		}
		if line = string(data); strings.TrimSpace(line) == "" {
			return nil, errors.New("--join: standard input is empty")
		}
	}
	if line != "" {
		var err error
		join, err = configs.ParseJoin(line)
		for _, e := range builder.Each(err) {
			errs = append(errs, fmt.Errorf("--join: %w", e))
		}
	}
	var key string
	if keyFile != "" {
		data, err := os.ReadFile(keyFile)
		key = strings.TrimSpace(string(data))
		if err == nil {
			err = configs.CheckSSHKey(key)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("--ssh-key: %s: %w", keyFile, err))
		}
	}
	return configs.StartSite(join, key), errors.Join(errs...)
}

// writeStart writes what init writes.
func writeStart(s streams, dir string, site []byte, force bool) error {
	type file struct {
		name string
		data []byte
		perm fs.FileMode
	}
	var schemas []file
	for _, kind := range []string{"image", "site"} {
		schema, err := configs.Schema(kind)
		if err != nil {
			return err
		}
		schemas = append(schemas, file{filepath.Join(schemaDir, kind+".schema.json"), schema, 0o666})
	}
	modeline := func(kind string) string {
		return fmt.Sprintf("# yaml-language-server: $schema=%s/%s.schema.json\n", schemaDir, kind)
	}
	documents := []file{
		{"image.yaml", append([]byte(modeline("image")), configs.ExampleImage()...), 0o666},
		{"site.yaml", append([]byte(modeline("site")), site...), 0o600}, // a token will be in it
	}
	undo, err := disk.MakeDirectory(filepath.Join(dir, schemaDir))
	if err != nil {
		return err
	}
	defer undo()
	var errs []error
	for _, f := range documents {
		errs = append(errs, builder.CheckFile(filepath.Join(dir, f.name), force))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, f := range append(schemas, documents...) {
		if err := builder.WriteFile(filepath.Join(dir, f.name), f.data, f.perm); err != nil {
			return err
		}
	}
	image, siteFile := filepath.Join(dir, "image.yaml"), filepath.Join(dir, "site.yaml")
	s.note("wrote %s\nwrote %s\nEdit them, then: edgebake validate %s %s\n", image, siteFile, image, siteFile)
	return nil
}
