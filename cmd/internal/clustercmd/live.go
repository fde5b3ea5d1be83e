package clustercmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/cluster/reports"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/spf13/cobra"
)

// prepareFlags are the VIP and the node pools for prepare and verify.
type prepareFlags struct{ cluster.PrepareOptions }

func (w *prepareFlags) declare(c *cobra.Command) {
	w.VIP, w.Pools = "10.103.97.2", map[string]string{}
	c.Flags().Var((*address)(&w.VIP), "vip", "VIP of the Sites, which kube-proxy in mode ipvs must exclude")
	c.Flags().Var(nodePools(w.Pools), "nodepool", "node pool that must exist, as NAME=Edge or NAME=Cloud (can be repeated)")
}

// address is the value of a flag: an IP address, or empty.
type address string

func (a *address) String() string { return string(*a) }
func (a *address) Type() string   { return "string" }

func (a *address) Set(s string) error {
	if _, err := netip.ParseAddr(s); err != nil && s != "" {
		return errors.New("not an IP address")
	}
	*a = address(s)
	return nil
}

// nodePools is the value of a flag that lists node pools with their types.
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

func newClusterPrepare(s console.Streams) *cobra.Command {
	var want prepareFlags
	var dryRun bool
	c := onCluster(&cobra.Command{
		Use:   "prepare",
		Short: "Create, on a running cluster, the objects that nodes need",
		Long: `Prepare makes and changes the objects that edgebake's nodes need on a kubeadm
cluster:

  - the list of API servers (masters), kube-public/edgebake-masters, and nodes' right to read it
  - kube-proxy in mode ipvs: the VIP among excludeCIDRs
  - where OpenYurt is installed: yurthub's ClusterRole and its binding,
    node pools that --nodepool names, and DNS that stays within a pool

Prepare records in the cluster (kube-system/edgebake-prepared) how each object was
before, for edgebake cluster revert. --dry-run shows each change as the API server would
make it. Files on control-plane nodes are never touched.`,
		Example: `  edgebake cluster prepare --dry-run
  edgebake cluster prepare --nodepool shops=Edge`,
	}, func(ctx context.Context, client *cluster.Client, _ []string) error {
		plan, err := client.Plan(ctx, want.PrepareOptions)
		if err != nil {
			return err
		}
		if len(plan) == 0 {
			s.Note("%s has everything required: nothing changed\n", client.Server())
			return nil
		}
		if dryRun {
			for i := range plan {
				fmt.Fprintf(s.Out, "%s (%s)\n%s\n", &plan[i], plan[i].Why, plan[i].Diff())
			}
			fmt.Fprintf(s.Out, "%s, none made (--dry-run)\n", configs.Count(len(plan), "change"))
			return nil
		}
		if err := client.Prepare(ctx, plan); err != nil {
			return err
		}
		for i := range plan {
			verb := "changed"
			if plan[i].Before == nil {
				verb = "made"
			}
			s.Note("%s %s (%s)\n", verb, &plan[i], plan[i].Why)
		}
		for i := range plan {
			if then := plan[i].NextStep(); then != "" {
				s.Note("Next: %s\n", then)
			}
		}
		s.Note("To undo the changes: edgebake cluster revert\n")
		return nil
	})
	want.declare(c)
	c.Flags().BoolVar(&dryRun, "dry-run", false, "show the changes and make none")
	return c
}

func newClusterVerify(s console.Streams) *cobra.Command {
	var want prepareFlags
	var endpoint string
	var output console.Form
	c := &cobra.Command{
		Use:   "verify",
		Short: "Check that a running cluster has everything that its nodes need",
		Long: `Verify checks the objects that nodes need on a kubeadm cluster and prints a list:
✓ present, ✗ missing, with its fix, – unknown or not needed. It changes nothing. The
exit code is 1 if something is missing.`,
		Example: `  edgebake cluster verify --nodepool shops=Edge
  edgebake cluster verify -o json`,
	}
	want.declare(c)
	c.Flags().StringVar(&endpoint, "endpoint", "apiserver.cluster.local", "endpoint of the Sites")
	output.Flag(c)
	return onCluster(c, func(ctx context.Context, client *cluster.Client, _ []string) error {
		found, err := client.Verify(ctx, want.PrepareOptions, endpoint)
		if err != nil {
			return err
		}
		expiring, err := client.ExpiryChecks(ctx, time.Now())
		if err != nil {
			return err
		}
		found = append(found, expiring...)
		bad := 0
		for _, f := range found {
			if f.State == cluster.CheckFailed {
				bad++
			}
		}
		err = output.Print(s, found, func() {
			for _, f := range found {
				io.WriteString(s.Bytes(), mark(s, f.State))
				fmt.Fprintf(s.Out, " %s\n", f.Name)
				if f.Detail != "" {
					fmt.Fprintf(s.Out, "    %s\n", strings.ReplaceAll(f.Detail, "\n", "\n    "))
				}
				if f.Fix != "" {
					fmt.Fprintf(s.Out, "    to fix: %s\n", f.Fix)
				}
			}
		})
		if err == nil && bad > 0 {
			err = fmt.Errorf("verifying %s: %d of %d checks failed", client.Server(), bad, len(found))
		}
		return err
	})
}

