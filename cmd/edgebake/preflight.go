package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/configs"
	"github.com/spf13/cobra"
)

// preflightFlags are those of `edgebake preflight`.
type preflightFlags struct {
	secrets    secretFlags
	image      string
	kubeconfig string
	context    string
	shipWithin span
	offline    bool
	output     string
}

func newPreflight(s streams) *cobra.Command {
	o := preflightFlags{shipWithin: span(72 * time.Hour)}
	c := &cobra.Command{
		Use:               "preflight SITE|INVENTORY",
		ValidArgsFunction: completeFiles(documentEndings),
		Short:             "Check whether machines can join their cluster",
		Long: `Preflight checks Sites before the machines leave: names, MACs and addresses,
networks and the VIP; with --image whether the image can serve them; and, reading
only, the cluster: each API server (master), its certificate, the CA hash, the token, the
version, and whether the node names are free. With --kubeconfig it also sees the
token's usages, groups and expiry, and what OpenYurt nodes need of the cluster.

Each line is ✓, ✗ with the fix, or – where unknown. The exit code is 1
if anything failed.`,
		Example: `  edgebake preflight site.yaml --image my-edge.raw
  edgebake preflight stores.yaml --image my-edge.raw --kubeconfig admin.conf --ship-within 14d
  edgebake preflight site.yaml --offline`,
		Args: args(1, 1, "a Site or Inventory document"),
		RunE: func(c *cobra.Command, a []string) error {
			if err := o.check(c); err != nil {
				return err
			}
			checks, err := checkAll(c.Context(), s, a[0], o)
			if err != nil {
				return err
			}
			err = printAs(s, o.output, struct {
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
	f.StringVar(&o.image, "image", "", "image that the Sites are for")
	_ = c.MarkFlagFilename("image", imageEndings...)
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig of somebody who may read tokens and nodes")
	_ = c.MarkFlagFilename("kubeconfig")
	f.StringVar(&o.context, "context", "", "context of the kubeconfig (default: its current one)")
	f.Var(&o.shipWithin, "ship-within", "how long until the last machine is switched on, e.g. 72h or 14d: tokens must live so long")
	f.BoolVar(&o.offline, "offline", false, "ask nobody: check the documents, and the image, alone")
	o.secrets.flags(c)
	outputFlag(c, &o.output)
	takesDocument(s, c, 0, false)
	return c
}

// check says which flags have no effect. --ship-within has one without --kubeconfig:
// a row says that the expiry is unknown.
func (o *preflightFlags) check(c *cobra.Command) error {
	switch {
	case o.offline:
		return rejectIdle(c, idle{flags: []string{"kubeconfig", "context", "ship-within"}, purpose: "questions to the cluster, and --offline asks none: leave --offline out"})
	case o.kubeconfig == "":
		return rejectIdle(c, idle{flags: []string{"context"}, purpose: "--kubeconfig FILE"})
	}
	return nil
}

// checkAll carries out the checks. An error is what keeps it from doing so.
func checkAll(ctx context.Context, s streams, name string, o preflightFlags) ([]cluster.Check, error) {
	doc, err := readSites(s, name, "", o.secrets)
	var probs configs.Problems
	if err != nil && !errors.As(err, &probs) {
		return nil, err
	}
	checks := documentChecks(probs)
	if probs != nil {
		return checks, nil // what is wrong with the document is put right first
	}
	online := cluster.PreflightOptions{Now: time.Now(), ShipWithin: time.Duration(o.shipWithin), Dial: (&net.Dialer{}).DialContext, Timeout: 15 * time.Second}
	if o.image != "" {
		g, err := media.OpenGolden(o.image)
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
	if o.kubeconfig != "" {
		if online.Client, err = cluster.Open(o.kubeconfig, o.context); err != nil {
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

// documentAreas are what a document's problems are about, by the field that
// they are found in; the last is for all others.
func documentAreas() []struct {
	name   string
	fields []string
} {
	return []struct {
		name   string
		fields []string
	}{
		{"names and matches", []string{"name", "nodeName", "match"}},
		{"networks", []string{"network"}},
		{"VIP", []string{"vip", "endpoint"}},
		{"token form", []string{"credentials"}},
		{"CA", []string{"caCertHashes", "caCert", "caFile", "unsafeSkipCAVerification"}},
		{"document", nil},
	}
}

// notRead is the detail of checks that were not made.
const notRead = "the document cannot be read so far"

// documentChecks are what reading the documents has shown. Where a problem is
// of the whole document, its fields have not been looked at.
func documentChecks(probs configs.Problems) []cluster.Check {
	var out []cluster.Check
	taken := map[int]bool{}
	fine := cluster.Check{State: cluster.CheckOK}
	if slices.ContainsFunc(probs, func(p configs.Problem) bool { return slices.Contains([]string{"", "apiVersion", "kind"}, p.Path) }) {
		fine = cluster.Check{State: cluster.CheckUnknown, Detail: notRead}
	}
	for _, area := range documentAreas() {
		failed := false
		for i, p := range probs {
			if taken[i] || area.fields != nil && !slices.Contains(area.fields, topField(p.Path)) {
				continue
			}
			taken[i], failed = true, true
			at := p
			at.Msg = ""
			detail, fix := p.Msg, "correct it there"
			if before, after, ok := strings.Cut(p.Msg, "; "); ok {
				detail, fix = before, after
			}
			out = append(out, cluster.Check{Name: area.name, State: cluster.CheckFailed, Detail: strings.TrimSuffix(at.Error(), ": ") + ": " + detail, Fix: fix})
		}
		if !failed {
			fine.Name = area.name
			out = append(out, fine)
		}
	}
	return out
}

// topField is the field of a Site that a problem's path is in.
func topField(path string) string {
	for _, before := range []string{"sites[", "defaults."} {
		if rest, ok := strings.CutPrefix(path, before); ok {
			if before == "sites[" {
				_, rest, _ = strings.Cut(rest, "].")
			}
			path = rest
		}
	}
	return path[:min(len(path), strings.IndexAny(path+".", ".["))]
}

// imageChecks holds the sites against the image, as stamping does. Each problem has a
// row, the last one the fix of them all.
func imageChecks(g *media.Golden, doc media.Site) []cluster.Check {
	_, err := g.Slot(doc, media.StampOptions{Undated: true})
	if err == nil {
		return []cluster.Check{{Name: "image", State: cluster.CheckOK, Detail: fmt.Sprintf("%s serves the Sites", g.Info().Name)}}
	}
	var out []cluster.Check
	for _, problem := range strings.Split(err.Error(), "\n") {
		out = append(out, cluster.Check{Name: "image", State: cluster.CheckFailed, Detail: problem})
	}
	out[len(out)-1].Fix = "correct the Site, or build an image that can serve it"
	return out
}

func printChecks(s streams, checks []cluster.Check) {
	var table bytes.Buffer
	var marks []string // of the lines
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	var unread []string
	for _, c := range checks {
		if c.Detail == notRead {
			unread = append(unread, c.Name)
			continue
		}
		marks = append(marks, s.mark(c.State))
		fmt.Fprintf(w, " %s\t%s\t%s\n", c.Name, c.Site, c.Detail)
		if c.Fix != "" {
			marks = append(marks, " ")
			fmt.Fprintf(w, " \t\tto fix: %s\n", c.Fix)
		}
	}
	w.Flush()
	if unread != nil {
		marks = append(marks, s.mark(cluster.CheckUnknown))
		fmt.Fprintf(&table, " not checked: %s\n", strings.Join(unread, ", "))
	}
	for line := range strings.Lines(table.String()) {
		if len(marks) > 0 { // a check's detail may have lines of its own
			io.WriteString(s.bytes(), marks[0])
			marks = marks[1:]
		}
		fmt.Fprintln(s.Out, strings.TrimRight(line, " \n"))
	}
}
