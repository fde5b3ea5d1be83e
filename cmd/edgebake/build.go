package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/outputs"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/builder/signing"
	"github.com/edgebake/edgebake/cmd/internal/cli"
	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/bytesize"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/configs/strict"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/spf13/cobra"
)

// imageFlags are the flags of all commands that resolve an Image.
type imageFlags struct {
	outputs.Options
	cache  string
	archs  []string
	locked bool
}

func (o *imageFlags) declare(c *cobra.Command) {
	cacheFlag(c.Flags(), &o.cache)
	c.Flags().StringVar(&o.Lock, "lock", "", "lock file (default: beside the Image, image.lock for image.yaml)")
	c.Flags().BoolVar(&o.locked, "locked", false, "reject every input that is not in the lock")
	c.Flags().StringSliceVar(&o.archs, "arch", nil, "`architecture` to build for, instead of the Image's: "+strings.Join(configs.Architectures(), " or "))
	cli.Complete(c, "arch", configs.Architectures()...)
}

// open reads the Image and its locks, and opens the cache.
func (o *imageFlags) open(s streams, image string) ([]outputs.Target, documents.Source, error) {
	if err := o.checkArchs(); err != nil {
		return nil, documents.Source{}, err
	}
	images, doc, err := (&cli.DocumentFlags{}).Reader(s).Images(image, o.archs...)
	if err != nil {
		return nil, doc, err
	}
	if o.locked && o.Lock == "" && image == "-" {
		return nil, doc, cli.Usage(errors.New("--locked: an Image from standard input has no lock file: name one with --lock"))
	}
	o.Document = image
	targets, err := o.OfImages(images, configs.ListedArchitectures(doc.Data), builder.Options{Dir: doc.Dir(), Version: version.String(), Published: version.Published(), Locked: o.locked})
	if err != nil {
		return nil, doc, err
	}
	return targets, doc, o.openCache(targets)
}

func (o *imageFlags) openCache(targets []outputs.Target) error {
	cache, err := openCache(o.cache)
	for i := range targets {
		targets[i].Options.Cache = cache
	}
	return err
}

// checkArchs rejects architectures that edgebake does not support.
func (o *imageFlags) checkArchs() error {
	var errs []error
	for i, a := range o.archs {
		if !slices.Contains(configs.Architectures(), a) {
			errs = append(errs, fmt.Errorf("--arch %s: want %s%s", a, strings.Join(configs.Architectures(), " or "), strict.DidYouMean(a, configs.Architectures())))
		} else if slices.Contains(o.archs[:i], a) {
			errs = append(errs, fmt.Errorf("--arch %s is given twice", a))
		}
	}
	if len(errs) > 0 {
		return cli.Usage(errors.Join(errs...))
	}
	return nil
}

// openOne is like open, for commands that work on one image.
func (o *imageFlags) openOne(s streams, image string) (outputs.Target, documents.Source, error) {
	targets, doc, err := o.open(s, image)
	if err != nil {
		return outputs.Target{}, doc, err
	}
	if len(targets) > 1 {
		targets[0].Options.Cache.Close()
		return outputs.Target{}, doc, cli.Usage(fmt.Errorf("%s is for %s: choose one with --arch", image, strings.Join(configs.ListedArchitectures(doc.Data), " and ")))
	}
	return targets[0], doc, nil
}

// buildFlags are the flags of build.
type buildFlags struct {
	imageFlags
	plan           string
	update, asJSON bool
}

// openPlan reads the plan named by --plan, and opens the cache.
func (b *buildFlags) openPlan(s streams) ([]outputs.Target, documents.Source, error) {
	doc, err := (&cli.DocumentFlags{}).Reader(s).Read(b.plan)
	if err != nil {
		return nil, doc, err
	}
	p, err := plan.Decode(doc.Data)
	if err != nil {
		name := b.plan
		if name == "-" {
			name = "standard input"
		}
		return nil, doc, outputs.EachNamed(name, err)
	}
	targets := outputs.OfPlan(p, builder.Options{Dir: doc.Dir(), Version: version.String(), Published: version.Published()})
	return targets, doc, b.openCache(targets)
}

