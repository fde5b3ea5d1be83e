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
	"github.com/spf13/cobra"
)

// initFlags are the flags of init.
type initFlags struct {
	clusterFlags
	dir, join, key   string
	asCluster, force bool
}

func newInit(s streams) *cobra.Command {
	var o initFlags
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

For editors that know YAML schemas, these are written to ` + starter.SchemaDir + `.`,
		Example: `  edgebake init
  edgebake init --join -  # paste the line that kubeadm prints, then Ctrl-D
  edgebake init --kubeconfig ~/.kube/config --ssh-key ~/.ssh/id_ed25519.pub
  edgebake init --dir sites/berlin
  edgebake init --cluster`,
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.check(c); err != nil {
				return err
			}
			key, keyErr := startKey(o.key)
			switch {
			case !o.asCluster && o.kubeconfig == "":
				return o.fromJoin(s, key, keyErr)
			case keyErr != nil:
				return keyErr
			case o.asCluster:
				return o.write(s, []starter.Document{{Kind: "cluster", Text: starter.Cluster(key), Blank: starter.Cluster(""), Perm: 0o666, Asked: key != ""}}, nil)
			}
			return o.fromCluster(c.Context(), s, key)
		},
	}
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		if o.join == "kubeadm" { // the first word of a line without quotes
			return usageError{errors.New("--join: put the line that kubeadm prints in quotes: --join 'kubeadm join ...', or --join - and paste it")}
		}
		return c.Parent().FlagErrorFunc()(c, err)
	})
	f := c.Flags()
	dirFlag(c, &o.dir, "dir", ".", "directory to write to")
	f.StringVar(&o.join, "join", "", "kubeadm's line for machines that join, in quotes; - reads it from standard input")
	fileFlag(c, &o.key, "ssh-key", "file of the public key that may log in", "pub")
	o.declare(c, "fill in the documents from the cluster of this kubeconfig")
	f.BoolVar(&o.asCluster, "cluster", false, "write a Cluster instead")
	f.BoolVar(&o.force, "force", false, "replace files that were edited")
	return c
}

// check checks the command line.
func (o *initFlags) check(c *cobra.Command) error {
	switch {
	case o.asCluster:
		return rejectUnused(c, unused{flags: []string{"join", "kubeconfig", "context"}, purpose: "a machine of a cluster that lives, and --cluster for a new one: choose one"})
	case c.Flags().Changed("join") && strings.TrimSpace(o.join) == "":
		return usageError{errors.New("--join is empty: give it the line that kubeadm prints, or leave it out")}
	case o.kubeconfig != "" && o.join != "":
		return usageError{errors.New("--join and --kubeconfig exclude each other: both say which cluster it is")}
	case o.kubeconfig == "":
		return rejectUnused(c, unused{flags: []string{"context"}, purpose: "--kubeconfig FILE"})
	}
	return nil
}

// fromJoin writes an Image and a Site, with the contents of a join line if there is one.
func (o *initFlags) fromJoin(s streams, key string, keyErr error) error {
	known, err := o.readJoin(s)
	if err := errors.Join(err, keyErr); err != nil {
		return err
	}
	known.SSHKey = key
	joins := len(known.Masters) > 0
	if err := o.write(s, known.Documents(known.NodeType != "", joins || key != ""), nil); err != nil {
		return err
	}
	if len(known.LeftOut) > 0 {
		s.Hint("Left out, since the image has all that a node runs: %s\n", strings.Join(known.LeftOut, ", "))
	}
	if known.NodeType != "" {
		s.Hint("image.yaml is for OpenYurt nodes: name your yurthub, its digest and the pause image in it\n")
	}
	if joins && key == "" {
		s.Hint(nobodyLogsIn)
	}
	return nil
}

// nobodyLogsIn is the hint where no key was given.
const nobodyLogsIn = "Nobody can log in to a machine with this Site: uncomment users in it, or use --ssh-key\n"

// initTokenTTL is how long the token of a Site of init --kubeconfig is valid.
const initTokenTTL = 72 * time.Hour

// fromCluster writes an Image and a Site for the nodes of a living cluster. It makes the
// token last, once nothing is known to be wrong.
func (o *initFlags) fromCluster(ctx context.Context, s streams, key string) error {
	client, err := o.open()
	if err != nil {
		return err
	}
	facts, err := client.Facts(ctx)
	if err != nil {
		return err
	}
	known := &starter.Input{SSHKey: key, Kubernetes: facts.Version, Pause: facts.Pause, DaemonSets: facts.DaemonSets != nil}
	if _, err := configs.ParseImages("image.yaml", known.Image()); err != nil {
		return fmt.Errorf("no image for Kubernetes %s: %w", facts.Version, err)
	}
	documents := func() []starter.Document {
		all := known.Documents(true, true)
		if facts.DaemonSets != nil {
			all = append(all, starter.Document{Kind: "agents", Text: facts.DaemonSets, Perm: 0o666, Asked: true})
		}
		return all
	}
	var minted *cluster.Minted
	err = o.write(s, documents(), func() ([]starter.Document, error) {
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

// readJoin reads the join line: from the flag, or from a person at a terminal if there is
// no Site yet.
func (o *initFlags) readJoin(s streams) (*starter.Input, error) {
	line := o.join
	switch _, err := os.Stat(filepath.Join(o.dir, "site.yaml")); {
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
	if line == "" {
		return new(starter.Input), nil
	}
	known, err := starter.ParseJoin(line)
	var errs []error
	for _, e := range builder.SplitErrors(err) {
		errs = append(errs, fmt.Errorf("--join: %w", e))
	}
	return known, errors.Join(errs...)
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

// write writes the documents and prints their names.
func (o *initFlags) write(s streams, all []starter.Document, finish func() ([]starter.Document, error)) error {
	var names []string
	for _, d := range all {
		if d.Blank != nil {
			names = append(names, filepath.Join(o.dir, d.Kind+".yaml"))
		}
	}
	written, err := starter.Write(o.dir, all, o.force, finish)
	for _, f := range written {
		if f.Kept {
			s.Note("kept %s, which is there\n", f.Name)
		} else {
			s.Note("wrote %s\n", f.Name)
		}
	}
	if err != nil {
		return err
	}
	them := "them"
	if len(names) == 1 {
		them = "it"
	}
	s.Note("Edit %s, then: edgebake validate %s\n", them, strings.Join(names, " "))
	return nil
}
