package clustercmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/carry"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/transfer"
	"github.com/edgebake/edgebake/cluster"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/forms"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/ondisk/order"
	"github.com/spf13/cobra"
)

// updateFlags are the flags of cluster update.
type updateFlags struct {
	rollout                             cluster.Rollout
	rings, image                        string
	registry                            carry.Options
	selectors, from                     []string
	dryRun, pause, resume, stop, status bool
	soak, drain, restart, fetch         cli.Span
	output                              console.Form
}

func newClusterUpdate(s console.Streams) *cobra.Command {
	u := &updateFlags{drain: cli.Span(15 * time.Minute), restart: cli.Span(2 * time.Hour), fetch: cli.Span(48 * time.Hour)}
	c := &cobra.Command{
		Use:   "update [IMAGE[@sha256:GOLDEN]]",
		Short: "Update the machines of nodes to another image",
		Long: `Update orders the machines of worker nodes to install the system of another image, some
at a time, and waits until they run it and are Ready. The machines fetch IMAGE: the URL
of a .raw.zst on a web server that supports range requests, or
oci://REGISTRY/REPOSITORY:TAG, to which edgebake push sent it. The image must be signed
with a key that is in the image of the machines (updates.keys).

Each node fetches first, then is cordoned and drained, then restarts. If the new system
does not work, the machine returns to the previous system automatically. The rollout stops
once --budget nodes have failed. Nodes that are drained or restart, and nodes that failed
after that, are together never more than the budget. A node that fails earlier, for example
because it cannot fetch the image, keeps running, and so is not counted here.

Control-plane nodes are left out unless a selector matches them. They come last, one at a
time, and the rollout stops if one of them fails.

All state is in the annotations of the Nodes (edgebake.io/update, -status and -rollout).
The command can be killed at any point: run again, it continues.`,
		Example: `  edgebake cluster update https://images.example.com/my-edge.raw.zst --dry-run
  edgebake cluster update oci://registry.example.com/edge/my-edge:2026.11 --rings ring=canary,shops --parallel 5% --budget 3 --soak 1h --window 22:00-05:00
  edgebake cluster update --status
  edgebake cluster update --stop`,
		Args: cli.Args(0, 1, "one image"),
	}
	u.declare(c)
	return onClusterIf(c, u.check, func(ctx context.Context, client *cluster.Client, a []string) error { return u.run(ctx, s, client, a) })
}

func (u *updateFlags) declare(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&u.rings, "rings", "", "update the nodes with the first value of this label, then the nodes with the next value: `KEY=VALUE,VALUE`")
	f.StringArrayVarP(&u.selectors, "selector", "l", nil, "update the nodes that this `selector` of labels matches, as with kubectl; repeated, each is a ring (default: all worker nodes)")
	f.Var(&u.rollout.Parallel, "parallel", "number or percentage of nodes that fetch or restart at the same time")
	f.Var(&u.rollout.Budget, "budget", "stop the rollout when this number or percentage of nodes has failed; at most this many restart at the same time")
	f.Var(&u.soak, "soak", "time that all nodes of a ring stay Ready before the next ring begins, e.g. 1h")
	f.Var(&u.rollout.Window, "window", "time of each day in which orders are given and machines restart, in this computer's time zone")
	f.BoolVar(&u.rollout.Order.NoDrain, "no-drain", false, "do not cordon and drain nodes before they restart")
	f.Var(&u.drain, "drain-timeout", "time after which a node that cannot be drained has failed")
	f.Var(&u.restart, "restart-timeout", "time after which a node that restarts has failed")
	f.Var(&u.fetch, "fetch-timeout", "time after which a node that has not fetched everything has failed")
	f.StringVar(&u.rollout.Order.MaxBytes, "max-bytes", "", "maximum number of bytes that each machine fetches, e.g. 20M; required for machines with a metered link")
	f.StringVar(&u.rollout.Order.Rate, "limit-rate", "", "maximum number of bytes that each machine fetches per second, e.g. 500k")
	cli.FileFlag(c, &u.image, "image", "local copy of the image, if this computer cannot reach IMAGE", cli.ImageExtensions...)
	cli.FileFlag(c, &u.registry.AuthFile, "auth-file", "docker config.json with the login of the registry, for this computer (default: the user's own)", "json")
	f.StringArrayVar(&u.from, "from", nil, "with --dry-run: an image that nodes run now, to count the bytes that they would fetch (can be repeated)")
	f.BoolVar(&u.rollout.Retry, "retry", false, "order nodes that have failed to try again")
	f.BoolVar(&u.dryRun, "dry-run", false, "show which nodes get the order, and change nothing")
	f.BoolVar(&u.status, "status", false, "show the state of the update on each node")
	f.BoolVar(&u.pause, "pause", false, "pause the update on all machines until --resume")
	f.BoolVar(&u.resume, "resume", false, "undo --pause or --stop")
	f.BoolVar(&u.stop, "stop", false, "remove all orders from the cluster; machines accept no new one until --resume")
	u.output.Flag(c)
}

