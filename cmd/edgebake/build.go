package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/ondisk/slot"
	"github.com/spf13/cobra"
)

// imageFlags are those of all commands that resolve an Image.
type imageFlags struct {
	cache  string
	lock   string
	archs  []string
	locked bool
}

// document is an Image document as it was read.
type document struct {
	name string
	data []byte
}

func (f *imageFlags) flags(c *cobra.Command) {
	cacheFlag(c, &f.cache)
	c.Flags().StringVar(&f.lock, "lock", "", "lock file (default: beside the Image, image.lock for image.yaml)")
	c.Flags().BoolVar(&f.locked, "locked", false, "reject every input that is not in the lock")
	c.Flags().StringSliceVar(&f.archs, "arch", nil, "`architecture` to build for, instead of the Image's: "+strings.Join(configs.Architectures(), " or "))
	_ = c.RegisterFlagCompletionFunc("arch", cobra.FixedCompletions(configs.Architectures(), cobra.ShellCompDirectiveNoFileComp))
}

// target is one of the images that a document describes, of one architecture; or that of a
// plan.
type target struct {
	img        *configs.Image // nil with a plan
	plan       *plan.Plan
	name, arch string
	date       time.Time
	builder.Options
	lock string
	// suffix tells the names of its files from those of the document's others;
	// empty where it is the only one that the document has.
	suffix string
}

// open reads the Image and its locks, and opens the cache.
func (f *imageFlags) open(s streams, image string) ([]target, document, error) {
	doc := document{name: image}
	if err := f.checkArchs(); err != nil {
		return nil, doc, err
	}
	var err error
	if doc.data, err = readInput(s, image); err != nil {
		return nil, doc, err
	}
	images, err := configs.ParseImages(image, doc.data, f.archs...)
	if err != nil {
		return nil, doc, err
	}
	warnOfDates(s, image, doc.data, images[0])
	own := configs.ListedArchitectures(doc.data)
	var targets []target
	for _, img := range images {
		t := target{
			img: img, name: img.Name, arch: img.Arch, date: img.SourceTime(),
			Options: builder.Options{Dir: dirOf(image), Version: version.String(), Published: version.Published(), Locked: f.locked},
		}
		if len(own) != 1 || own[0] != img.Arch {
			t.suffix = "-" + img.Arch
		}
		if err := t.readLock(f.lock, image, len(images) > 1); err != nil {
			return nil, doc, err
		}
		targets = append(targets, t)
	}
	cache, err := openCache(f.cache)
	for i := range targets {
		targets[i].Cache = cache
	}
	return targets, doc, err
}

// openPlan reads the plan of --plan, and opens the cache.
func (b *buildFlags) openPlan(s streams, cacheDir string) ([]target, document, error) {
	doc := document{name: b.plan}
	data, err := readInput(s, b.plan)
	if err != nil {
		return nil, doc, err
	}
	p, err := plan.Decode(data)
	if err != nil {
		name := b.plan
		if name == "-" {
			name = "standard input"
		}
		return nil, doc, eachNamed(name, err)
	}
	t := target{
		plan: p, name: p.Name, arch: p.Arch, date: time.Unix(p.SourceDate, 0).UTC(),
		Options: builder.Options{Dir: dirOf(b.plan), Version: version.String(), Published: version.Published()},
	}
	t.Cache, err = openCache(cacheDir)
	return []target{t}, doc, err
}

// eachNamed puts the name of a file before each of its problems.
func eachNamed(name string, err error) error {
	var errs []error
	for _, e := range builder.SplitErrors(err) {
		errs = append(errs, fmt.Errorf("%s: %w", name, e))
	}
	return errors.Join(errs...)
}

// checkArchs rejects architectures that there are no images for.
func (f *imageFlags) checkArchs() error {
	var errs []error
	for i, a := range f.archs {
		if !slices.Contains(configs.Architectures(), a) {
			errs = append(errs, fmt.Errorf("--arch %s: want %s%s", a, strings.Join(configs.Architectures(), " or "), configs.DidYouMean(a, configs.Architectures())))
		} else if slices.Contains(f.archs[:i], a) {
			errs = append(errs, fmt.Errorf("--arch %s is given twice", a))
		}
	}
	if len(errs) > 0 {
		return usageError{errors.Join(errs...)}
	}
	return nil
}

