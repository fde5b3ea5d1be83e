package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/cluster/reports"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/spf13/cobra"
)

// way is how a command finds a living cluster.
type way struct{ kubeconfig, context string }

func (w *way) flags(c *cobra.Command) {
	c.Flags().StringVar(&w.kubeconfig, "kubeconfig", "", "kubeconfig of the cluster (default $KUBECONFIG, else ~/.kube/config)")
	_ = c.MarkFlagFilename("kubeconfig")
	c.Flags().StringVar(&w.context, "context", "", "context of the kubeconfig (default its current one)")
}

func (w *way) open() (*cluster.Client, error) { return cluster.Open(w.kubeconfig, w.context) }

func newClusterToken(s streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "token",
		Short: "Make, list, check and revoke join tokens of a living cluster",
		Long: `Token works on the bootstrap tokens of a living cluster, whoever made it: those
that Sites carry as credentials.token.`,
		Example: `  edgebake cluster token mint --node shop-7 --output site.yaml
  edgebake cluster token list`,
		Args: subcommand,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newTokenMint(s), newTokenList(s), newTokenCheck(s), newTokenRevoke(s))
	return c
}

func newTokenMint(s streams) *cobra.Command {
	var w way
	var node, vip, output string
	var force bool
	ttl := 24 * time.Hour
	c := &cobra.Command{
		Use:   "mint",
		Short: "Make a token and print the Site that joins with it",
		Long: `Mint makes a bootstrap token and prints a Site with it: API servers (masters), endpoint, the
hash of the CA and the token, as the cluster itself has them. Add what is the
machine's: network, users, node type. The output holds the token: with --output it
goes to a file that only you can read.`,
		Example: `  edgebake cluster token mint --node shop-7 --output site.yaml
  edgebake cluster token mint --ttl 72h --vip 10.103.97.2`,
		Args: args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			if ttl < time.Minute || ttl > 365*24*time.Hour {
				return usageError{fmt.Errorf("--ttl %s: must be from 1m to 8760h", ttl)}
			}
			if node != "" {
				if err := forms.CheckNodeName(node); err != nil {
					return usageError{fmt.Errorf("--node: %w", err)}
				}
			}
			if output == "-" {
				output = ""
			}
			if output != "" {
				if err := notInput("--output", output, "the kubeconfig", w.kubeconfig); err != nil {
					return err
				}
			}
			client, err := w.open()
			if err != nil {
				return err
			}
			// A token that cannot be kept is not made.
			to := s.bytes()
			var file *disk.Output
			if output != "" {
				if file, err = disk.Create(output, 0o600, force); err != nil {
					return err
				}
				defer file.Discard()
				to = file
			}
			m, err := client.MintToken(c.Context(), cluster.MintOptions{Node: node, TTL: ttl, Now: time.Now(), VIP: vip})
			if err != nil {
				return err
			}
			text, err := configs.EncodeSlot(m.Site)
			if err != nil {
				return err
			}
			s.hint("minted token %s, valid until %s\n", m.ID, m.Expires.Format(time.RFC3339))
			if _, err := to.Write(text); err != nil {
				return fmt.Errorf("writing the Site: %w: token %s is made: revoke it (edgebake cluster token revoke %s)", err, m.ID, m.ID)
			}
			if file != nil {
				return file.Commit()
			}
			warnOfReaders(s)
			return nil
		},
	}
	w.flags(c)
	f := c.Flags()
	f.StringVarP(&output, "output", "o", "", "write the Site to this file, with mode 0600 (default: standard output)")
	_ = c.MarkFlagFilename("output", documentEndings...)
	f.BoolVar(&force, "force", false, "replace a file that is there")
	f.StringVar(&node, "node", "", "name of the node that the token is for; it becomes the Site's nodeName")
	f.Var((*span)(&ttl), "ttl", "how long the token is valid, e.g. 12h or 30d")
	f.StringVar(&vip, "vip", "", "VIP to write into the Site (default: the Site's own, 10.103.97.2)")
	return c
}

