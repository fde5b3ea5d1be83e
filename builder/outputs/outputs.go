// Package outputs determines the names of the files of builds: the image with its report and SBOM,
// the lock next to the document, and an exported base. Before a build, it checks that the files can
// be written, and decides whether an existing image is current.
package outputs

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
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/joined"
	"github.com/edgebake/edgebake/ondisk/file"
)

// Options contains the files that a person names on the command line.
type Options struct {
	Document   string // the Image or the plan; "-" means standard input
	Lock       string
	Output     string
	Base       string // an exported base to use
	ExportBase string
	Sign       string // the secret key
	Force      bool   // replace an existing image, report and SBOM
}

// Target is one image to build, from a plan or from a document for one architecture.
type Target struct {
	builder.Job
	Name, Arch string
	Date       time.Time
	Lock       string // file of the lock; empty if no lock is written
	// suffix distinguishes the files of this target from those of the document's other images. It
	// is empty if there is only one image.
	suffix string
}

// OfImages returns the targets for the images of a document, with their locks.
func (o *Options) OfImages(images []*configs.Image, listed []string, options builder.Options) ([]Target, error) {
	var targets []Target
	for _, img := range images {
		t := Target{Job: builder.Job{Image: img, Options: options}, Name: img.Name, Arch: img.Arch, Date: img.SourceTime()}
		if len(listed) != 1 || listed[0] != img.Arch {
			t.suffix = "-" + img.Arch
		}
		if err := t.readLock(o, len(images) > 1); err != nil {
			return nil, err
		}
		targets = append(targets, t)
	}
	return targets, nil
}

// OfPlan returns the target of a plan.
func OfPlan(p *plan.Plan, options builder.Options) []Target {
	return []Target{{Job: builder.Job{Plan: p, Options: options}, Name: p.Name, Arch: p.Arch, Date: time.Unix(p.SourceDate, 0).UTC()}}
}

// readLock reads the lock named by --lock, or the lock next to the document. If there are several
// targets, or no --lock, it tries the name with and without the architecture, because the document
// may have listed other architectures before. It never uses a lock for another architecture.
func (t *Target) readLock(o *Options, several bool) error {
	names := []string{o.Lock}
	switch {
	case o.Lock != "" && several:
		names = []string{forArch(o.Lock, t.Arch), o.Lock}
	case o.Lock == "" && o.Document == "-":
		return nil
	case o.Lock == "":
		stem := strings.TrimSuffix(strings.TrimSuffix(o.Document, ".yaml"), ".yml")
		names = []string{stem + t.suffix + ".lock", stem + "-" + t.Arch + ".lock", stem + ".lock"}
	}
	t.Lock = names[0]
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
			return EachNamed(name, err)
		}
		if !lock.For(t.Arch) {
			if i == 0 {
				foreign = fmt.Errorf("%s: the lock is for another architecture than %s: name another lock with --lock", name, t.Arch)
			}
			if i == 0 && o.Lock != "" {
				return foreign
			}
			continue
		}
		if foreign != nil {
			t.Lock = name
		}
		t.Options.Lock, t.Options.RootRoom = lock, lock.RootRoom
		return nil
	}
	if foreign == nil && t.Options.Locked {
		return fmt.Errorf("--locked: there is no lock %s: build once without --locked to make it, or name another lock with --lock", t.Lock)
	}
	return foreign
}

// EachNamed adds the name of a file to each error that is joined in err.
func EachNamed(name string, err error) error {
	var errs []error
	for _, e := range joined.Errors(err) {
		errs = append(errs, fmt.Errorf("%s: %w", name, e))
	}
	return errors.Join(errs...)
}

// forArch returns the name of a file for one architecture, such as node-arm64.raw.zst for
// node.raw.zst.
func forArch(path, arch string) string {
	ending := filepath.Ext(path)
	for _, double := range []string{".raw.zst", ".tar.zst", ".tar.gz", ".tar.xz", ".tar.bz2"} {
		if strings.HasSuffix(path, double) {
			ending = double
		}
	}
	return strings.TrimSuffix(path, ending) + "-" + arch + ending
}

// fileFor returns the target's file for the value of a flag. If there are several targets, each has
// its own file.
func fileFor(targets []Target, t *Target, file string) string {
	if file == "" || len(targets) == 1 {
		return file
	}
	return forArch(file, t.Arch)
}

// ReadReport reads the report of an image.
func ReadReport(image string) (*builder.Report, error) {
	text, err := os.ReadFile(Report(image))
	if err != nil {
		return nil, err
	}
	r := new(builder.Report)
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("reading %s: %w", Report(image), err)
	}
	return r, nil
}

// Stem returns the file name of an image without its extension.
func Stem(image string) string {
	return strings.TrimSuffix(strings.TrimSuffix(image, ".zst"), ".raw")
}

// Report returns the file name of an image's report. SBOM returns the file name of its SBOM.
func Report(image string) string { return Stem(image) + ".report.json" }
func SBOM(image string) string   { return Stem(image) + ".sbom.spdx.json" }

// otherImage returns an existing image whose report and SBOM would have the same names, or "". If
// there is none, existing files of these names belong to a removed image and may be replaced.
func otherImage(image string) string {
	for _, ending := range []string{".raw", ".raw.zst"} {
		other := Stem(image) + ending
		if _, err := os.Lstat(other); err == nil && filepath.Clean(other) != filepath.Clean(image) {
			return other
		}
	}
	return ""
}