// openOne is open, for commands about one image.
func (f *imageFlags) openOne(s streams, image string) (target, document, error) {
	targets, doc, err := f.open(s, image)
	if err != nil {
		return target{}, doc, err
	}
	if len(targets) > 1 {
		targets[0].Cache.Close()
		return target{}, doc, usageError{fmt.Errorf("%s is for %s: choose one with --arch", image, strings.Join(configs.ListedArchitectures(doc.data), " and "))}
	}
	return targets[0], doc, nil
}

// readLock finds the target's lock: the one named, which several targets have
// each under a name of its own, else that beside the document. There it may
// have the name that it had when the document listed more architectures, or
// fewer; another architecture's stays as it is.
func (t *target) readLock(named, image string, several bool) error {
	names := []string{named}
	switch {
	case named != "" && several:
		names = []string{forArch(named, t.img.Arch), named}
	case named == "" && image == "-" && t.Locked:
		return usageError{errors.New("--locked: an Image from standard input has no lock beside it: name one with --lock")}
	case named == "" && image == "-":
		return nil
	case named == "":
		stem := strings.TrimSuffix(strings.TrimSuffix(image, ".yaml"), ".yml")
		names = []string{stem + t.suffix + ".lock", stem + "-" + t.img.Arch + ".lock", stem + ".lock"}
	}
	t.lock = names[0]
	var foreign error
	for i, name := range names {
		data, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		lock, err := plan.DecodeLock(data)
		if err != nil {
			return eachNamed(name, err)
		}
		if !lock.For(t.img.Arch) {
			if i == 0 {
				foreign = fmt.Errorf("%s: the lock is of an image for another architecture than %s: name another lock with --lock", name, t.img.Arch)
			}
			if i == 0 && named != "" {
				return foreign
			}
			continue
		}
		if foreign != nil {
			t.lock = name
		}
		t.Lock, t.RootRoom = lock, lock.RootRoom
		return nil
	}
	if foreign == nil && t.Locked {
		return fmt.Errorf("--locked: there is no lock %s: build once without --locked to make it, or name another with --lock", t.lock)
	}
	return foreign
}

// forArch is the name for one architecture of a file that there is one of for
// each: node-arm64.raw.zst for node.raw.zst.
func forArch(path, arch string) string {
	ending := filepath.Ext(path)
	for _, double := range []string{".raw.zst", ".tar.zst", ".tar.gz", ".tar.xz", ".tar.bz2"} {
		if strings.HasSuffix(path, double) {
			ending = double
		}
	}
	return strings.TrimSuffix(path, ending) + "-" + arch + ending
}

// explain gives problems of what the document names their place in it.
func (d document) explain(err error) error {
	var out []error
	for _, e := range builder.SplitErrors(err) {
		var field *configs.FieldError
		if errors.As(e, &field) {
			p := configs.Problem{File: d.name, Path: field.Path, Msg: field.Err.Error()}
			p.Line, p.Col = configs.Locate(d.name, d.data, field.Path)
			e = configs.Problems{p}
		}
		out = append(out, e)
	}
	return errors.Join(out...)
}

// buildFile is a file that a build reads or writes.
type buildFile struct {
	name    string // what messages call it as the one to be changed: its flag
	what    string // what they call it otherwise
	path    string
	written bool
}

// reportOf and sbomOf are the files beside an image.
func reportOf(image string) string { return stemOf(image) + ".report.json" }
func sbomOf(image string) string   { return stemOf(image) + ".sbom.spdx.json" }

// otherImage is the image that has the same report and SBOM as this one, where it is
// there: those beside an image that was removed are nobody's.
func otherImage(image string) string {
	for _, ending := range []string{".raw", ".raw.zst"} {
		other := stemOf(image) + ending
		if _, err := os.Lstat(other); err == nil && filepath.Clean(other) != filepath.Clean(image) {
			return other
		}
	}
	return ""
}

// files lists the files of all targets' builds.
func (b *buildFlags) files(targets []target, document, lock string) []buildFile {
	if document == "-" {
		document = ""
	}
	list := []buildFile{
		{name: "document", what: "the document", path: document},
		{name: "--sign", what: "the key of --sign", path: b.sign},
	}
	for i := range targets {
		t := &targets[i]
		of := ""
		if len(targets) > 1 {
			of = " for " + t.arch
		}
		lockName := "lock"
		if lock != "" {
			lockName = "--lock"
		}
		list = append(list,
			buildFile{name: "--base", what: "the base of --base", path: t.Base},
			buildFile{name: "--output", what: "the image" + of, path: t.Output, written: true},
			buildFile{name: "report", what: "the report of the image" + of, path: reportOf(t.Output), written: true},
			buildFile{name: "SBOM", what: "the SBOM of the image" + of, path: sbomOf(t.Output), written: true},
			buildFile{name: lockName, what: "the lock" + of, path: t.lock, written: !t.Locked},
			buildFile{name: "--export-base", what: "the exported base" + of, path: fileFor(targets, t, b.exportBase), written: true},
		)
	}
	return slices.DeleteFunc(list, func(f buildFile) bool { return f.path == "" })
}