// warnOfReaders says so where a shell has sent a secret to a file that others
// may read.
func warnOfReaders(s streams) {
	out := s.bytes()
	if r, ok := out.(*results); ok {
		out = r.Writer
	}
	f, ok := out.(*os.File)
	if !ok {
		return
	}
	if st, err := f.Stat(); err == nil && st.Mode().IsRegular() && st.Mode().Perm()&0o077 != 0 {
		fmt.Fprintf(s.Err, "WARNING: others may read the file that this went to, and it has the token: chmod 600, or use --output FILE\n")
	}
}

func newTokenList(s streams) *cobra.Command {
	var w way
	var output string
	c := &cobra.Command{
		Use:   "list",
		Short: "List the tokens, without their secrets",
		Example: `  edgebake cluster token list
  edgebake cluster token list -o json`,
		Args: args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := w.open()
			if err != nil {
				return err
			}
			all, err := client.Tokens(c.Context(), time.Now())
			if err != nil {
				return err
			}
			return printAs(s, output, all, func() {
				t := tabwriter.NewWriter(s.Out, 0, 0, 2, ' ', 0)
				fmt.Fprintln(t, "ID\tEXPIRES\tUSAGES\tDESCRIPTION\tPROBLEMS")
				for _, token := range all {
					expires := "never"
					if !token.Expires.IsZero() {
						expires = token.Expires.Format(time.RFC3339)
					}
					fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", token.ID, expires, strings.Join(token.Usages, ","), strings.Join(strings.Fields(token.Description), " "), strings.Join(token.Problems, "; "))
				}
				t.Flush()
			})
		},
	}
	w.flags(c)
	outputFlag(c, &output)
	return c
}

func newTokenCheck(s streams) *cobra.Command {
	var w way
	var file string
	c := &cobra.Command{
		Use:   "check [TOKEN]",
		Short: "Check whether a node could join with a token",
		Long: `Check says why no node could join with a token: it is not there, expired, lacks
a usage or the group, has another secret, does not sign cluster-info, or is not
let in by the API server, whose rights for it are asked for in its own name.
TOKEN is the whole token or its id. Every user of this computer can read a command
line: a whole token is better read from --token-file.`,
		Example: `  edgebake cluster token check abcdef
  edgebake cluster token check --token-file token`,
		Args: args(0, 1, "a token or its id"),
		RunE: func(c *cobra.Command, a []string) error {
			if len(a) > 0 == (file != "") {
				return usageError{errors.New("name one token: TOKEN, or the file that has it (--token-file, - for standard input)")}
			}
			if file != "" {
				text, err := readSecret(s, file)
				if err != nil {
					return fmt.Errorf("reading the token: %w", err)
				}
				a = []string{text}
			}
			client, err := w.open()
			if err != nil {
				return err
			}
			t, err := client.CheckToken(c.Context(), a[0], time.Now())
			if err != nil {
				return err
			}
			var errs []error
			for _, p := range t.Problems {
				errs = append(errs, fmt.Errorf("checking token %s: %s", t.ID, p))
			}
			if err := errors.Join(errs...); err != nil {
				return err
			}
			until := "never"
			if !t.Expires.IsZero() {
				until = "until " + t.Expires.Format(time.RFC3339)
			}
			s.note("%s: ok, valid %s\n", t.ID, until)
			return nil
		},
	}
	w.flags(c)
	c.Flags().StringVar(&file, "token-file", "", "read the token from this file, - for standard input")
	_ = c.MarkFlagFilename("token-file")
	return c
}

