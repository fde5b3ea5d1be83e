package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/clusterdoc"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/configs/starter"
	"github.com/edgebake/edgebake/configs/yamltree"
	"github.com/spf13/cobra"
)

// initFlags are the flags of init.
type initFlags struct {
	cli.ClusterFlags
	dir, join, key   string
	asCluster, force bool
}

func newInit(s streams) *cobra.Command {
	var o initFlags
	c := &cobra.Command{
		Use:   "init",
		Short: "Write a commented Image and Site, or Cluster, to start from",
		Long: `Init writes a commented image.yaml and site.yaml. The Site has placeholders for
values that only you know, and validate reports them: a token, the CA's hash, an SSH
key. --join 'kubeadm join ...' fills in the token and the hash from the line that
kubeadm prints on a control-plane node (kubeadm token create --print-join-command),
or from yurtadm's or edgeadm's. --join - reads the line from standard input, so that
the token is neither in the shell's history nor in the command line, which other users
of this computer can read. At a terminal init asks for the line.
--cluster writes a commented cluster.yaml, for edgebake cluster new, and the Image of
all its machines.

--kubeconfig reads a running cluster: the Image gets its version, its pause image and
the images of its DaemonSets (agents.yaml); the Site gets its API servers, the hash of
its CA and a token. If an existing Site has a valid token, init keeps that one. edgebake
build then bakes an image for the cluster's nodes.

Init does not change files that you have edited. If they lack values from the flags,
init lists these values and writes nothing.

Init also writes the JSON schemas of the documents to ` + starter.SchemaDir + `, for editors.`,
		Example: `  edgebake init
  edgebake init --join -  # paste the line that kubeadm prints, then Ctrl-D
  edgebake init --kubeconfig ~/.kube/config --ssh-key ~/.ssh/id_ed25519.pub
  edgebake init --dir sites/berlin
  edgebake init --cluster`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.check(c); err != nil {
				return err
			}
			key, keyErr := startKey(o.key)
			switch {
			case !o.asCluster && o.Kubeconfig == "":
				return o.fromJoin(s, key, keyErr)
			case keyErr != nil:
				return keyErr
			case o.asCluster:
				return o.forCluster(s, key)
			}
			return o.fromCluster(c.Context(), s, key)
		},
	}
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		if o.join == "kubeadm" { // without quotes, --join gets only the first word of the join command
			return cli.Usage(errors.New("--join: put quotes around the line that kubeadm prints: --join 'kubeadm join ...'; or use --join - and paste it"))
		}
		return c.Parent().FlagErrorFunc()(c, err)
	})
	f := c.Flags()
	cli.DirFlag(c, &o.dir, "dir", ".", "directory to write to")
	f.StringVar(&o.join, "join", "", "join line that kubeadm prints, in quotes; - reads it from standard input")
	cli.FileFlag(c, &o.key, "ssh-key", "file of the public key that may log in", "pub")
	o.Declare(c, "fill in the documents from the cluster of this kubeconfig")
	f.BoolVar(&o.asCluster, "cluster", false, "write a new Cluster and the Image of its machines")
	f.BoolVar(&o.force, "force", false, "replace files that were edited")
	return c
}

// check checks the command line.
func (o *initFlags) check(c *cobra.Command) error {
	switch {
	case o.asCluster:
		return cli.RejectUnused(c, cli.Unused{Flags: []string{"join", "kubeconfig", "context"}, Purpose: "an existing cluster, but --cluster makes a new one: choose one"})
	case c.Flags().Changed("join") && strings.TrimSpace(o.join) == "":
		return cli.Usage(errors.New("--join is empty: add the line that kubeadm prints, or leave the flag out"))
	case o.Kubeconfig != "" && o.join != "":
		return cli.Usage(errors.New("--join and --kubeconfig both describe the cluster: choose one"))
	case o.Kubeconfig == "":
		return cli.RejectUnused(c, cli.Unused{Flags: []string{"context"}, Purpose: "a kubeconfig: add --kubeconfig FILE"})
	}
	return nil
}