// Apply sets the file names of the targets. It returns all errors that writing these files would
// cause.
func (o *Options) Apply(targets []Target) error {
	var errs []error
	for i := range targets {
		t := &targets[i]
		t.Options.Base, t.Options.Output, t.Options.Force = fileFor(targets, t, o.Base), fileFor(targets, t, o.Output), o.Force
		if t.Options.Output == "" {
			t.Options.Output = t.Name + t.suffix + ".raw"
		}
		errs = append(errs, t.check(fileFor(targets, t, o.ExportBase)))
	}
	files := o.files(targets)
	errs = append(errs, checkDistinct(files))
	for _, f := range files {
		for _, t := range targets {
			if f.written && t.Image != nil {
				errs = append(errs, builder.NotRead(t.Image, t.Options.Dir, f.name, f.path))
			}
		}
	}
	return joined.Distinct(errs...)
}

// check returns all errors that writing the target's files would cause.
func (t *Target) check(exportBase string) error {
	image := t.Options.Output
	errs := []error{builder.CheckOutput(image, t.Options.Force)}
	if errs[0] == nil { // otherwise report and SBOM have the same error
		for _, f := range []struct{ what, path string }{{"report", Report(image)}, {"SBOM", SBOM(image)}} {
			other := otherImage(image)
			if err := file.Check(f.path, t.Options.Force || other == ""); err != nil {
				if other != "" {
					f.what += " of " + other + ","
				}
				errs = append(errs, fmt.Errorf("%s %w", f.what, err))
			}
		}
	}
	if t.writesLock() {
		if err := file.Check(t.Lock, true); err != nil {
			errs = append(errs, fmt.Errorf("lock %w (--lock names another file)", err))
		}
	}
	if exportBase != "" {
		if err := file.Check(exportBase, t.Options.Force); err != nil {
			errs = append(errs, fmt.Errorf("--export-base: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (t *Target) writesLock() bool { return t.Lock != "" && !t.Options.Locked }

// buildFile is a file that a build reads or writes.
type buildFile struct {
	name    string // name in messages about this file: the flag
	what    string // description in messages about another file
	path    string
	written bool
}

// files lists the files of the builds of all targets.
func (o *Options) files(targets []Target) []buildFile {
	document := o.Document
	if document == "-" {
		document = ""
	}
	list := []buildFile{
		{name: "document", what: "the document", path: document},
		{name: "--sign", what: "the key of --sign", path: o.Sign},
	}
	for i := range targets {
		t := &targets[i]
		of := ""
		if len(targets) > 1 {
			of = " for " + t.Arch
		}
		lockName := "lock"
		if o.Lock != "" {
			lockName = "--lock"
		}
		image := t.Options.Output
		list = append(list,
			buildFile{name: "--base", what: "the base of --base", path: t.Options.Base},
			buildFile{name: "--output", what: "the image" + of, path: image, written: true},
			buildFile{name: "report", what: "the report of the image" + of, path: Report(image), written: true},
			buildFile{name: "SBOM", what: "the SBOM of the image" + of, path: SBOM(image), written: true},
			buildFile{name: lockName, what: "the lock" + of, path: t.Lock, written: !t.Options.Locked},
			buildFile{name: "--export-base", what: "the exported base" + of, path: fileFor(targets, t, o.ExportBase), written: true},
		)
	}
	return slices.DeleteFunc(list, func(f buildFile) bool { return f.path == "" })
}

// checkDistinct rejects two names for the same file if a build writes to it.
func checkDistinct(files []buildFile) error {
	var errs []error
	for i, f := range files {
		for _, other := range files[:i] {
			if f.written || other.written {
				errs = append(errs, file.NotInput(f.name, f.path, other.what, other.path))
			}
		}
	}
	return joined.Distinct(errs...)
}

// Write writes the report, the SBOM and the lock of an image that was built.
func (t *Target) Write(res *builder.Result) error {
	report, err := res.Report.Encode()
	if err != nil {
		return err
	}
	beside := []struct {
		path string
		data []byte
	}{{Report(t.Options.Output), report}, {SBOM(t.Options.Output), res.SBOM}}
	if t.writesLock() {
		pinned := res.Plan.Lock()
		pinned.NarrowRoom(t.Options.RootRoom)
		pinned.NarrowRoom(res.Report.RootRoom())
		lock, err := pinned.Encode()
		if err != nil {
			return err
		}
		beside = append(beside, struct {
			path string
			data []byte
		}{t.Lock, lock})
	}
	for _, f := range beside {
		if err := file.Write(f.path, f.data, 0o666); err != nil {
			return err
		}
	}
	return nil
}

// ExportBases exports the base of each target. After an error, it returns the image concerned.
func (o *Options) ExportBases(ctx context.Context, targets []Target, results []*builder.Result) (image string, err error) {
	for i := range targets {
		t := &targets[i]
		if err := builder.ExportBase(ctx, results[i].Plan, t.Options, fileFor(targets, t, o.ExportBase)); err != nil {
			return t.Options.Output, fmt.Errorf("the image is complete, but its base was not exported: %w", err)
		}
	}
	return "", nil
}
