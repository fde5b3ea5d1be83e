package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/starter"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/spf13/cobra"
)

// schemaDir is where init puts the schemas that the documents' first lines
// name for editors.
const schemaDir = ".edgebake"

func newInit(s streams) *cobra.Command {
	var dir, join, key string
	var k clusterFlags
	var asCluster, force bool
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

--kubeconfig reads a living cluster: the Image gets its version, its pause image and the
images of its DaemonSets (agents.yaml), the Site its API servers, the hash of its CA and
a new token. edgebake build then bakes an image for its nodes.

Files that are there and were edited are kept.

For editors that know YAML schemas, these are written to ` + schemaDir + `.`,
		Example: `  edgebake init
  edgebake init --join -  # paste the line that kubeadm prints, then Ctrl-D
  edgebake init --kubeconfig ~/.kube/config --ssh-key ~/.ssh/id_ed25519.pub
  edgebake init --dir sites/berlin
  edgebake init --cluster`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if asCluster {
				if err := rejectUnused(c, unused{flags: []string{"join", "kubeconfig", "context"}, purpose: "a machine of a cluster that lives, and --cluster for a new one: choose one"}); err != nil {
					return err
				}
				key, err := startKey(key)
				if err != nil {
					return err
				}
				return writeStart(s, dir, []start{{"cluster", starter.Cluster(key), starter.Cluster(""), 0o666, key != ""}}, force, nil)
			}
			if c.Flags().Changed("join") && strings.TrimSpace(join) == "" {
				return usageError{errors.New("--join is empty: give it the line that kubeadm prints, or leave it out")}
			}
			if k.kubeconfig != "" {
				if join != "" {
					return usageError{errors.New("--join and --kubeconfig exclude each other: both say which cluster it is")}
				}
				return initLiving(c.Context(), s, dir, k, key, force)
			}
			if err := rejectUnused(c, unused{flags: []string{"context"}, purpose: "--kubeconfig FILE"}); err != nil {
				return err
			}
			known, err := startOf(s, dir, join, key)
			if err != nil {
				return err
			}
			joins := len(known.Masters) > 0
			if err := writeStart(s, dir, starts(known, known.NodeType != "", joins || known.SSHKey != ""), force, nil); err != nil {
				return err
			}
			if len(known.LeftOut) > 0 {
				s.Hint("Left out, since the image has all that a node runs: %s\n", strings.Join(known.LeftOut, ", "))
			}
			if known.NodeType != "" {
				s.Hint("image.yaml is for OpenYurt nodes: name your yurthub, its digest and the pause image in it\n")
			}
			if joins && known.SSHKey == "" {
				s.Hint(nobodyLogsIn)
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
	dirFlag(c, &dir, "dir", ".", "directory to write to")
	f.StringVar(&join, "join", "", "kubeadm's line for machines that join, in quotes; - reads it from standard input")
	fileFlag(c, &key, "ssh-key", "file of the public key that may log in", "pub")
	k.declare(c, "fill in the documents from the cluster of this kubeconfig")
	f.BoolVar(&asCluster, "cluster", false, "write a Cluster instead")
	f.BoolVar(&force, "force", false, "replace files that were edited")
	return c
}

// nobodyLogsIn is the hint where no key was given.
const nobodyLogsIn = "Nobody can log in to a machine with this Site: uncomment users in it, or use --ssh-key\n"

// starts are an Image and a Site; imageAsked and siteAsked say which of them flags fill in.
func starts(known *starter.Input, imageAsked, siteAsked bool) []start {
	blank := new(starter.Input)
	return []start{
		{"image", known.Image(), blank.Image(), 0o666, imageAsked},
		{"site", known.Site(), blank.Site(), 0o600, siteAsked}, // a token will be in the Site
	}
}

// initTokenTTL is how long the token of a Site of init --kubeconfig is valid.
const initTokenTTL = 72 * time.Hour

// initLiving writes an Image and a Site for the nodes of a living cluster. The token is
// made last, once nothing is known to be wrong.
func initLiving(ctx context.Context, s streams, dir string, k clusterFlags, keyFile string, force bool) error {
	key, err := startKey(keyFile)
	if err != nil {
		return err
	}
	client, err := k.open()
	if err != nil {
		return err
	}
	facts, err := client.Facts(ctx)
	if err != nil {
		return err
	}
	known := &starter.Input{SSHKey: key, Kubernetes: facts.Version, Pause: facts.Pause, Agents: facts.Agents != nil}
	if _, err := configs.ParseImages("image.yaml", known.Image()); err != nil {
		return fmt.Errorf("no image for Kubernetes %s: %w", facts.Version, err)
	}
	documents := func() []start {
		all := starts(known, true, true)
		if facts.Agents != nil {
			all = append(all, start{"agents", facts.Agents, nil, 0o666, true})
		}
		return all
	}
	var minted *cluster.Minted
	err = writeStart(s, dir, documents(), force, func() ([]start, error) {
		var err error
		if minted, err = client.MintToken(ctx, cluster.MintOptions{TTL: initTokenTTL, Now: time.Now()}); err != nil {
			return nil, err
		}
		site := minted.Site
		known.Masters, known.Endpoint, known.CAHashes, known.Token = site.Masters, site.Endpoint, site.CACertHashes, site.Credentials.Token.Reveal()
		return documents(), nil
	})
	if err != nil {
		if minted != nil {
			err = fmt.Errorf("%w: token %s is made: revoke it (edgebake cluster token revoke %[2]s)", err, minted.ID)
		}
		return err
	}
	s.Note("Kubernetes %s; token %s is valid until %s (edgebake cluster token mint makes others)\n", facts.Version, minted.ID, minted.Expires.Format(time.RFC3339))
	if facts.Pause == "" {
		s.Hint("No node lists a pause image: name yours in containerd.sandbox (kubeadm config images list | grep pause)\n")
	}
	if len(facts.Skipped) > 0 {
		s.Hint("Left out, since they are not for Linux: %s\n", strings.Join(facts.Skipped, ", "))
	}
	if key == "" {
		s.Hint(nobodyLogsIn)
	}
	return nil
}

// startKey reads the key that may log in; empty: none was named.
func startKey(name string) (string, error) {
	if name == "" {
		return "", nil
	}
	data, err := os.ReadFile(name)
	key := strings.TrimSpace(string(data))
	if err == nil {
		err = forms.CheckSSHKey(key)
	}
	if err != nil {
		return "", fmt.Errorf("--ssh-key: %s: %w", name, err)
	}
	return key, nil
}

// startOf finds what is known of the cluster and of the person who will log in.
func startOf(s streams, dir, line, keyFile string) (*starter.Input, error) {
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
		if _, ok := s.Terminal(); ok {
			s.Hint("Paste the line that kubeadm prints on a control-plane node (kubeadm token create\n--print-join-command), or the output of kubeadm init; an empty line leaves it for later:\n")
			line = pasted(s.In)
		}
	}
	known := new(starter.Input)
	if line != "" {
		join, err := starter.ParseJoin(line)
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
		if _, err := starter.ParseJoin(text.String()); err == nil && !strings.HasSuffix(strings.TrimSpace(line), "\\") {
			break
		}
	}
	return strings.TrimSpace(text.String())
}

// start is a document to start from, or what one of them reads (blank is nil).
type start struct {
	kind  string
	text  []byte
	blank []byte // what it is where nothing is known
	perm  fs.FileMode
	asked bool // flags say what is in it
}

func (d *start) schema() string { return filepath.Join(schemaDir, d.kind+".schema.json") }

// head is the line that names the schema to editors.
func (d *start) head() string {
	if d.blank == nil {
		return ""
	}
	return "# yaml-language-server: $schema=" + d.schema() + "\n"
}

// writeStart writes documents to start from, and the schemas that they name. A file that
// somebody has edited stays. If finish is set, it completes the documents once it is
// known that they can be written.
func writeStart(s streams, dir string, all []start, force bool, finish func() ([]start, error)) error {
	undo, err := file.MakeDirectory(filepath.Join(dir, schemaDir))
	if err != nil {
		return err
	}
	defer undo()
	var errs []error
	var names []string
	kept := map[string]bool{}
	for _, d := range all {
		name := filepath.Join(dir, d.kind+".yaml")
		if d.blank != nil {
			names = append(names, name)
		}
		old, err := os.ReadFile(name)
		rest := strings.TrimPrefix(string(old), d.head())
		switch {
		case err == nil && !force && finish == nil && rest == string(d.text):
		case errors.Is(err, fs.ErrNotExist), force, err == nil && d.blank != nil && rest == string(d.blank):
			errs = append(errs, file.Check(name, true))
			continue
		case err != nil:
			errs = append(errs, err)
		case d.asked && rest != string(d.text):
			errs = append(errs, fmt.Errorf("%s was edited: --force replaces it", name))
		}
		kept[name] = true
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if finish != nil {
		if all, err = finish(); err != nil {
			return err
		}
	}
	for _, d := range all {
		if d.blank != nil {
			schema, err := configs.Schema(d.kind)
			if err == nil {
				err = file.Write(filepath.Join(dir, d.schema()), schema, 0o666)
			}
			if err != nil {
				return err
			}
		}
		name := filepath.Join(dir, d.kind+".yaml")
		if kept[name] {
			s.Note("kept %s, which is there\n", name)
			continue
		}
		if err := file.Write(name, append([]byte(d.head()), d.text...), d.perm); err != nil {
			return err
		}
		s.Note("wrote %s\n", name)
	}
	them := "them"
	if len(names) == 1 {
		them = "it"
	}
	s.Note("Edit %s, then: edgebake validate %s\n", them, strings.Join(names, " "))
	return nil
}