// check validates the flags, and sets the fields of the rollout.
func (u *updateFlags) check(c *cobra.Command, a []string) error {
	err := u.checkMode(a)
	if u.status || u.pause || u.resume || u.stop {
		return errors.Join(err, cli.RejectUnused(c, cli.Unused{Flags: []string{"rings", "selector", "parallel", "budget", "soak", "window", "no-drain", "drain-timeout", "restart-timeout", "fetch-timeout", "max-bytes", "limit-rate", "image", "auth-file", "from", "retry"}, Purpose: "the start of an update: name the image, or omit the flag"}))
	}
	if len(u.from) > 0 && !u.dryRun {
		err = errors.Join(err, cli.Usage(errors.New("--from has an effect only with --dry-run: omit --from, or add --dry-run")))
	}
	r := &u.rollout
	r.Soak, r.Drain, r.Restart, r.Fetch = time.Duration(u.soak), time.Duration(u.drain), time.Duration(u.restart), time.Duration(u.fetch)
	return errors.Join(err, u.checkRings(), u.checkOrder(a))
}

// checkMode checks that exactly one thing is requested: an update to the image in a, or one of
// --status, --pause, --resume and --stop.
func (u *updateFlags) checkMode(a []string) error {
	modes := 0
	for _, set := range []bool{u.dryRun, u.status, u.pause, u.resume, u.stop} {
		if set {
			modes++
		}
	}
	alone := modes > 0 && !u.dryRun
	switch {
	case modes > 1:
		return cli.Usage(errors.New("--dry-run, --status, --pause, --resume and --stop exclude each other: choose one"))
	case alone && len(a) > 0:
		return cli.Usage(fmt.Errorf("--status, --pause, --resume and --stop apply to all updates of the cluster: omit %s", a[0]))
	case !alone && len(a) == 0:
		return cli.Usage(errors.New("edgebake cluster update requires an image, or one of --status, --pause, --resume and --stop; see edgebake cluster update --help"))
	}
	return nil
}

// checkRings sets the rings of the rollout.
func (u *updateFlags) checkRings() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, cli.Usage(fmt.Errorf(format, args...))) }
	if u.rings != "" && len(u.selectors) > 0 {
		bad("--rings and --selector exclude each other: choose one")
	}
	r := &u.rollout
	if u.rings != "" {
		var err error
		if r.Rings, err = cluster.Rings(u.rings); err != nil {
			bad("--rings: %w", err)
		}
	}
	for _, text := range u.selectors {
		ring, err := cluster.Selector(text)
		if err != nil {
			bad("--selector: %w", err)
		}
		r.Rings = append(r.Rings, ring)
	}
	if u.soak > 0 && len(r.Rings) < 2 {
		bad("--soak is the time between rings, but there is only one ring: add --rings or a second --selector")
	}
	return errors.Join(errs...)
}

// checkOrder checks the order's limits, and sets the image that the rollout installs.
func (u *updateFlags) checkOrder(a []string) error {
	var errs []error
	o := &u.rollout.Order
	for _, limit := range []struct{ flag, text string }{{"--max-bytes", o.MaxBytes}, {"--limit-rate", o.Rate}} {
		if limit.text == "" {
			continue
		}
		if _, err := forms.ParseSize(limit.text); err != nil {
			errs = append(errs, cli.Usage(fmt.Errorf("%s: %w", limit.flag, err)))
		}
	}
	if len(a) > 0 {
		var given bool
		if o.Image, o.Golden, given = order.CutGolden(a[0]); given {
			if err := order.CheckGolden(o.Golden); err != nil {
				errs = append(errs, cli.Usage(err))
			}
		}
		if err := order.CheckImage(o.Image); err != nil {
			errs = append(errs, cli.Usage(err))
		}
	}
	readable := func(flag, name string) {
		if name == "" {
			return
		}
		if _, err := os.Stat(name); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", flag, err))
		}
	}
	readable("--image", u.image)
	readable("--auth-file", u.registry.AuthFile)
	for _, name := range u.from {
		readable("--from", name)
	}
	return errors.Join(errs...)
}

func (u *updateFlags) run(ctx context.Context, s console.Streams, client *cluster.Client, a []string) error {
	switch {
	case u.status:
		rows, err := client.UpdateStatus(ctx)
		if err != nil {
			return err
		}
		return u.print(s, rows, nil)
	case u.pause, u.stop:
		n, err := client.HaltUpdates(ctx, u.stop)
		word := "paused"
		if u.stop {
			word = "stopped"
		}
		s.Note("%s the updates of %s\n", word, configs.Count(n, "node"))
		if n == 0 && err == nil {
			s.Note("no node has an update order; machines accept no new order until --resume\n")
		}
		return err
	case u.resume:
		n, err := client.ResumeUpdates(ctx)
		s.Note("resumed the updates of %s\n", configs.Count(n, "node"))
		return err
	}
	source, err := u.source(ctx)
	if err != nil {
		return err
	}
	if err := u.read(source); err != nil {
		return err
	}
	rows, err := client.CheckRollout(ctx, &u.rollout)
	if err != nil {
		return err
	}
	if u.dryRun {
		costs, err := u.costs(source)
		if err != nil {
			return err
		}
		return u.print(s, rows, costs)
	}
	s.Note("updating %s to %s (plan %s, golden %s)\n", configs.Count(len(rows), "node"), u.rollout.Info.Name, u.rollout.Info.Plan[:min(12, len(u.rollout.Info.Plan))], u.rollout.Order.Golden[:12])
	err = client.Update(ctx, &u.rollout, func(r cluster.UpdateRow) {
		s.Note("%s\n", strings.TrimSuffix(fmt.Sprintf("%s: %s: %s", r.Node, r.State, r.Detail), ": "))
	}, func(text string) { s.Note("%s\n", text) })
	if err == nil {
		s.Note("all %s run the image\n", configs.Count(len(rows), "node"))
	}
	return err
}