func newTokenRevoke(s streams) *cobra.Command {
	var w way
	c := &cobra.Command{
		Use:   "revoke TOKEN...",
		Short: "Remove tokens, so that nobody joins with them",
		Long: `Revoke removes tokens, each given whole or by its id. Nodes that have joined
with them stay.`,
		Example: `  edgebake cluster token revoke abcdef`,
		Args:    args(1, -1, "at least one token or its id"),
		RunE: func(c *cobra.Command, a []string) error {
			client, err := w.open()
			if err != nil {
				return err
			}
			var errs []error
			for _, token := range a {
				if err := client.RevokeToken(c.Context(), token); err != nil {
					errs = append(errs, err)
					continue
				}
				id, _, _ := strings.Cut(token, ".")
				s.note("revoked %s\n", id)
			}
			return errors.Join(errs...)
		},
	}
	w.flags(c)
	return c
}

// wantedFlags are what prepare and verify are asked for.
func wantedFlags(c *cobra.Command, vip *string, pools *map[string]string) {
	c.Flags().StringVar(vip, "vip", "10.103.97.2", "VIP of the Sites; kube-proxy in mode ipvs must leave it alone")
	*pools = map[string]string{}
	c.Flags().Var(nodePools(*pools), "nodepool", "node pool that must exist, as NAME=Edge or NAME=Cloud (can be repeated)")
}

// nodePools are the node pools of a flag, and the type of each.
type nodePools map[string]string

func (p nodePools) String() string { return "" }
func (p nodePools) Type() string   { return "pool" }

func (p nodePools) Set(s string) error {
	for pool := range strings.SplitSeq(s, ",") {
		name, kind, _ := strings.Cut(strings.TrimSpace(pool), "=")
		if name == "" || kind != "Edge" && kind != "Cloud" {
			return errors.New("want NAME=Edge or NAME=Cloud")
		}
		p[name] = kind
	}
	return nil
}

func wanted(vip string, pools map[string]string) (cluster.Wanted, error) {
	if _, err := netip.ParseAddr(vip); err != nil && vip != "" {
		return cluster.Wanted{}, usageError{fmt.Errorf("--vip %q: it is not an IP address", vip)}
	}
	return cluster.Wanted{VIP: vip, Pools: pools}, nil
}

func newClusterPrepare(s streams) *cobra.Command {
	var w way
	var vip string
	var pools map[string]string
	var dryRun bool
	c := &cobra.Command{
		Use:   "prepare",
		Short: "Give a living cluster what its nodes need",
		Long: `Prepare makes and changes what nodes of edgebake need on a kubeadm cluster,
whoever made it:

  - the list of API servers (masters), kube-public/edgebake-masters, and nodes' right to read it
  - kube-proxy in mode ipvs: the VIP among excludeCIDRs
  - where OpenYurt is installed: yurthub's ClusterRole and its binding,
    node pools that --nodepool names, and DNS that stays within a pool

What objects were before is recorded in the cluster (kube-system/` + "edgebake-prepared" + `)
for edgebake cluster revert. --dry-run shows each change as the API server would
make it. Files on control-plane nodes are never touched.`,
		Example: `  edgebake cluster prepare --dry-run
  edgebake cluster prepare --nodepool shops=Edge`,
		Args: args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			want, err := wanted(vip, pools)
			if err != nil {
				return err
			}
			client, err := w.open()
			if err != nil {
				return err
			}
			plan, err := client.Plan(c.Context(), want)
			if err != nil {
				return err
			}
			if len(plan) == 0 {
				s.note("%s has everything required: nothing changed\n", client.Server())
				return nil
			}
			if dryRun {
				for i := range plan {
					fmt.Fprintf(s.Out, "%s (%s)\n%s\n", &plan[i], plan[i].Why, plan[i].Diff())
				}
				fmt.Fprintf(s.Out, "%s, none carried out (--dry-run)\n", configs.Count(len(plan), "change"))
				return nil
			}
			if err := client.Prepare(c.Context(), plan); err != nil {
				return err
			}
			for i := range plan {
				verb := "changed"
				if plan[i].Before == nil {
					verb = "made"
				}
				s.note("%s %s (%s)\n", verb, &plan[i], plan[i].Why)
			}
			for i := range plan {
				if then := plan[i].Then(); then != "" {
					s.note("Next: %s\n", then)
				}
			}
			s.note("edgebake cluster revert takes it back\n")
			return nil
		},
	}
	w.flags(c)
	wantedFlags(c, &vip, &pools)
	c.Flags().BoolVar(&dryRun, "dry-run", false, "show the changes and make none")
	return c
}