func newBuild(s streams) *cobra.Command {
	var b buildFlags
	c := &cobra.Command{
		Use:               "build [IMAGE]",
		ValidArgsFunction: cli.CompleteFiles(documents.Extensions),
		Short:             "Bake a golden disk image",
		Long: `Build bakes the golden image that an Image document describes. It writes
NAME.report.json (inputs, free space, times) and NAME.sbom.spdx.json beside the
image, and the lock beside the document. The lock pins every input, and records
the largest root file system that machines in the field can accept as an update.
A later build uses the locked inputs, and updates the lock where the document has
changed. With --locked it uses exactly the locked inputs or fails; with --update it
uses the newest inputs.

Inputs that were fetched or made before come from the cache. An output whose name
ends in .raw.zst is compressed (zstd, seekable).

An Image for several architectures (arch: [amd64, arm64]) becomes one image for
each, NAME-ARCH.raw, each with its own lock, image-ARCH.lock. --arch selects other
architectures, or some of the document's; with a single one, --output and --lock
are the exact names. A Debian base for an architecture other than this computer's
is made once, in emulation (qemu-user).

A plan holds everything that the result depends on. --plan builds from a plan that
the same version of edgebake made elsewhere, and rejects every input that is not
in it. Relative paths in the plan begin at the plan's directory.

--sign signs the golden digest and image.json with a minisign secret key, so that
verify and flash can check who made the image. The password of an encrypted key is
read from the environment variable
` + signing.PasswordVariable + `, else from the terminal, else from standard input.`,
		Example: `  edgebake build image.yaml
  edgebake build image.yaml --output node.raw.zst --locked
  edgebake build image.yaml --output node.raw.zst --sign office.key
  edgebake build image.yaml --arch arm64
  edgebake build image.yaml --arch amd64,arm64 --output node.raw # node-amd64.raw, node-arm64.raw
  edgebake build image.yaml --force --update                 # with today's packages
  edgebake build image.yaml --force --export-base base.tar   # keep the Debian base ...
  edgebake build image.yaml --force --locked --base base.tar # ... and build from it
  edgebake build --plan plan.json                            # from edgebake plan --output json`,
		Args: cli.Args(1, 1, "one Image document"),
		RunE: func(c *cobra.Command, args []string) error {
			if b.update && (b.locked || b.Base != "") {
				return cli.Usage(errors.New("--update renews inputs, but --locked and --base keep them: choose one"))
			}
			b.Document = args[0]
			targets, doc, err := b.open(s, args[0])
			if err != nil {
				return err
			}
			return b.run(c.Context(), s, doc, targets)
		},
	}
	b.declare(c)
	f := c.Flags()
	cli.FileFlag(c, &b.Output, "output", "image to write, .raw or .raw.zst (default NAME.raw)", cli.ImageExtensions...)
	f.BoolVar(&b.Force, "force", false, "replace an existing image, its report and its SBOM")
	f.BoolVar(&b.update, "update", false, "take the newest packages and tags, and renew the lock")
	f.StringVar(&b.Base, "base", "", "use this Debian base, which --export-base wrote, instead of making one")
	f.StringVar(&b.ExportBase, "export-base", "", "also write the Debian base to this file, for --base in later builds")
	cli.FileFlag(c, &b.Sign, "sign", "minisign secret key to sign the image with")
	f.BoolVar(&b.asJSON, "json", false, "print events and the report as JSON, one object a line")
	cli.FileFlag(c, &b.plan, "plan", "build from this plan, which edgebake plan --output json printed, instead of an Image", "json")
	cli.TakesDocument(s, c, 0, cli.ImageHere())
	b.allowPlan(s, c)
	return c
}

// allowPlan makes --plan an alternative to the document operand. It wraps the command's Args and
// RunE.
func (b *buildFlags) allowPlan(s streams, c *cobra.Command) {
	check, run := c.Args, c.RunE
	c.Args = func(c *cobra.Command, args []string) error {
		if b.plan == "" {
			return check(c, args)
		}
		if len(args) > 0 {
			return cli.Usage(fmt.Errorf("--plan and the Image document %s exclude each other: choose one", args[0]))
		}
		for _, other := range []string{"filename", "lock", "locked", "arch", "update"} {
			if c.Flags().Changed(other) {
				return cli.Usage(fmt.Errorf("--%s has no effect with --plan, since a plan pins all inputs: leave it out", other))
			}
		}
		return nil
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if b.plan == "" {
			return run(c, args)
		}
		b.Document = b.plan
		targets, doc, err := b.openPlan(s)
		if err != nil {
			return err
		}
		return b.run(c.Context(), s, doc, targets)
	}
}

// prepare applies the flags to the targets. It reports errors early that would otherwise appear
// only at the end of a build.
func (b *buildFlags) prepare(s streams, targets []outputs.Target) error {
	errs := []error{b.Apply(targets)}
	var key signing.Key
	if b.Sign != "" {
		var err error
		key, err = signing.OpenKey(b.Sign, b.Document == "-")
		errs = append(errs, err)
	}
	if err := joined.Distinct(errs...); err != nil || b.Sign == "" {
		return err
	}
	// Ask for the password after all other checks, but before the long work.
	secret, err := key.Unlock(askPassword(s))
	if err != nil {
		return err
	}
	for i := range targets {
		o, date := &targets[i].Options, targets[i].Date
		o.Sign = func(golden string, info []byte) (string, error) {
			return slot.SignImage(golden, info, secret, date)
		}
		o.SignIndex = func(body []byte) (string, error) { return slot.SignIndex(body, secret, date) }
	}
	return nil
}

