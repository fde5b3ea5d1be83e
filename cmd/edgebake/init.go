package main

import (
	"bufio"
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
create --print-join-command), or from yurtadm's or edgeadm's; --join - reads it
from standard input, which keeps the token out of the shell's history, and from other
users of this computer, who can read command lines. At a terminal init asks for it.
--cluster writes a commented cluster.yaml instead, for edgebake cluster new.

Files that are there and were edited are kept.

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
				return writeStart(s, dir, []start{{"cluster", configs.StartCluster(key), configs.StartCluster(""), 0o666, key != ""}}, force)
			}
			if c.Flags().Changed("join") && strings.TrimSpace(join) == "" {
				return usageError{errors.New("--join is empty: give it the line that kubeadm prints, or leave it out")}
			}
			known, err := startOf(s, dir, join, key)
			if err != nil {
				return err
			}
			blank, joins := new(configs.Start), len(known.Masters) > 0
			err = writeStart(s, dir, []start{
				{"image", known.Image(), blank.Image(), 0o666, known.NodeType != ""},
				{"site", known.Site(), blank.Site(), 0o600, joins || known.SSHKey != ""}, // a token will be in the Site
			}, force)
			if err != nil {
				return err
			}
			if len(known.LeftOut) > 0 {
				s.hint("Left out, since the image has all that a node runs: %s\n", strings.Join(known.LeftOut, ", "))
			}
			if known.NodeType != "" {
				s.hint("image.yaml is for OpenYurt nodes: name your yurthub, its digest and the pause image in it\n")
			}
			if joins && known.SSHKey == "" {
				s.hint("Nobody can log in to a machine with this Site: uncomment users in it, or use --ssh-key\n")
			}
			return nil
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
	f.BoolVar(&force, "force", false, "replace files that were edited")
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

// startOf finds what is known of the cluster and of the person who will log in.
func startOf(s streams, dir, line, keyFile string) (*configs.Start, error) {
	var errs []error
	switch _, err := os.Stat(filepath.Join(dir, "site.yaml")); {
	case line == "-":
		data, err := io.ReadAll(io.LimitReader(s.In, 64<<10))
		if err != nil {
			return nil, err
		}
		if line = string(data); strings.TrimSpace(line) == "" {
			return nil, errors.New("--join: standard input is empty")
		}
	case line == "" && errors.Is(err, fs.ErrNotExist):
		if _, ok := s.terminal(); ok {
			s.hint("Paste the line that kubeadm prints on a control-plane node (kubeadm token create\n--print-join-command), or the output of kubeadm init; an empty line leaves it for later:\n")
			line = pasted(s.In)
		}
	}
	known := new(configs.Start)
	if line != "" {
		join, err := configs.ParseJoin(line)
		for _, e := range builder.SplitErrors(err) {
			errs = append(errs, fmt.Errorf("--join: %w", e))
		}
		if err == nil {
			known = join
		}
	}
	key, err := startKey(keyFile)
	known.SSHKey = key
	return known, errors.Join(append(errs, err)...)
}

// pasted reads a join line from a terminal: until there is one, or until an empty line
// comes first or twice.
func pasted(in io.Reader) string {
	var text strings.Builder
	empty := 1
	for lines := bufio.NewScanner(in); empty < 2 && lines.Scan(); {
		line := lines.Text()
		text.WriteString(line + "\n")
		if empty++; strings.TrimSpace(line) != "" {
			empty = 0
		}
		if _, err := configs.ParseJoin(text.String()); err == nil && !strings.HasSuffix(strings.TrimSpace(line), "\\") {
			break
		}
	}
	return strings.TrimSpace(text.String())
}

// start is a document to start from.
type start struct {
	kind  string
	text  []byte
	blank []byte // what it is where nothing is known
	perm  fs.FileMode
	asked bool // flags say what is in it
}

// writeStart writes documents to start from, and the schemas that they name. A file that
// somebody has edited stays.
func writeStart(s streams, dir string, all []start, force bool) error {
	undo, err := disk.MakeDirectory(filepath.Join(dir, schemaDir))
	if err != nil {
		return err
	}
	defer undo()
	var errs []error
	var names []string
	var wrote []func() error
	write := func(name string, data []byte, perm fs.FileMode) {
		wrote = append(wrote, func() error { return builder.WriteFile(name, data, perm) })
	}
	said := ""
	for _, d := range all {
		schema, err := configs.Schema(d.kind)
		if err != nil {
			return err
		}
		at := filepath.Join(schemaDir, d.kind+".schema.json")
		write(filepath.Join(dir, at), schema, 0o666)
		head := "# yaml-language-server: $schema=" + at + "\n"
		name := filepath.Join(dir, d.kind+".yaml")
		names = append(names, name)
		old, err := os.ReadFile(name)
		switch {
		case err == nil && string(old) == head+string(d.text):
			said += "kept " + name + ", which is there\n"
		case errors.Is(err, fs.ErrNotExist), force, string(old) == head+string(d.blank):
			errs = append(errs, builder.CheckFile(name, true))
			write(name, append([]byte(head), d.text...), d.perm)
			said += "wrote " + name + "\n"
		case err != nil:
			errs = append(errs, err)
		case d.asked:
			errs = append(errs, fmt.Errorf("%s was edited: --force replaces it", name))
		default:
			said += "kept " + name + ", which is there\n"
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, f := range wrote {
		if err := f(); err != nil {
			return err
		}
	}
	them := "them"
	if len(names) == 1 {
		them = "it"
	}
	s.note("%sEdit %s, then: edgebake validate %s\n", said, them, strings.Join(names, " "))
	return nil
}
