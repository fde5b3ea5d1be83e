package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/cmd/internal/version"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/slot"
	"github.com/spf13/cobra"
)

// source are the flags of all commands that resolve an Image.
type source struct {
	cache  string
	lock   string
	locked bool
	name   string // of the Image document
	data   []byte
}

func (f *source) flags(c *cobra.Command) {
	cacheFlag(c, &f.cache)
	c.Flags().StringVar(&f.lock, "lock", "", "lock file (default: beside the Image, image.lock for image.yaml)")
	c.Flags().BoolVar(&f.locked, "locked", false, "refuse every input that is not in the lock")
}

// open reads the Image and its lock, and opens the cache.
func (f *source) open(s streams, image string) (*configs.Image, builder.Options, error) {
	var err error
	if f.data, err = readInput(s, image); err != nil {
		return nil, builder.Options{}, err
	}
	f.name = image
	img, err := configs.ParseImage(image, f.data)
	if err != nil {
		return nil, builder.Options{}, err
	}
	if f.lock == "" && image != "-" {
		f.lock = strings.TrimSuffix(strings.TrimSuffix(image, ".yaml"), ".yml") + ".lock"
	}
	o := builder.Options{Dir: dirOf(image), Version: version.String(), Published: version.Published(), Locked: f.locked}
	if f.lock != "" {
		data, err := os.ReadFile(f.lock)
		switch {
		case err == nil:
			if o.Lock, err = plan.DecodeLock(data); err != nil {
				return nil, o, fmt.Errorf("%s: %w", f.lock, err)
			}
			o.RootRoom = o.Lock.RootRoom
		case !errors.Is(err, fs.ErrNotExist):
			return nil, o, err
		}
	}
	o.Cache, err = openCache(f.cache)
	return img, o, err
}

// explain gives problems of what the Image names their place in it.
func (f *source) explain(err error) error {
	var out []error
	for _, e := range builder.Each(err) {
		var field *builder.FieldError
		if errors.As(e, &field) {
			p := configs.Problem{File: f.name, Path: field.Path, Msg: field.Err.Error()}
			p.Line, p.Col = configs.Locate(f.name, f.data, field.Path)
			e = configs.Problems{p}
		}
		out = append(out, e)
	}
	return errors.Join(out...)
}

// checkFiles finds out before a build what would go wrong at its end.
func (f *source) checkFiles(exportBase string, force bool) error {
	var errs []error
	if f.lock != "" && !f.locked {
		if err := builder.CheckFile(f.lock, true); err != nil {
			errs = append(errs, fmt.Errorf("lock %w (--lock names another place)", err))
		}
	}
	if exportBase != "" {
		if err := builder.CheckFile(exportBase, force); err != nil {
			errs = append(errs, fmt.Errorf("--export-base: %w", err))
		}
	}
	return errors.Join(errs...)
}

func newBuild(s streams) *cobra.Command {
	var (
		src        source
		o          builder.Options
		exportBase string
		sign       string
		asJSON     bool
	)
	c := &cobra.Command{
		Use:               "build IMAGE",
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

--sign signs the golden digest and image.json with a minisign secret key; verify,
flash and whoever has the public key can tell the image from others. The password
of an encrypted key is read from the environment variable
` + passwordVariable + `, else from the terminal, else from standard input.`,
		Example: `  edgebake build image.yaml
  edgebake build image.yaml --output node.raw.zst --locked
  edgebake build image.yaml --output node.raw.zst --sign office.key
  edgebake build image.yaml --force --update                 # with today's packages
  edgebake build image.yaml --force --export-base base.tar   # keep the made base ...
  edgebake build image.yaml --force --locked --base base.tar # ... and build from it`,
		Args: args(1, 1, "one Image document"),
		RunE: func(c *cobra.Command, args []string) error {
			if o.Update && (src.locked || o.Base != "") {
				return usageError{errors.New("--update makes inputs anew, --locked and --base keep them: choose one")}
			}
			img, opts, err := src.open(s, args[0])
			if err != nil {
				return err
			}
			defer opts.Cache.Close()
			if o.Update {
				opts.Lock, opts.Update = nil, true
			}
			opts.Base, opts.Output, opts.Force = o.Base, o.Output, o.Force
			// The password is asked for before the long work, not after it.
			if sign != "" {
				key, err := secretKey(s, sign, args[0] == "-")
				if err != nil {
					return err
				}
				opts.Sign = func(golden string, info []byte) (string, error) {
					return slot.SignImage(golden, info, key, img.SourceTime())
				}
			}
			if opts.Output == "" {
				opts.Output = img.Name + ".raw"
			}
			if err := src.checkFiles(exportBase, o.Force); err != nil {
				return err
			}
			show := newDisplay(s, asJSON)
			opts.Events, opts.ShowsDetails = show.event, s.verbose() && !asJSON
			res, err := builder.Build(c.Context(), img, opts)
			show.close()
			if err != nil {
				return src.explain(err)
			}
			// The image first, with all that belongs to it.
			if err := finishBuild(s, opts, src, res, asJSON); err != nil {
				return withImage(c.Context(), opts.Output, err)
			}
			if exportBase == "" {
				return nil
			}
			// The base that is in the image, not one made anew.
			opts.Events, opts.Update, opts.Lock = nil, false, res.Plan.Lock()
			if _, err := builder.ExportBase(c.Context(), img, opts, exportBase); err != nil {
				return withImage(c.Context(), opts.Output, fmt.Errorf("the image is complete, its base is not exported: %w", err))
			}
			return nil
		},
	}
	src.flags(c)
	f := c.Flags()
	f.StringVarP(&o.Output, "output", "o", "", "image to write, .raw or .raw.zst (default NAME.raw)")
	_ = c.MarkFlagFilename("output", imageEndings...)
	f.BoolVarP(&o.Force, "force", "f", false, "replace an image that is there")
	f.BoolVar(&o.Update, "update", false, "take the newest packages and tags, and renew the lock")
	f.StringVar(&o.Base, "base", "", "use this exported base instead of making one")
	f.StringVar(&exportBase, "export-base", "", "also copy the made base to this file, for --base")
	f.StringVar(&sign, "sign", "", "minisign secret key to sign the image with")
	_ = c.MarkFlagFilename("sign")
	f.BoolVar(&asJSON, "json", false, "print events and the report as JSON, one object a line")
	return c
}