// verified is a row of cluster verify in JSON, which says what in place of name,
// and missing in place of failed, to those who read that before.
type verified struct {
	cluster.Check
	What string `json:"what"`
}

func newClusterVerify(s streams) *cobra.Command {
	var w way
	var vip, endpoint, output string
	var pools map[string]string
	c := &cobra.Command{
		Use:   "verify",
		Short: "Show what a living cluster lacks for its nodes",
		Long: `Verify looks for what nodes need on a kubeadm cluster and prints a table: ✓ is
there, ✗ is missing, with its fix, – cannot be seen from here or need not be. It
changes nothing. Exit code 1: something is missing.`,
		Example: `  edgebake cluster verify --nodepool shops=Edge
  edgebake cluster verify -o json`,
		Args: args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			want, err := wanted(vip, pools)
			if err != nil {
				return err
			}
			client, err := w.open()
			if err != nil {
				return err
			}
			found, err := client.Verify(c.Context(), want, endpoint)
			if err != nil {
				return err
			}
			endings, err := client.Endings(c.Context(), time.Now())
			if err != nil {
				return err
			}
			found = append(found, endings...)
			bad := 0
			var rows []verified
			for _, f := range found {
				row := verified{Check: f, What: f.Name}
				if f.State == cluster.CheckFailed {
					bad++
					row.State = "missing"
				}
				rows = append(rows, row)
			}
			err = printAs(s, output, rows, func() {
				for _, f := range found {
					io.WriteString(s.bytes(), s.mark(f.State))
					fmt.Fprintf(s.Out, " %s\n", f.Name)
					if f.Detail != "" {
						fmt.Fprintf(s.Out, "    %s\n", f.Detail)
					}
					if f.Fix != "" {
						fmt.Fprintf(s.Out, "    to fix: %s\n", f.Fix)
					}
				}
			})
			if err == nil && bad > 0 {
				err = fmt.Errorf("verifying %s: it lacks %d of %d things", client.Server(), bad, len(found))
			}
			return err
		},
	}
	w.flags(c)
	wantedFlags(c, &vip, &pools)
	c.Flags().StringVar(&endpoint, "endpoint", "apiserver.cluster.local", "endpoint of the Sites")
	outputFlag(c, &output)
	return c
}

func newClusterRevert(s streams) *cobra.Command {
	var w way
	var dryRun bool
	c := &cobra.Command{
		Use:   "revert",
		Short: "Take back what prepare did",
		Long: `Revert makes each object that edgebake cluster prepare changed what it was
before, by the record in the cluster, and removes those it made. An object that
somebody else has changed since is left as it is, named, and stays recorded.`,
		Example: `  edgebake cluster revert --dry-run
  edgebake cluster revert`,
		Args: args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := w.open()
			if err != nil {
				return err
			}
			act := client.Revert
			if dryRun {
				act = client.RevertPlan
			}
			done, err := act(c.Context())
			if err != nil {
				return err
			}
			if len(done) == 0 {
				s.note("%s: nothing to revert\n", client.Server())
			}
			var kept []error
			for i := range done {
				d := &done[i]
				switch {
				case d.Kept != "":
					kept = append(kept, fmt.Errorf("reverting %s: %s", &d.Change, d.Kept))
				case !dryRun:
					s.note("reverted %s\n", &d.Change)
				}
				if dryRun {
					fmt.Fprintf(s.Out, "%s\n%s\n", &d.Change, d.Diff())
				}
			}
			return errors.Join(kept...)
		},
	}
	w.flags(c)
	c.Flags().BoolVar(&dryRun, "dry-run", false, "show the changes and make none")
	return c
}