// checkDistinct rejects files of which writing one would take away another.
func checkDistinct(files []buildFile) error {
	var errs []error
	for i, f := range files {
		for _, other := range files[:i] {
			if f.written || other.written {
				errs = append(errs, notInput(f.name, f.path, other.what, other.path))
			}
		}
	}
	return builder.JoinDistinct(errs...)
}

// checkFiles finds out before a build what would go wrong at its end.
func (t *target) checkFiles(exportBase string) error {
	errs := []error{builder.CheckOutput(t.Output, t.Force)}
	if errs[0] == nil { // otherwise the same is wrong with these
		for _, f := range []struct{ what, path string }{{"report", reportOf(t.Output)}, {"SBOM", sbomOf(t.Output)}} {
			other := otherImage(t.Output)
			if err := builder.CheckFile(f.path, t.Force || other == ""); err != nil {
				if other != "" {
					f.what += " of " + other + ","
				}
				errs = append(errs, fmt.Errorf("%s %w", f.what, err))
			}
		}
	}
	if t.lock != "" && !t.Locked {
		if err := builder.CheckFile(t.lock, true); err != nil {
			errs = append(errs, fmt.Errorf("lock %w (--lock names another place)", err))
		}
	}
	if exportBase != "" {
		if err := builder.CheckFile(exportBase, t.Force); err != nil {
			errs = append(errs, fmt.Errorf("--export-base: %w", err))
		}
	}
	return errors.Join(errs...)
}

// buildFlags are those of edgebake build, besides imageFlags.
type buildFlags struct {
	plan, output, base, exportBase, sign string
	force, update, asJSON                bool
}

func newBuild(s streams) *cobra.Command {
	var (
		flags imageFlags
		b     buildFlags
	)
	c := &cobra.Command{
		Use:               "build [IMAGE]",
		ValidArgsFunction: completeFiles(documentEndings),
		Short:             "Bake a golden disk image",
		Long: `Build bakes the golden image that an Image document describes. Beside the image
it leaves NAME.report.json (what went in, how full it is, where the time went)
and NAME.sbom.spdx.json, and beside the document its lock, which pins every
input and remembers how large a root the machines in the field can take as an
update. A later build uses what is locked, and renews the lock where the
document asks for something else; with --locked it uses exactly these inputs
or fails, with --update it takes the newest.

What was fetched or made once comes from the cache. A name that ends in
.raw.zst is written compressed (zstd, seekable).

An Image for several architectures (arch: [amd64, arm64]) gives an image for
each, NAME-ARCH.raw, with a lock of its own, image-ARCH.lock. --arch builds for
other architectures than the document's, or for some of them; where that is one,
--output and --lock are exactly its names. A Debian base for another architecture
than this computer's is made in emulation (qemu-user), once.

A plan holds everything that the result depends on. --plan builds from one that was
made elsewhere, by the same edgebake, and rejects every input that is not the
plan's. Files that the plan names are looked for from its own directory.

--sign signs the golden digest and image.json with a minisign secret key; verify,
flash and whoever has the public key can tell the image from others. The password
of an encrypted key is read from the environment variable
` + passwordVariable + `, else from the terminal, else from standard input.`,
		Example: `  edgebake build image.yaml
  edgebake build image.yaml --output node.raw.zst --locked
  edgebake build image.yaml --output node.raw.zst --sign office.key
  edgebake build image.yaml --arch arm64
  edgebake build image.yaml --arch amd64,arm64 --output node.raw # node-amd64.raw, node-arm64.raw
  edgebake build image.yaml --force --update                 # with today's packages
  edgebake build image.yaml --force --export-base base.tar   # keep the made base ...
  edgebake build image.yaml --force --locked --base base.tar # ... and build from it
  edgebake build --plan plan.json                            # of edgebake plan --output json`,
		Args: args(1, 1, "one Image document"),
		RunE: func(c *cobra.Command, args []string) error {
			if b.update && (flags.locked || b.base != "") {
				return usageError{errors.New("--update makes inputs again, --locked and --base keep them: choose one")}
			}
			targets, doc, err := flags.open(s, args[0])
			if err != nil {
				return err
			}
			return b.run(c.Context(), s, doc, targets, flags.lock)
		},
	}
	flags.flags(c)
	f := c.Flags()
	f.StringVarP(&b.output, "output", "o", "", "image to write, .raw or .raw.zst (default NAME.raw)")
	_ = c.MarkFlagFilename("output", imageEndings...)
	f.BoolVar(&b.force, "force", false, "replace an image that is there, its report and its SBOM")
	f.BoolVar(&b.update, "update", false, "take the newest packages and tags, and renew the lock")
	f.StringVar(&b.base, "base", "", "use this exported base instead of making one")
	f.StringVar(&b.exportBase, "export-base", "", "also copy the made base to this file, for --base")
	f.StringVar(&b.sign, "sign", "", "minisign secret key to sign the image with")
	_ = c.MarkFlagFilename("sign")
	f.BoolVar(&b.asJSON, "json", false, "print events and the report as JSON, one object a line")
	f.StringVar(&b.plan, "plan", "", "build from this plan, of edgebake plan --output json, instead of an Image")
	_ = c.MarkFlagFilename("plan", "json")
	takesDocument(s, c, 0, true)
	b.takesPlan(s, c, &flags.cache)
	return c
}