// fromJoin writes an Image and a Site. If there is a join command, the Site has its values.
func (o *initFlags) fromJoin(s streams, key string, keyErr error) error {
	known, err := o.readJoin(s)
	if err := errors.Join(err, keyErr); err != nil {
		return err
	}
	joins := len(known.Masters) > 0
	former := o.formerKey()
	key = cmp.Or(key, former)
	known.SSHKey = key
	all := known.Documents(known.NodeType != "", joins || key != "")
	if former != "" {
		all[1].Blanks = append(all[1].Blanks, (&starter.Input{SSHKey: former}).Site())
	}
	files, err := o.write(s, all)
	if err != nil {
		return err
	}
	if len(known.LeftOut) > 0 {
		s.Hint("Left out, since the image contains everything that a node runs: %s\n", strings.Join(known.LeftOut, ", "))
	}
	if known.NodeType != "" {
		s.Hint("image.yaml is for OpenYurt nodes: add your version of yurthub, its digest and the pause image to it\n")
	}
	switch edit := toEdit(files); {
	case joins && key == "":
		s.Hint(nobodyLogsIn)
	case !joins && slices.Contains(edit, filepath.Join(o.dir, "site.yaml")):
		s.Hint("edgebake init --kubeconfig FILE fills in both documents from a running cluster; edgebake init --join - fills in the Site from the line that kubeadm prints\n")
	}
	o.next(s, files, "edgebake build"+o.operand("image.yaml"))
	return nil
}

// nobodyLogsIn is the hint printed if no SSH key was given.
const nobodyLogsIn = "Nobody can log in to a machine with this Site: uncomment users in it, or use --ssh-key\n"

// forCluster writes a Cluster and the Image of its machines.
func (o *initFlags) forCluster(s streams, key string) error {
	files, err := o.write(s, starter.ClusterDocuments(key))
	if err != nil {
		return err
	}
	for _, f := range files {
		if f.Kind != "image" {
			continue
		}
		images, err := configs.ParseImages(f.Name, f.Text)
		if err != nil || slices.Contains(images[0].NodeTypes, configs.NodeControlPlane) {
			continue
		}
		s.Hint("Images built from %s cannot run control-plane nodes: add nodeTypes: [control-plane, native] to it", f.Name)
		if missing := images[0].MissingImages(); len(missing) > 0 {
			s.Hint(", and to its images:\n  - ref: %s", strings.Join(missing, "\n  - ref: "))
		}
		s.Hint("\n")
	}
	name := "DIR"
	for _, f := range files {
		var doc struct{ Name string }
		if f.Kind == "cluster" && yamltree.Unmarshal(f.Text, &doc) == nil && doc.Name != "" {
			name = filepath.Join(o.dir, doc.Name)
		}
	}
	o.next(s, files, fmt.Sprintf("edgebake build%s; edgebake cluster new %s --output %s", o.operand("image.yaml"), filepath.Join(o.dir, "cluster.yaml"), name))
	return nil
}

// initTokenTTL is the validity of the token that `init --kubeconfig` creates.
const initTokenTTL = 72 * time.Hour