// source returns the image as this computer reads it: the file of --image, or the URL.
func (u *updateFlags) source(ctx context.Context) (media.ImageSource, error) {
	if u.image != "" {
		return media.ImageSource{Name: u.image}, nil
	}
	name := u.rollout.Order.Image
	r, err := u.open(ctx, name)
	if err != nil {
		return media.ImageSource{}, fmt.Errorf("%w; if this computer cannot reach the server, name a copy of the image with --image", err)
	}
	return media.ImageSource{Name: name, Remote: r, Size: r.Size()}, nil
}

// ranges is an image on a server. Each ReadAt sends a range request.
type ranges interface {
	io.ReaderAt
	Size() int64
}

// open opens an image on a web server or in a registry.
func (u *updateFlags) open(ctx context.Context, name string) (ranges, error) {
	if !order.InRegistry(name) {
		return transfer.OpenRemote(ctx, name, nil)
	}
	ref, err := order.ParseRegistry(name)
	if err != nil {
		return nil, err
	}
	u.registry.Insecure = ref.OnLoopback()
	return carry.OpenReader(ctx, ref, u.registry)
}

// read sets the golden digest and the description of the image that the rollout installs.
func (u *updateFlags) read(source media.ImageSource) error {
	r := &u.rollout
	t, err := media.ReadUpdate(source)
	switch {
	case err != nil:
		return err
	case !t.Signed:
		return fmt.Errorf("image %s is not signed, and machines reject unsigned images: build it with --sign", source.Name)
	case r.Order.Golden != "" && r.Order.Golden != t.Golden:
		return fmt.Errorf("image %s is not the image of this update: its golden digest is %s, expected %s", source.Name, t.Golden, r.Order.Golden)
	}
	r.Order.Golden, r.Info = t.Golden, t.Info
	if _, err := order.Parse(r.Order.String()); err != nil { // the server's data is not trusted
		return fmt.Errorf("image %s cannot be ordered: %w", source.Name, err)
	}
	return nil
}

// costs returns the number of bytes that a node fetches, keyed by the plan of its present image.
func (u *updateFlags) costs(source media.ImageSource) (map[string]int64, error) {
	out := map[string]int64{u.rollout.Info.Plan: 0}
	var errs []error
	for _, old := range u.from {
		i, err := media.Inspect(old)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		c, err := media.CostOfUpdate(old, source)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out[i.Image.Plan] = c.Bytes
		for _, why := range c.Rejected {
			errs = append(errs, fmt.Errorf("machines with image %s reject image %s: %s", old, source.Name, why))
		}
	}
	return out, joined.Distinct(errs...)
}

// updateRow is an UpdateRow with the number of bytes that its node has to download.
type updateRow struct {
	cluster.UpdateRow
	Fetch *int64 `json:"fetch,omitempty"` // bytes; nil: unknown
}

// print prints the rows. costs is nil except in a dry run.
func (u *updateFlags) print(s console.Streams, rows []cluster.UpdateRow, costs map[string]int64) error {
	all := make([]updateRow, len(rows))
	for i, r := range rows {
		all[i].UpdateRow = r
		if n, ok := costs[r.Plan]; ok {
			all[i].Fetch = &n
		}
	}
	return u.output.Print(s, all, func() {
		table := [][]string{{"NODE", "STATE", "SINCE", "IMAGE", "PLAN", "DETAIL"}}
		if costs != nil {
			table[0] = []string{"NODE", "RING", "STATE", "IMAGE", "PLAN", "FETCH", "DETAIL"}
		}
		for _, r := range all {
			plan := r.Plan[:min(12, len(r.Plan))]
			if costs == nil {
				table = append(table, []string{r.Node, r.State, timeText(r.Since), r.Image, plan, r.Detail})
				continue
			}
			fetch := "unknown"
			if r.Fetch != nil {
				fetch = bytesize.MB(*r.Fetch)
			}
			table = append(table, []string{r.Node, r.Ring, r.State, r.Image, plan, fetch, r.Detail})
		}
		for i, row := range table {
			if last := len(row) - 1; row[last] == "" {
				table[i] = row[:last]
			}
		}
		console.Table(s.Out, table...)
	})
}