// finishBuild writes what goes beside the image and the lock, and sums up.
func finishBuild(s streams, o builder.Options, src source, res *builder.Result, asJSON bool) error {
	out := o.Output
	stem := stemOf(out)
	report, err := res.Report.Encode()
	if err != nil {
		return err
	}
	beside := []struct {
		path string
		data []byte
	}{{stem + ".report.json", report}, {stem + ".sbom.spdx.json", res.SBOM}}
	if src.lock != "" && !src.locked {
		pinned := res.Plan.Lock()
		pinned.NarrowRoom(o.RootRoom)
		pinned.NarrowRoom(res.Report.RootRoom())
		lock, err := pinned.Encode()
		if err != nil {
			return err
		}
		beside = append(beside, struct {
			path string
			data []byte
		}{src.lock, lock})
	}
	for _, f := range beside {
		if err := builder.WriteFile(f.path, f.data, 0o666); err != nil {
			return err
		}
	}
	if asJSON {
		return json.NewEncoder(s.Out).Encode(map[string]any{"state": "result", "output": out, "report": res.Report})
	}
	if !s.quiet() {
		printReport(s, out, res.Report)
	}
	return nil
}

func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

func printReport(s streams, out string, r *builder.Report) {
	fmt.Fprintf(s.Out, "%s: %s, Kubernetes %s, containerd %s, Linux %s\n", out, r.Info.Arch, r.Info.Kubernetes, r.Info.Containerd, r.Info.Kernel)
	for _, p := range r.Partitions {
		fmt.Fprintf(s.Out, "  %-9s %-6s %9s", p.Label, p.FS, humanSize(p.Size))
		if p.Files > 0 {
			fmt.Fprintf(s.Out, "  %9s in %d files, %s free", humanSize(p.Used), p.Files, humanSize(p.Free))
		}
		if p.Label == ondisk.LabelRootB {
			fmt.Fprintf(s.Out, "  room for an update of %s", humanSize(p.Room))
		}
		fmt.Fprintln(s.Out)
	}
	fmt.Fprintf(s.Out, "  %s, %s", count(r.Packages, "Debian package"), count(len(r.Info.Images), "container image"))
	if len(r.Info.Images) > 0 {
		fmt.Fprintf(s.Out, " of %s in %s", humanSize(r.Images.Size), count(r.Images.Layers, "layer"))
	}
	fmt.Fprintln(s.Out)
	fmt.Fprintf(s.Out, "  plan   %s\n  golden %s\n", r.Plan, r.Golden)
	// A copy, so that the golden image stays one.
	fmt.Fprintf(s.Out, "Next: edgebake stamp %s site.yaml --output SITE%s\n", out, out[len(stemOf(out)):])
}

func newPlan(s streams) *cobra.Command {
	var src source
	c := &cobra.Command{
		Use:               "plan IMAGE",
		ValidArgsFunction: completeFiles(documentEndings),
		Short:             "Print what a build would use, pinned, without making anything",
		Long: `Plan resolves an Image: digests of files, of what release servers publish and
of container images; made inputs have the digest they got when they were first
made. With all digests known the plan has an id: the same id is the same
image, byte for byte.`,
		Example: `  edgebake plan image.yaml
  edgebake plan image.yaml --locked`,
		Args: args(1, 1, "one Image document"),
		RunE: func(c *cobra.Command, args []string) error {
			img, o, err := src.open(s, args[0])
			if err != nil {
				return err
			}
			defer o.Cache.Close()
			p, err := builder.Resolve(c.Context(), img, o)
			if err != nil {
				return src.explain(err)
			}
			out, err := p.Encode()
			if err != nil {
				return err
			}
			_, err = s.Out.Write(out)
			return err
		},
	}
	src.flags(c)
	return c
}

// withImage is what went wrong after the image was written: an interrupt does
// not take that back.
func withImage(ctx context.Context, image string, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return unfinished{fmt.Errorf("interrupted when %s was complete: %w", image, err)}
}