// fromCluster writes an Image and a Site for the nodes of a running cluster. If the existing Site
// has no valid token, fromCluster creates one after all checks.
func (o *initFlags) fromCluster(ctx context.Context, s streams, key string) error {
	client, err := o.Open()
	if err != nil {
		return err
	}
	facts, err := client.Facts(ctx)
	if err != nil {
		return err
	}
	formerKey := o.formerKey()
	key = cmp.Or(key, formerKey)
	known := &starter.Input{SSHKey: key, Kubernetes: facts.Version, Pause: facts.Pause, DaemonSets: facts.DaemonSets != nil,
		Masters: facts.Site.Masters, Endpoint: facts.Site.Endpoint, CAHashes: facts.Site.CACertHashes}
	if _, err := configs.ParseImages("image.yaml", known.Image()); err != nil {
		return fmt.Errorf("no image for Kubernetes %s: %w", facts.Version, err)
	}
	former, good, err := o.formerToken(ctx, client)
	if err != nil {
		return err
	}
	known.Token = forms.PlaceholderToken
	if good {
		known.Token = former
	}
	all := known.Documents(true, true)
	if !good && former != "" { // an existing Site that differs only by its invalid token counts as unedited
		old := *known
		old.Token = former
		all[1].Blanks = append(all[1].Blanks, old.Site())
	}
	if formerKey != "" {
		all[1].Blanks = append(all[1].Blanks, (&starter.Input{SSHKey: formerKey}).Site())
	}
	if facts.DaemonSets != nil {
		all = append(all, starter.Document{Kind: "agents", Text: facts.DaemonSets, Perm: 0o666, Asked: true})
	}
	files, undo, err := starter.Plan(o.dir, all, o.force)
	if err != nil {
		return err
	}
	defer undo()
	site := &files[1]
	if site.Kept && !good {
		site.Lacks = append(site.Lacks, "credentials.token: a valid token (edgebake cluster token mint)")
	}
	if err := lacking(files); err != nil {
		return err
	}
	if site.Kept || good {
		if err := o.commit(s, files); err != nil {
			return err
		}
		s.Note("Kubernetes %s; the Site's token is still valid\n", facts.Version)
	} else if err := o.commitWithToken(ctx, s, client, known, files); err != nil {
		return err
	}
	printFactHints(s, facts)
	if key == "" {
		s.Hint(nobodyLogsIn)
	}
	o.next(s, files, "edgebake build"+o.operand("image.yaml"))
	return nil
}

// printFactHints prints hints about a missing pause image and about DaemonSets that were left out.
func printFactHints(s streams, facts *cluster.Facts) {
	if facts.Pause == "" {
		s.Hint("No node of the cluster reports a pause image: set containerd.sandbox yourself (kubeadm config images list | grep pause)\n")
	}
	if len(facts.Skipped) > 0 {
		s.Hint("Left out, since they are not for Linux: %s\n", strings.Join(facts.Skipped, ", "))
	}
}

// commitWithToken creates a token for the Site and writes the files.
func (o *initFlags) commitWithToken(ctx context.Context, s streams, client *cluster.Client, known *starter.Input, files []starter.File) error {
	minted, err := client.MintToken(ctx, cluster.MintOptions{TTL: initTokenTTL, Now: time.Now()})
	if err != nil {
		return err
	}
	known.Token = minted.Site.Credentials.Token.Reveal()
	files[1].Text = known.Site()
	if err := o.commit(s, files); err != nil {
		return fmt.Errorf("%w\n  token %s already exists; to remove it, run edgebake cluster token revoke %[2]s", err, minted.ID)
	}
	s.Note("Kubernetes %s; token %s is valid until %s (edgebake cluster token mint makes more)\n", known.Kubernetes, minted.ID, minted.Expires.Format(time.RFC3339))
	return nil
}

// formerKey returns the SSH key of an existing Site in which init wrote no other value, or "".
func (o *initFlags) formerKey() string {
	text, err := os.ReadFile(filepath.Join(o.dir, "site.yaml"))
	if err != nil || o.force {
		return ""
	}
	return starter.KeyOf(text)
}

// formerToken returns the token of the existing Site, and whether the cluster still accepts it.
func (o *initFlags) formerToken(ctx context.Context, client *cluster.Client) (token string, good bool, err error) {
	text, err := os.ReadFile(filepath.Join(o.dir, "site.yaml"))
	if err != nil || o.force {
		return "", false, nil
	}
	site, err := configs.ParseSite("site.yaml", text)
	if err != nil || site.Credentials.Token.IsZero() {
		return "", false, nil
	}
	token = site.Credentials.Token.Reveal()
	good, err = client.HasToken(ctx, token, time.Now())
	return token, good, err
}

// startKey reads the SSH public key that may log in, or returns "" if none was named.
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

// readJoin reads the join command from the flag. If there is no flag and no Site yet, it asks a
// person at a terminal.
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
			s.Hint("Paste the line that kubeadm prints on a control-plane node (kubeadm token create\n--print-join-command), or the output of kubeadm init. To skip this, press Enter:\n")
			return pasted(s)
		}
	}
	if line == "" {
		return new(starter.Input), nil
	}
	known, err := starter.ParseJoin(line)
	return known, ofJoin(err)
}