func newClusterStatus(s streams) *cobra.Command {
	var w way
	var output, received string
	var watch bool
	c := &cobra.Command{
		Use:   "status",
		Short: "Show what became of each node",
		Long: `Status lists a cluster's nodes, and those that a token was made for:

  waiting    the token is there, the node is not
  joining    its certificate is not approved
  notReady   it has joined and does not work
  ready

With --reports it also reads what ` + "`edgebake cluster listen`" + ` has received:

  booting    first boot is at work
  failed     first boot failed in the phase that is named, with the fix`,
		Example: `  edgebake cluster status --watch
  edgebake cluster status --reports reports
  edgebake cluster status -o json`,
		Args: args(0, 0, "no argument"),
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := w.open()
			if err != nil {
				return err
			}
			endings, err := client.Endings(c.Context(), time.Now())
			if err != nil {
				return err
			}
			for _, e := range endings {
				if e.State == cluster.CheckFailed {
					fmt.Fprintf(s.Err, "WARNING: %s: %s\n  to fix: %s\n", e.Name, e.Detail, e.Fix)
				}
			}
			ask := func(ctx context.Context) ([]cluster.Site, error) {
				all, err := client.Status(ctx, time.Now())
				if err != nil || received == "" {
					return all, err
				}
				store, err := reports.Read(received)
				if err != nil {
					return nil, err
				}
				return cluster.Report(all, store.All()), nil
			}
			all, err := ask(c.Context())
			for err == nil && watch {
				if err := printStatus(s, output, all); err != nil {
					return err
				}
				all, err = nextStatus(c.Context(), ask, all)
			}
			if err != nil {
				return err
			}
			return printStatus(s, output, all)
		},
	}
	w.flags(c)
	outputFlag(c, &output)
	c.Flags().StringVar(&received, "reports", "", "directory of the reports that cluster listen received")
	_ = c.MarkFlagDirname("reports")
	c.Flags().BoolVarP(&watch, "watch", "w", false, "print it again whenever it changes, until interrupted")
	return c
}

func printStatus(s streams, output string, all []cluster.Site) error {
	return printAs(s, output, all, func() {
		t := tabwriter.NewWriter(s.Out, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "NODE\tSTATE\tSINCE\tDETAIL\tTO FIX")
		for _, n := range all {
			since := ""
			if !n.Since.IsZero() {
				since = n.Since.Format(time.RFC3339)
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", n.Node, n.State, since, n.Detail, n.Fix)
		}
		t.Flush()
	})
}

// watchEvery is how often a watched status is asked for: nodes change state in
// seconds, and each asking lists them all.
const watchEvery = 5 * time.Second

// nextStatus waits until the status is another than before.
func nextStatus(ctx context.Context, ask func(context.Context) ([]cluster.Site, error), before []cluster.Site) ([]cluster.Site, error) {
	for {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(watchEvery):
		}
		all, err := ask(ctx)
		if err != nil || !slices.Equal(all, before) {
			return all, err
		}
	}
}

func newClusterRemove(s streams) *cobra.Command {
	var w way
	var force bool
	c := &cobra.Command{
		Use:   "remove NODE",
		Short: "Remove a node, so that another machine can take its name",
		Long: `Remove takes a node out of a living cluster: the tokens made for it, its
requests for certificates, and the Node. A Node that is Ready needs --force; a
control-plane node is rejected, since its member of etcd would stay.`,
		Example: `  edgebake cluster remove shop-7`,
		Args:    args(1, 1, "the name of one node"),
		RunE: func(c *cobra.Command, a []string) error {
			if err := forms.CheckNodeName(a[0]); err != nil {
				return usageError{err}
			}
			client, err := w.open()
			if err != nil {
				return err
			}
			done, err := client.Remove(c.Context(), a[0], cluster.RemoveOptions{Force: force, Now: time.Now()})
			for _, d := range done {
				s.note("removed %s\n", d)
			}
			return err
		},
	}
	w.flags(c)
	c.Flags().BoolVar(&force, "force", false, "remove it even though it is Ready")
	return c
}