// takesPlan has --plan take the place of the document.
func (b *buildFlags) takesPlan(s streams, c *cobra.Command, cacheDir *string) {
	check, run := c.Args, c.RunE
	c.Args = func(c *cobra.Command, args []string) error {
		if b.plan == "" {
			return check(c, args)
		}
		if len(args) > 0 {
			return usageError{fmt.Errorf("--plan takes the place of the Image %s: choose one", args[0])}
		}
		for _, other := range []string{"filename", "lock", "locked", "arch", "update"} {
			if c.Flags().Changed(other) {
				return usageError{fmt.Errorf("--%s is for an Image, whose inputs a plan has pinned: leave it out, or leave out --plan", other)}
			}
		}
		return nil
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if b.plan == "" {
			return run(c, args)
		}
		targets, doc, err := b.openPlan(s, *cacheDir)
		if err != nil {
			return err
		}
		return b.run(c.Context(), s, doc, targets, "")
	}
}

// apply puts into the targets what the flags say, and finds what would go
// wrong at the end of their builds.
func (b *buildFlags) apply(s streams, targets []target, document, lock string) error {
	var errs []error
	for i := range targets {
		t := &targets[i]
		if b.update {
			t.Lock, t.Update = nil, true
		}
		t.Base, t.Output, t.Force = fileFor(targets, t, b.base), fileFor(targets, t, b.output), b.force
		if t.Output == "" {
			t.Output = t.name + t.suffix + ".raw"
		}
		errs = append(errs, t.checkFiles(fileFor(targets, t, b.exportBase)))
	}
	files := b.files(targets, document, lock)
	errs = append(errs, checkDistinct(files))
	for _, f := range files {
		for _, t := range targets {
			if f.written && t.img != nil {
				errs = append(errs, builder.NotRead(t.img, t.Dir, f.name, f.path))
			}
		}
	}
	var file keyFile
	if b.sign != "" {
		var err error
		file, err = openKey(b.sign, document == "-")
		errs = append(errs, err)
	}
	if err := builder.JoinDistinct(errs...); err != nil || b.sign == "" {
		return err
	}
	// The password is asked for before the long work, and once nothing is known to be wrong.
	key, err := file.unlock(s)
	if err != nil {
		return err
	}
	for i := range targets {
		date := targets[i].date
		targets[i].Sign = func(golden string, info []byte) (string, error) {
			return slot.SignImage(golden, info, key, date)
		}
		targets[i].SignIndex = func(body []byte) (string, error) { return slot.SignIndex(body, key, date) }
	}
	return nil
}

// fileFor is the name that a target's file has where a flag names it: each of several
// targets has one of its own.
func fileFor(targets []target, t *target, file string) string {
	if file == "" || len(targets) == 1 {
		return file
	}
	return forArch(file, t.arch)
}