// run builds the targets, writes the files that belong to each image, and prints the results.
func (b *buildFlags) run(ctx context.Context, s streams, doc documents.Source, targets []outputs.Target) error {
	defer targets[0].Options.Cache.Close()
	for i := range targets {
		if b.update {
			targets[i].Options.Lock, targets[i].Options.Update = nil, true
		}
	}
	blocked := b.prepare(s, targets)
	if b.keepsCurrent() && joined.AllAre(blocked, fs.ErrExist) {
		var reports []*builder.Report
		if reports, blocked = outputs.Current(ctx, targets, doc.Name, blocked); blocked == nil {
			return b.printCurrent(s, targets, reports)
		}
	}
	if blocked != nil {
		return blocked
	}
	show := s.Display(b.asJSON)
	// The targets share the cache, which may report warnings from any goroutine.
	var mu sync.Mutex
	event := func(e builder.Event) {
		mu.Lock()
		defer mu.Unlock()
		show.Event(e)
	}
	var jobs []builder.Job
	for _, t := range targets {
		j := t.Job
		j.Options.ShowsDetails = s.Verbose() && !b.asJSON
		j.Options.Events = event
		if len(targets) > 1 && !b.asJSON {
			j.Options.Events = func(e builder.Event) {
				e.Step = e.Arch + " " + e.Step
				event(e)
			}
		}
		jobs = append(jobs, j)
	}
	var results []*builder.Result
	var complete []string
	err := builder.BuildEach(ctx, jobs, func(i int, r *builder.Result) error {
		results, complete = append(results, r), append(complete, targets[i].Options.Output)
		if err := targets[i].Write(r); err != nil || !b.asJSON {
			return err
		}
		return printResult(s, targets[i].Options.Output, r.Report)
	})
	show.Close()
	if !b.asJSON && !s.Quiet() {
		for i, r := range results {
			printReport(s, targets[i].Options.Output, r.Report)
		}
	}
	if err != nil && len(complete) > 0 {
		return withImage(ctx, strings.Join(complete, " and "), doc.Explain(err))
	}
	if err != nil || b.ExportBase == "" {
		return doc.Explain(err)
	}
	if image, err := b.ExportBases(ctx, targets, results); err != nil {
		return withImage(ctx, image, err)
	}
	return nil
}

// keepsCurrent reports whether the build does nothing if its images exist and are current.
func (b *buildFlags) keepsCurrent() bool {
	return !b.update && b.Base == "" && b.ExportBase == "" && b.Sign == ""
}

// printCurrent prints the reports of images that are up to date.
func (b *buildFlags) printCurrent(s streams, targets []outputs.Target, reports []*builder.Report) error {
	for i, r := range reports {
		out := targets[i].Options.Output
		if b.asJSON {
			if err := printResult(s, out, r); err != nil {
				return err
			}
			continue
		}
		s.Note("%s is up to date: no input has changed since it was built (plan %.16s); --force builds it again\n", out, r.Plan)
		printNext(s, out)
	}
	return nil
}

// printResult prints a report as JSON.
func printResult(s streams, out string, r *builder.Report) error {
	return json.NewEncoder(s.JSON()).Encode(map[string]any{"state": "result", "output": out, "report": r})
}

// printNext suggests the next commands for an image.
func printNext(s streams, out string) {
	s.Note("Next: edgebake flash %s /dev/sdX --site site.yaml (edgebake devices lists the disks), or for a virtual machine: edgebake stamp %[1]s site.yaml --output SITE%s\n", out, out[len(outputs.Stem(out)):])
}

func printReport(s streams, out string, r *builder.Report) {
	fmt.Fprintf(s.Out, "%s: %s, Kubernetes %s, containerd %s, Linux %s\n", out, r.Info.Arch, r.Info.Kubernetes, r.Info.Containerd, r.Info.Kernel)
	if boards := r.Info.Boards; len(boards) > 0 {
		fmt.Fprintf(s.Out, "  boots on %s\n", strings.Join(boards, " and "))
	}
	for _, p := range r.Partitions {
		sizes := media.Partition{Label: p.Label, FS: p.FS, Size: p.Size}
		if p.Files > 0 { // the same sizes as inspect, which reads them from the file system
			sizes.Free, sizes.Reserve = p.Free, p.Reserve()
			sizes.Used = p.Size - p.Free - sizes.Reserve
		}
		printSizes(s.Out, sizes)
		switch {
		case p.Files > 0:
			fmt.Fprintf(s.Out, "  %s", configs.Count(p.Files, "file"))
		case p.Label == ondisk.LabelRootB:
			fmt.Fprintf(s.Out, "  an update may bring a root file system of up to %s", bytesize.Human(p.Room))
		}
		fmt.Fprintln(s.Out)
	}
	fmt.Fprintf(s.Out, "  %s, %s", configs.Count(r.Packages, "Debian package"), configs.Count(len(r.Info.Images), "container image"))
	if len(r.Info.Images) > 0 {
		fmt.Fprintf(s.Out, " of %s in %s", bytesize.Human(r.Images.Size), configs.Count(r.Images.Layers, "layer"))
	}
	fmt.Fprintln(s.Out)
	fmt.Fprintf(s.Out, "  plan   %s\n  golden %s\n", r.Plan, r.Golden)
	printNext(s, out)
}

// withImage returns err. After an interrupt, it adds that the image is complete and kept.
func withImage(ctx context.Context, image string, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return unfinished{fmt.Errorf("interrupted after %s was complete: %w", image, err)}
}
