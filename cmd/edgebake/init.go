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
	var cluster, force bool
	c := &cobra.Command{
		Use:   "init",
		Short: "Write a commented Image and Site, or Cluster, to start from",
		Long: `Init writes a commented image.yaml and site.yaml. Where only you know what
belongs there, the Site has placeholders, which validate tells you to replace:
a token, the CA's hash, an SSH key. --join 'kubeadm join ...' fills in the first
two from the line that kubeadm prints on a control-plane node (kubeadm token
create --print-join-command); --join - reads it from standard input, which keeps
the token out of the shell's history, and from other users of this computer, who can
read command lines. --cluster writes a commented cluster.yaml
instead, for edgebake cluster new.

For editors that know YAML schemas, these are written to ` + schemaDir + `.`,
		Example: `  edgebake init
  edgebake init --join -  # paste the line that kubeadm prints, then Ctrl-D
  edgebake init --dir sites/berlin
  edgebake init --cluster`,
		Args: args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			if cluster {
				if err := rejectIdle(c, idle{flags: []string{"join"}, purpose: "a machine of a cluster that lives, and --cluster for a new one: choose one"}); err != nil {
					return err
				}
				key, err := startKey(key)
				if err != nil {
					return err
				}
				return writeStart(s, dir, []start{{"cluster", configs.StartCluster(key), 0o666}}, force)
			}
			if c.Flags().Changed("join") && strings.TrimSpace(join) == "" {
				return usageError{errors.New("--join is empty: give it the line that kubeadm prints, or leave it out")}
			}
			site, err := startSite(s, join, key)
			if err != nil {
				return err
			}
			err = writeStart(s, dir, []start{{"image", configs.ExampleImage(), 0o666}, {"site", site, 0o600}}, force) // a token will be in the Site
			if err == nil && join != "" && key == "" {
				s.hint("Nobody can log in to a machine with this Site: uncomment users in it, or use --ssh-key\n")
			}
			return err
		},
	}
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		if join == "kubeadm" { // the first word of a line without quotes
			return usageError{errors.New("--join: put the line that kubeadm prints in quotes: --join 'kubeadm join ...', or --join - and paste it")}
		}
		return c.Parent().FlagErrorFunc()(c, err)
	})
	f := c.Flags()
	f.StringVar(&dir, "dir", ".", "directory to write to")
	_ = c.MarkFlagDirname("dir")
	f.StringVar(&join, "join", "", "kubeadm's line for machines that join, in quotes; - reads it from standard input")
	f.StringVar(&key, "ssh-key", "", "file of the public key that may log in")
	_ = c.MarkFlagFilename("ssh-key", "pub")
	f.BoolVar(&cluster, "cluster", false, "write a Cluster instead")
	f.BoolVar(&force, "force", false, "replace files that are there")
	return c
}

// startKey reads the key that may log in; empty: none was named.
func startKey(file string) (string, error) {
	if file == "" {
		return "", nil
	}
	data, err := os.ReadFile(file)
	key := strings.TrimSpace(string(data))
	if err == nil {
		err = configs.CheckSSHKey(key)
	}
	if err != nil {
		return "", fmt.Errorf("--ssh-key: %s: %w", file, err)
	}
	return key, nil
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
		for _, e := range builder.SplitErrors(err) {
			errs = append(errs, fmt.Errorf("--join: %w", e))
		}
	}
	key, err := startKey(keyFile)
	return configs.StartSite(join, key), errors.Join(append(errs, err)...)
}

// start is a document to start from.
type start struct {
	kind string
	text []byte
	perm fs.FileMode
}

// writeStart writes documents to start from, and the schemas that they name.
func writeStart(s streams, dir string, all []start, force bool) error {
	type file struct {
		name string
		data []byte
		perm fs.FileMode
	}
	var schemas, documents []file
	for _, d := range all {
		schema, err := configs.Schema(d.kind)
		if err != nil {
			return err
		}
		name := filepath.Join(schemaDir, d.kind+".schema.json")
		schemas = append(schemas, file{name, schema, 0o666})
		documents = append(documents, file{d.kind + ".yaml", append([]byte("# yaml-language-server: $schema="+name+"\n"), d.text...), d.perm})
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
	var names []string
	for _, f := range documents {
		names = append(names, filepath.Join(dir, f.name))
	}
	them := "them"
	if len(names) == 1 {
		them = "it"
	}
	s.note("wrote %s\nEdit %s, then: edgebake validate %s\n", strings.Join(names, "\nwrote "), them, strings.Join(names, " "))
	return nil
}
