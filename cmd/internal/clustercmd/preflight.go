package clustercmd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/spf13/cobra"
)

// preflightFlags are the flags of `edgebake preflight`.
type preflightFlags struct {
	cli.DocumentFlags
	cli.ClusterFlags
	image      string
	shipWithin cli.Span
	offline    bool
	output     console.Form
}

// NewPreflight returns `edgebake preflight`.
func NewPreflight(s console.Streams) *cobra.Command {
	o := preflightFlags{shipWithin: cli.Span(72 * time.Hour)}
	c := &cobra.Command{
		Use:               "preflight SITE|INVENTORY",
		ValidArgsFunction: cli.CompleteFiles(documents.Extensions),
		Short:             "Check whether machines can join their cluster",
		Long: `Preflight checks Sites before the machines leave: names, MACs and addresses,
networks and the VIP; with --image whether the image supports them; and the cluster,
which it only reads: each API server (master), its certificate, the CA hash, the token,
the version, and whether the node names are free. With --kubeconfig it also checks the
token's usages, groups and expiry, and the objects that OpenYurt nodes need.

Each line begins with ✓, with ✗ and has the fix, or with – if the result is unknown.
The exit code is 1 if anything failed.`,
		Example: `  edgebake preflight site.yaml --image my-edge.raw
  edgebake preflight stores.yaml --image my-edge.raw --kubeconfig admin.conf --ship-within 14d
  edgebake preflight site.yaml --offline`,
		Args: cli.Args(1, 1, "a Site or Inventory document"),
		RunE: func(c *cobra.Command, a []string) error {
			if err := o.check(c); err != nil {
				return err
			}
			checks, err := checkAll(c.Context(), s, a[0], o)
			if err != nil {
				return err
			}
			err = o.output.Print(s, struct {
				Checks []cluster.Check `json:"checks"`
			}{checks}, func() { printChecks(s, checks) })
			if err != nil {
				return err
			}
			failed := 0
			for _, k := range checks {
				if k.State == cluster.CheckFailed {
					failed++
				}
			}
			if failed > 0 {
				return fmt.Errorf("preflight of %s: %s failed", configs.FileName(a[0]), configs.Count(failed, "check"))
			}
			return nil
		},
	}
	f := c.Flags()
	cli.FileFlag(c, &o.image, "image", "image that the Sites are for", cli.ImageExtensions...)
	o.Declare(c, "kubeconfig of a user who may read tokens and nodes")
	f.Var(&o.shipWithin, "ship-within", "time until the last machine is switched on, e.g. 72h or 14d; tokens must be valid for this time")
	f.BoolVar(&o.offline, "offline", false, "use no network: check only the documents and the image")
	o.Secrets(c)
	o.output.Flag(c)
	cli.TakesDocument(s, c, 0, nil)
	return c
}

// check rejects flags that have no effect. It allows --ship-within without --kubeconfig: then a row
// reports that the token's expiry is unknown.
func (o *preflightFlags) check(c *cobra.Command) error {
	switch {
	case o.offline:
		return cli.RejectUnused(c, cli.Unused{Flags: []string{"kubeconfig", "context", "ship-within"}, Purpose: "checks of the cluster, which --offline leaves out: choose one"})
	case o.Kubeconfig == "":
		return cli.RejectUnused(c, cli.Unused{Flags: []string{"context"}, Purpose: "a kubeconfig: add --kubeconfig FILE"})
	}
	return nil
}

// checkAll makes the checks. It returns an error only if they could not be made.
func checkAll(ctx context.Context, s console.Streams, name string, o preflightFlags) ([]cluster.Check, error) {
	doc, err := o.Reader(s).Sites(name)
	var probs configs.Problems
	if err != nil && !errors.As(err, &probs) {
		return nil, err
	}
	checks := cluster.DocumentChecks(probs)
	if probs != nil {
		return checks, nil // errors in the document make further checks useless
	}
	online := cluster.PreflightOptions{Now: time.Now(), ShipWithin: time.Duration(o.shipWithin), Dial: (&net.Dialer{}).DialContext, Timeout: 15 * time.Second}
	if o.image != "" {
		g, err := media.Open(o.image)
		if err != nil {
			return nil, err
		}
		defer g.Close()
		checks = append(checks, imageChecks(g, doc)...)
		online.Kubelet = g.Info().Kubernetes
	}
	if o.offline {
		return checks, nil
	}
	if o.Kubeconfig != "" {
		if online.Client, err = o.Open(); err != nil {
			return nil, err
		}
	}
	return append(checks, cluster.Preflight(ctx, preflightSites(doc), online)...), nil
}

func preflightSites(doc media.Site) []cluster.PreflightSite {
	if doc.Inventory == nil {
		return []cluster.PreflightSite{{Name: doc.Doc.NodeName, Site: doc.Doc}}
	}
	var out []cluster.PreflightSite
	for i := range doc.Inventory.Sites {
		one := &doc.Inventory.Sites[i]
		out = append(out, cluster.PreflightSite{Name: one.Name, Site: &one.Site})
	}
	return out
}

// imageChecks checks the Sites against the image, as stamping does. It returns a check per problem,
// the last one with the fix.
func imageChecks(g *media.Image, doc media.Site) []cluster.Check {
	_, err := g.Slot(doc, media.StampOptions{Undated: true})
	if err == nil {
		return []cluster.Check{{Name: "image", State: cluster.CheckOK, Detail: fmt.Sprintf("%s supports the Sites", g.Info().Name)}}
	}
	var out []cluster.Check
	add := func(problem error) {
		out = append(out, cluster.Check{Name: "image", State: cluster.CheckFailed, Detail: problem.Error()})
	}
	for _, e := range joined.Errors(err) {
		if probs, ok := e.(configs.Problems); ok {
			for _, p := range probs {
				add(p)
			}
		} else {
			add(e)
		}
	}
	out[len(out)-1].Fix = "correct the Site, or build an image that supports it"
	return out
}

func printChecks(s console.Streams, checks []cluster.Check) {
	var rows [][]string
	var marks []string // one for each row
	var notRead []string
	for _, c := range checks {
		if c.Detail == cluster.NotRead {
			notRead = append(notRead, c.Name)
			continue
		}
		first, more, _ := strings.Cut(c.Detail, "\n")
		marks, rows = append(marks, mark(s, c.State)), append(rows, []string{c.Name, c.Site, first})
		if c.Fix != "" {
			more += "\nto fix: " + c.Fix
		}
		for line := range strings.SplitSeq(strings.TrimPrefix(more, "\n"), "\n") {
			if line != "" {
				marks, rows = append(marks, " "), append(rows, []string{"", "", line})
			}
		}
	}
	var table bytes.Buffer
	console.Table(&table, rows...)
	if notRead != nil {
		marks = append(marks, mark(s, cluster.CheckUnknown))
		fmt.Fprintf(&table, "not checked: %s\n", strings.Join(notRead, ", "))
	}
	for line := range strings.Lines(table.String()) {
		io.WriteString(s.Bytes(), marks[0]+" ")
		marks = marks[1:]
		fmt.Fprintln(s.Out, strings.TrimRight(line, " \n"))
	}
}