// run builds the targets, with all that belongs beside each image, and sums up. lock is that
// of --lock.
func (b *buildFlags) run(ctx context.Context, s streams, doc document, targets []target, lock string) error {
	defer targets[0].Cache.Close()
	if err := b.apply(s, targets, doc.name, lock); err != nil {
		return err
	}
	show := newDisplay(s, b.asJSON)
	// The lock is for the cache: builds run one after the other, and the cache that
	// they share sends its warnings from the goroutine of any reader.
	var mu sync.Mutex
	tell := func(e builder.Event) {
		mu.Lock()
		defer mu.Unlock()
		show.event(e)
	}
	var jobs []builder.Job
	for _, t := range targets {
		o := t.Options
		o.ShowsDetails = s.verbose() && !b.asJSON
		o.Events = tell
		if len(targets) > 1 && !b.asJSON {
			o.Events = func(e builder.Event) {
				e.Step = e.Arch + " " + e.Step
				tell(e)
			}
		}
		jobs = append(jobs, builder.Job{Image: t.img, Plan: t.plan, Options: o})
	}
	var results []*builder.Result
	var complete []string
	err := builder.BuildEach(ctx, jobs, func(i int, r *builder.Result) error {
		results, complete = append(results, r), append(complete, targets[i].Output)
		return targets[i].finish(s, r, b.asJSON)
	})
	show.close()
	if !b.asJSON && !s.quiet() {
		for i, r := range results {
			printReport(s, targets[i].Output, r.Report)
		}
	}
	if err != nil && len(complete) > 0 {
		return withImage(ctx, strings.Join(complete, " and "), doc.explain(err))
	}
	if err != nil || b.exportBase == "" {
		return doc.explain(err)
	}
	for i, t := range targets {
		if err := builder.ExportBase(ctx, results[i].Plan, t.Options, fileFor(targets, &t, b.exportBase)); err != nil {
			return withImage(ctx, t.Output, fmt.Errorf("the image is complete, its base is not exported: %w", err))
		}
	}
	return nil
}

// finish writes what goes beside the image, and the lock.
func (t *target) finish(s streams, res *builder.Result, asJSON bool) error {
	report, err := res.Report.Encode()
	if err != nil {
		return err
	}
	beside := []struct {
		path string
		data []byte
	}{{reportOf(t.Output), report}, {sbomOf(t.Output), res.SBOM}}
	if t.lock != "" && !t.Locked {
		pinned := res.Plan.Lock()
		pinned.NarrowRoom(t.RootRoom)
		pinned.NarrowRoom(res.Report.RootRoom())
		lock, err := pinned.Encode()
		if err != nil {
			return err
		}
		beside = append(beside, struct {
			path string
			data []byte
		}{t.lock, lock})
	}
	for _, f := range beside {
		if err := builder.WriteFile(f.path, f.data, 0o666); err != nil {
			return err
		}
	}
	if asJSON {
		return json.NewEncoder(s.json()).Encode(map[string]any{"state": "result", "output": t.Output, "report": res.Report})
	}
	return nil
}

func printReport(s streams, out string, r *builder.Report) {
	fmt.Fprintf(s.Out, "%s: %s, Kubernetes %s, containerd %s, Linux %s\n", out, r.Info.Arch, r.Info.Kubernetes, r.Info.Containerd, r.Info.Kernel)
	if boards := r.Info.Boards; len(boards) > 0 {
		fmt.Fprintf(s.Out, "  boots on %s\n", strings.Join(boards, " and "))
	}
	for _, p := range r.Partitions {
		sizes := media.Partition{Label: p.Label, FS: p.FS, Size: p.Size}
		if p.Files > 0 { // the same as inspect reads from the file system
			sizes.Free, sizes.Reserve = p.Free, p.Reserve()
			sizes.Used = p.Size - p.Free - sizes.Reserve
		}
		printSizes(s.Out, sizes)
		switch {
		case p.Files > 0:
			fmt.Fprintf(s.Out, "  %s", configs.Count(p.Files, "file"))
		case p.Label == ondisk.LabelRootB:
			fmt.Fprintf(s.Out, "  room for an update of %s", configs.HumanSize(p.Room))
		}
		fmt.Fprintln(s.Out)
	}
	fmt.Fprintf(s.Out, "  %s, %s", configs.Count(r.Packages, "Debian package"), configs.Count(len(r.Info.Images), "container image"))
	if len(r.Info.Images) > 0 {
		fmt.Fprintf(s.Out, " of %s in %s", configs.HumanSize(r.Images.Size), configs.Count(r.Images.Layers, "layer"))
	}
	fmt.Fprintln(s.Out)
	fmt.Fprintf(s.Out, "  plan   %s\n  golden %s\n", r.Plan, r.Golden)
	// A copy, so that the golden image stays one.
	fmt.Fprintf(s.Out, "Next: edgebake stamp %s site.yaml --output SITE%s\n", out, out[len(stemOf(out)):])
}

// withImage is what went wrong after the image was written: an interrupt does
// not take that back.
func withImage(ctx context.Context, image string, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return unfinished{fmt.Errorf("interrupted when %s was complete: %w", image, err)}
}