// mark returns the symbol for a check's state. It may contain color codes, so print it with Bytes.
func mark(s console.Streams, state string) string {
	switch state {
	case cluster.CheckOK:
		return s.Colored("✓", console.Green)
	case cluster.CheckFailed:
		return s.Colored("✗", console.Red)
	}
	return s.Colored("–", console.Yellow)
}

func newClusterRevert(s console.Streams) *cobra.Command {
	var dryRun bool
	c := onCluster(&cobra.Command{
		Use:   "revert",
		Short: "Undo the changes of prepare",
		Long: `Revert restores each object that edgebake cluster prepare changed, from the record
in the cluster, and removes the objects that prepare made. An object that was
changed again after prepare is reported, and neither it nor its record is changed.`,
		Example: `  edgebake cluster revert --dry-run
  edgebake cluster revert`,
	}, func(ctx context.Context, client *cluster.Client, _ []string) error {
		act := client.Revert
		if dryRun {
			act = client.RevertPlan
		}
		done, err := act(ctx)
		if err != nil {
			return err
		}
		if len(done) == 0 {
			s.Note("%s: nothing to revert\n", client.Server())
		}
		var kept []error
		for i := range done {
			d := &done[i]
			switch {
			case d.Kept != "":
				kept = append(kept, fmt.Errorf("reverting %s: %s", &d.Change, d.Kept))
			case !dryRun:
				s.Note("reverted %s\n", &d.Change)
			}
			if dryRun {
				fmt.Fprintf(s.Out, "%s\n%s\n", &d.Change, d.Diff())
			}
		}
		return errors.Join(kept...)
	})
	c.Flags().BoolVar(&dryRun, "dry-run", false, "show the changes and make none")
	return c
}

func newClusterStatus(s console.Streams) *cobra.Command {
	var output console.Form
	var received string
	var watch bool
	c := onCluster(&cobra.Command{
		Use:   "status",
		Short: "Show the state of each node",
		Long: `Status lists a cluster's nodes, and the nodes that tokens were made for:

  waiting    the token exists, the node does not
  joining    its certificate is not approved
  notReady   it has joined and is not Ready
  ready

With --reports it also reads what ` + "`edgebake cluster listen`" + ` has received:

  booting    first boot is running
  failed     first boot failed; the phase and the fix are shown`,
		Example: `  edgebake cluster status --watch
  edgebake cluster status --reports reports
  edgebake cluster status -o json`,
	}, func(ctx context.Context, client *cluster.Client, _ []string) error {
		expiring, err := client.ExpiryChecks(ctx, time.Now())
		if err != nil {
			return err
		}
		for _, e := range expiring {
			if e.State == cluster.CheckFailed {
				s.Warn("%s: %s\n  to fix: %s", e.Name, e.Detail, e.Fix)
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
		all, err := ask(ctx)
		for err == nil && watch {
			if err := printStatus(s, output, all); err != nil {
				return err
			}
			all, err = nextStatus(ctx, ask, all)
		}
		if err != nil {
			return err
		}
		return printStatus(s, output, all)
	})
	output.Flag(c)
	cli.DirFlag(c, &received, "reports", "", "directory of the reports that cluster listen received")
	c.Flags().BoolVarP(&watch, "watch", "w", false, "print the status again after each change, until interrupted")
	return c
}

func printStatus(s console.Streams, output console.Form, all []cluster.Site) error {
	return output.Print(s, all, func() {
		if len(all) == 0 {
			fmt.Fprintln(s.Out, "The cluster has no nodes, and no tokens for new ones.")
			return
		}
		rows := [][]string{{"NODE", "STATE", "SINCE", "DETAIL", "TO FIX"}}
		for _, n := range all {
			rows = append(rows, []string{n.Node, n.State, timeText(n.Since), n.Detail, n.Fix})
		}
		console.Table(s.Out, rows...)
	})
}

// timeText formats a time for tables; the zero time is "".
func timeText(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Format(time.RFC3339)
}

// watchEvery is the interval between queries of --watch. Each query lists all nodes.
const watchEvery = 5 * time.Second

// nextStatus queries the status until it differs from before, and returns it.
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

func newClusterRemove(s console.Streams) *cobra.Command {
	var force bool
	c := onCluster(&cobra.Command{
		Use:   "remove NODE",
		Short: "Remove a node, so that another machine can take its name",
		Long: `Remove takes a node out of a running cluster: the tokens made for it, its
requests for certificates, and the Node. A Node that is Ready needs --force; a
control-plane node is rejected, since its member of etcd would stay.`,
		Example: `  edgebake cluster remove shop-7`,
		Args: func(c *cobra.Command, a []string) error {
			if err := cli.Args(1, 1, "the name of one node")(c, a); err != nil {
				return err
			}
			if err := forms.CheckNodeName(a[0]); err != nil {
				return cli.Usage(err)
			}
			return nil
		},
	}, func(ctx context.Context, client *cluster.Client, a []string) error {
		done, err := client.Remove(ctx, a[0], cluster.RemoveOptions{Force: force, Now: time.Now()})
		for _, d := range done {
			s.Note("removed %s\n", d)
		}
		return err
	})
	c.Flags().BoolVar(&force, "force", false, "remove the node even if it is Ready")
	return c
}