// ofJoin prefixes each error of the join command with the flag's name.
func ofJoin(err error) error {
	var errs []error
	for _, e := range joined.Errors(err) {
		errs = append(errs, fmt.Errorf("--join: %w", e))
	}
	return errors.Join(errs...)
}

// pasted reads a join command from a terminal, and asks again after an invalid one. An empty
// first line, or two empty lines later, skip the question. A backslash continues a line.
func pasted(s streams) (*starter.Input, error) {
	var text string
	var err error
	empty, printed := 1, ""
	for lines := bufio.NewScanner(s.In); lines.Scan(); {
		line := strings.TrimSpace(lines.Text())
		if line == "" {
			if empty++; empty == 2 {
				return new(starter.Input), nil
			}
			continue
		}
		empty = 0
		if starter.BeginsJoin(line) {
			text, printed = "", ""
		}
		text += line + "\n"
		if strings.HasSuffix(line, "\\") {
			continue
		}
		var known *starter.Input
		if known, err = starter.ParseJoin(text); err == nil {
			return known, nil
		}
		if err.Error() == printed {
			continue
		}
		printed = err.Error()
		if !starter.BeginsJoin(text) { // in the output of kubeadm init, the command comes last
			s.Hint("No line begins with kubeadm join yet. Continue pasting, or press Enter twice to skip this:\n")
			continue
		}
		for _, e := range joined.Errors(err) {
			s.Hint("edgebake: %v\n", e)
		}
		s.Hint("Paste the correct line, or press Enter twice to skip this:\n")
	}
	return new(starter.Input), ofJoin(err)
}

// write plans the documents, writes them and prints their names.
func (o *initFlags) write(s streams, all []starter.Document) ([]starter.File, error) {
	files, undo, err := starter.Plan(o.dir, all, o.force)
	if err != nil {
		return nil, err
	}
	defer undo()
	if err := lacking(files); err != nil {
		return nil, err
	}
	return files, o.commit(s, files)
}

// lacking returns an error with the requested values that edited files lack.
func lacking(files []starter.File) error {
	var errs []error
	for _, f := range files {
		lacks := f.Lacks
		if len(lacks) == 0 {
			continue
		}
		if more := len(lacks) - maxLacks; more > 0 {
			lacks = append(lacks[:maxLacks:maxLacks], fmt.Sprintf("and %d more", more))
		}
		errs = append(errs, fmt.Errorf("%s exists and is not changed; write these values into it, or replace it with --force:\n  %s", f.Name, strings.Join(lacks, "\n  ")))
	}
	return errors.Join(errs...)
}

// commit writes the planned files and prints their names.
func (o *initFlags) commit(s streams, files []starter.File) error {
	if err := starter.Write(o.dir, files); err != nil {
		return err
	}
	for _, f := range files {
		switch {
		case f.Kept:
			s.Note("kept the existing %s\n", f.Name)
		case f.Unedited:
			s.Note("replaced %s (unedited)\n", f.Name)
		default:
			s.Note("wrote %s\n", f.Name)
		}
	}
	return nil
}

// maxLacks limits how many missing values of a file are listed.
const maxLacks = 20

// toEdit returns the names of the documents that a person must still complete.
func toEdit(files []starter.File) (names []string) {
	for _, f := range files {
		var err error
		switch f.Kind {
		case "image":
			_, err = configs.ParseImages(f.Name, f.Text)
		case "site":
			_, err = configs.ParseSite(f.Name, f.Text)
		case "cluster":
			_, err = clusterdoc.Parse(f.Name, f.Text)
		}
		if err != nil {
			names = append(names, f.Name)
		}
	}
	return names
}

// operand returns name as the operand of a suggested command, or "" if the command finds the file
// in the current directory.
func (o *initFlags) operand(name string) string {
	if filepath.Clean(o.dir) == "." {
		return ""
	}
	return " " + filepath.Join(o.dir, name)
}

// next prints the next commands, and the documents that must be edited before.
func (o *initFlags) next(s streams, files []starter.File, commands string) {
	if edit := toEdit(files); len(edit) > 0 {
		s.Note("Next: edit %s (edgebake validate%s lists what is missing), then: %s\n", strings.Join(edit, " and "), o.operand(""), commands)
		return
	}
	s.Note("Next: %s\n", commands)
}
