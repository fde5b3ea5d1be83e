package builder

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/ondisk/tree"
)

// Kinds of inputs that the build makes itself (plan.Input.Make).
const (
	makeDebian = "mmdebstrap"
	makeGo     = "go"
	makeOCI    = "oci"    // the root file system of a container image
	makeImage  = "image"  // a container image to include in the image
	makeFolder = "folder" // a directory packed as a tar
	makeAgent  = "agent"  // one of edgebake's own programs
)

// makeInputs puts the bytes of every input into the cache and completes the digests. Downloads and
// compiling run in parallel, but one program is compiled at a time, since a compiler uses all
// processors.
func (b *executor) makeInputs(ctx context.Context) error {
	compile, rest := b.missingInputs()
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		for _, name := range compile {
			if err := b.makeOne(gctx, name); err != nil {
				return err
			}
		}
		return nil
	})
	for _, name := range rest {
		g.Go(func() error { return b.makeOne(gctx, name) })
	}
	g.Go(func() error { return b.fetchImages(gctx) })
	if err := errors.Join(g.Wait(), b.kept); err != nil {
		return err
	}
	return b.complete(ctx)
}

// fetchImages downloads the container images into the cache.
func (b *executor) fetchImages(ctx context.Context) error {
	if len(b.plan.Images) == 0 {
		return nil
	}
	s := b.startStep("images", configs.Count(len(b.plan.Images), "container image"))
	o := imageOptions(b.buildEnv, b.img, b.plan)
	o.Progress = func(p images.Progress) { s.log(fmt.Sprintf("layer %d of %d: %s", p.Done, p.Total, p.Ref)) }
	if err := images.Fetch(ctx, b.Cache, b.plan.Images, o); err != nil {
		return b.origins.locate(err)
	}
	s.done()
	return nil
}

// complete adds facts that only the bytes of an input reveal: the digest of the uncompressed base,
// and the Go release of each program for which the lock does not record it.
func (b *executor) complete(ctx context.Context) error {
	for name, in := range b.inputs {
		var err error
		switch {
		case name == inputBase:
			var sha string
			if sha, err = b.archive(ctx, name); err != nil {
				err = b.origins.locate(&tree.LayerError{Layer: name, Err: err})
			} else if sha != in.SHA256 {
				in.Uncompressed = sha
			}
		case in.Make == makeGo && in.Go == "":
			in.Go, err = b.compiledBy(in.SHA256)
		}
		if err != nil {
			return err
		}
		b.inputs[name] = in
	}
	return nil
}

func (b *executor) input(name string) plan.Input {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.inputs[name]
}

// missingInputs returns the inputs that are not in the cache, except container images. compile
// lists those that Go compiles, and rest all others.
func (b *executor) missingInputs() (compile, rest []string) {
	for _, name := range slices.Sorted(maps.Keys(b.plan.Inputs)) {
		switch in := b.input(name); {
		case in.Make == makeImage:
		case name == inputBase && b.Base != "": // --base overrides the lock and the cache
			rest = append(rest, name)
		case in.SHA256 != "" && b.Cache.Has(in.SHA256):
		case in.Make == makeGo:
			compile = append(compile, name)
		default:
			rest = append(rest, name)
		}
	}
	return compile, rest
}

// checkInputs reports everything that would stop an input from being made. It runs before any input
// is made.
func (b *executor) checkInputs(ctx context.Context) error {
	compile, rest := b.missingInputs()
	if err := errors.Join(b.missingTools(ctx, compile, rest), b.checkBase(ctx)); err != nil {
		return err
	}
	errs := []error{b.checkGo(ctx, compile), b.checkVersions(ctx, compile)}
	if in := b.input(inputBase); in.Make == makeDebian && slices.Contains(rest, inputBase) && b.Base == "" {
		r, err := recipeOf[debianRecipe](in)
		if err == nil {
			err = b.checkArchive(ctx, r)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// missingTools reports every program that this computer lacks but needs to make these inputs.
func (b *executor) missingTools(ctx context.Context, compile, rest []string) error {
	var errs []error
	var goErr error
	if len(compile) > 0 {
		_, goErr = fetch.GoCommand(ctx)
	}
	if goErr != nil {
		var reported []string
		for _, name := range compile {
			field := b.origins[name].field
			if slices.Contains(reported, field) {
				continue
			}
			reported = append(reported, field)
			hint := fmt.Sprintf("get the programs from a release server (source: url) or a directory (source: file): see `edgebake explain image.%s`", field)
			if strings.HasPrefix(field, "agents.") {
				hint = "install edgebake's package, which contains it"
			}
			release := ""
			if in := b.input(name); b.Locked && in.Go != "" {
				release = " (the lock was made with " + in.Go + ")"
			}
			errs = append(errs, &configs.FieldError{Path: field, Err: fmt.Errorf("compiling %s needs Go%s, and %w, or %s", name, release, goErr, hint)})
		}
	}
	if !slices.Contains(rest, inputBase) || b.Base != "" || b.input(inputBase).Make != makeDebian {
		return errors.Join(errs...)
	}
	tools := []string{"mmdebstrap"}
	if os.Geteuid() != 0 {
		tools = append(tools, "newuidmap")
	}
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			errs = append(errs, &configs.FieldError{Path: "base.debian", Err: fmt.Errorf("making the Debian base needs %s: apt-get install mmdebstrap uidmap debian-archive-keyring (or give a base of another kind: tar, oci)", tool)})
		}
	}
	if b.arch != runtime.GOARCH {
		errs = append(errs, fieldError("base.debian", checkEmulation(ctx, b.arch)))
	}
	return errors.Join(errs...)
}

// compiledBy returns the Go release that compiled a program in the cache.
func (b *buildEnv) compiledBy(sha string) (string, error) {
	f, err := b.Cache.OpenBlob(sha)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return fetch.CompiledBy(f), nil
}

// checkGo returns an error if a locked program must be compiled and the installed Go has another
// release than the one in the lock: it would compile other bytes.
func (b *executor) checkGo(ctx context.Context, compile []string) error {
	if !b.Locked {
		return nil
	}
	type wanted struct{ field, module, version, release string }
	var order []wanted
	names := map[wanted][]string{}
	for _, name := range compile {
		in := b.input(name)
		if in.Go == "" || in.SHA256 == "" {
			continue // an older lock without the release: comparing digests will show the difference
		}
		module, version := goModuleOf(in)
		w := wanted{b.origins[name].field, module, version, in.Go}
		if names[w] == nil {
			order = append(order, w)
		}
		names[w] = append(names[w], name)
	}
	var errs []error
	for _, w := range order {
		r, err := b.goRecipe(names[w][0])
		if err != nil {
			return err
		}
		have, err := fetch.GoRelease(ctx, b.Cache, r, w.release, io.Discard)
		if err == nil && have != w.release {
			err = fmt.Errorf("the lock has %s compiled by %s, but the installed Go is %s, which gives other bytes: set GOTOOLCHAIN=%[2]s in the environment (go fetches that release), or build without --locked, which renews the lock", strings.Join(names[w], " and "), w.release, have)
		}
		errs = append(errs, fieldError(w.field, err))
	}
	return errors.Join(errs...)
}

// checkVersions returns an error for each version that the module proxy does not have, before
// anything is compiled.
func (b *executor) checkVersions(ctx context.Context, compile []string) error {
	type wanted struct{ module, version string }
	var order []string // one input for each version
	recipes := map[wanted]fetch.GoRecipe{}
	for _, name := range compile {
		r, err := b.goRecipe(name)
		if err != nil {
			return err
		}
		if _, ok := fetch.Compiled(ctx, b.Cache, r); ok {
			continue
		}
		w := wanted{r.Module, r.Version}
		if have, ok := recipes[w]; ok {
			r.Packages = append(have.Packages, r.Packages...)
		} else {
			order = append(order, name)
		}
		recipes[w] = r
	}
	if len(order) == 0 {
		return nil
	}
	s := b.startStep("versions", "looking for the programs' versions on the Go module proxy")
	var errs []error
	for _, name := range order {
		module, version := goModuleOf(b.input(name))
		errs = append(errs, b.blameVersion(name, fetch.FindGoVersion(ctx, b.Cache, recipes[wanted{module, version}])))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	s.done()
	return nil
}

// goRecipe returns the recipe by which an input is compiled.
func (b *executor) goRecipe(name string) (fetch.GoRecipe, error) {
	return recipeOf[fetch.GoRecipe](b.input(name))
}

// recipeOf decodes the recipe of an input that the build makes itself.
func recipeOf[T any](in plan.Input) (r T, err error) {
	if err := json.Unmarshal(in.Recipe, &r); err != nil {
		return r, fmt.Errorf("reading the recipe: %w", err)
	}
	return r, nil
}

// blameVersion adds the Image's field to the error for a version that does not exist.
func (b *executor) blameVersion(name string, err error) error {
	if unknown := (*fetch.UnknownVersionError)(nil); errors.As(err, &unknown) {
		return &configs.FieldError{Path: strings.TrimSuffix(b.origins[name].field, ".source") + ".version", Err: unknown}
	}
	return err
}

func (b *executor) makeOne(ctx context.Context, name string) error {
	err := b.makeInput(ctx, name)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if field := (*configs.FieldError)(nil); errors.As(err, &field) {
		return err // the error already names its place in the document
	}
	if placed := b.blameVersion(name, err); placed != err {
		return placed
	}
	from := b.origins[name]
	if from.flag == "" {
		err = fmt.Errorf("input %s: %w", name, err)
	}
	return from.withOrigin(err)
}

// compiling is the text of a step that compiles a program.
const compiling = "compiling with Go: one to four minutes on two cores; the result is cached"

// makeInput puts the bytes of an input into the cache and records their digest.
func (b *executor) makeInput(ctx context.Context, name string) error {
	in := b.input(name)
	compiled, err := b.compiled(ctx, in)
	if err != nil {
		return err
	}
	s := b.startStep(name, b.stepText(in, compiled))
	var sha string
	switch {
	case name == inputBase && b.Base != "":
		sha, err = b.importBase(ctx, &in)
	case compiled != "":
		sha = compiled
	default:
		sha, err = b.make(ctx, s, name, in)
	}
	if err != nil {
		return err
	}
	compiledBy := ""
	if in.Make == makeGo {
		if compiledBy, err = b.compiledBy(sha); err != nil {
			return err
		}
	}
	if err := b.compare(s, name, in, sha, compiledBy); err != nil {
		return err
	}
	in.SHA256 = sha
	if in.Make == makeGo {
		in.Go = compiledBy
	}
	b.mu.Lock()
	b.inputs[name] = in
	b.mu.Unlock()
	s.done()
	return nil
}

// compiled returns the digest of a program that is already compiled, or "".
func (b *executor) compiled(ctx context.Context, in plan.Input) (string, error) {
	if in.Make != makeGo {
		return "", nil
	}
	r, err := recipeOf[fetch.GoRecipe](in)
	if err != nil {
		return "", err
	}
	made, _ := fetch.Compiled(ctx, b.Cache, r)
	return made[r.Packages[0]], nil
}

// stepText returns the text for the step of an input.
func (b *executor) stepText(in plan.Input, compiled string) string {
	switch {
	case compiled != "":
		return "cached"
	case in.Make == makeGo:
		return compiling
	case in.Make == makeDebian && b.arch != runtime.GOARCH:
		return "making the base with mmdebstrap, with emulated package scripts: about eight minutes; the result is cached"
	case in.Make == makeDebian:
		return "making the base with mmdebstrap: two to five minutes, more over a slow network; the result is cached"
	case in.Make != "":
		return "making it (" + in.Make + ")"
	case in.File != "":
		return "copying " + in.File
	}
	return "fetching"
}

// make puts the bytes of an input into the cache and returns their digest.
func (b *executor) make(ctx context.Context, s *step, name string, in plan.Input) (string, error) {
	switch in.Make {
	case makeDebian:
		return b.makeBase(ctx, s, in)
	case makeGo:
		r, err := recipeOf[fetch.GoRecipe](in)
		if err != nil {
			return "", err
		}
		made, err := fetch.GoBuild(ctx, b.Cache, r, s)
		return made[r.Packages[0]], err
	case makeOCI:
		return b.makeOCI(ctx, in)
	case makeFolder:
		return b.packDir(ctx, in.File, b.date)
	case makeAgent:
		if in.File == "" {
			return b.agent(ctx, name)
		}
		return b.importNamed(ctx, in.File, in.SHA256)
	case "":
		if in.File != "" {
			return b.importNamed(ctx, in.File, in.SHA256)
		}
		return fetch.Download(ctx, b.Cache, in.Fetch, in.SHA256, b.limit(name), s.progress)
	}
	return "", fmt.Errorf("BUG: nothing makes an input of kind %q", in.Make)
}

// maxProgram is the largest accepted size of a downloaded program, in bytes. kubelet and k3s have
// less than a tenth of it.
const maxProgram = 1 << 30

// limit returns the largest accepted size of an input's download, in bytes.
func (b *executor) limit(name string) int64 {
	for _, l := range b.plan.Layers {
		if l.Input == name && l.Path != "" {
			return maxProgram
		}
	}
	return maxArchive
}

// makeBase makes the base with mmdebstrap.
func (b *executor) makeBase(ctx context.Context, s *step, in plan.Input) (string, error) {
	r, err := recipeOf[debianRecipe](in)
	if err != nil {
		return "", err
	}
	key := debianKey(in)
	// The cached base may be another one than the locked base.
	if have, ok := b.Cache.Lookup(key); ok && in.SHA256 != "" && have != in.SHA256 {
		if err := b.Cache.Forget(key); err != nil {
			return "", err
		}
	}
	return b.Cache.Make(ctx, key, func(ctx context.Context, w io.Writer) error {
		return b.makeDebian(ctx, r, w, s.detail)
	})
}

// compare compares the digest of an input's bytes with the digest in the plan. If they differ, it
// returns an error or, if the plan's digest is not binding, warns that the lock is renewed.
func (b *executor) compare(s *step, name string, in plan.Input, sha, compiledBy string) error {
	if in.SHA256 == "" || sha == in.SHA256 {
		return nil
	}
	binding := b.bound || in.Make == ""
	if binding && name == inputBase && b.Base != "" {
		return b.wrongBase(in, sha)
	}
	if binding {
		pinned := "the lock has"
		if b.doc == nil {
			pinned = "the plan has"
		}
		return fmt.Errorf("made an input with the SHA-256 %s, but %s %s%s", sha, pinned, in.SHA256, b.lockedHint(in, compiledBy))
	}
	why := ""
	if in.Go != compiledBy && in.Go != "" {
		why = fmt.Sprintf("; now compiled by %s, before by %s", compiledBy, in.Go)
	}
	s.warn("differs from the lock, which is renewed (%.12s, was %.12s%s)", sha, in.SHA256, why)
	return nil
}

// importBase imports the file of --base and returns its digest for the plan. A compressed and an
// uncompressed file of the same base have the same digest in the plan.
func (b *executor) importBase(ctx context.Context, in *plan.Input) (sha string, err error) {
	file, err := b.importFile(ctx, b.Base, "")
	if err != nil {
		return "", err
	}
	if b.given, err = fetch.Uncompressed(ctx, b.Cache, file, maxArchive); err != nil {
		return "", err
	}
	switch {
	case file == in.SHA256 && file != b.given:
		in.Uncompressed = b.given
		return in.SHA256, nil
	case in.SHA256 != "" && b.given == in.Uncompressed:
		return in.SHA256, nil
	}
	if b.given != in.SHA256 {
		in.Uncompressed = ""
	}
	return b.given, nil
}

// wrongBase returns the error for a --base that differs from the base in the Image, lock or plan.
func (b *executor) wrongBase(in plan.Input, sha string) error {
	switch {
	case b.doc == nil:
		return fmt.Errorf("the SHA-256 of the base (uncompressed) is %s, but the plan has %s: use the base that was exported with this plan", sha, in.SHA256)
	case in.Make == "" && b.doc.Base.Tar.SHA256 != "":
		return fmt.Errorf("the SHA-256 of the base (uncompressed) is %s, but base.tar.sha256 is %s: use the archive with this digest, or the exported base with its lock", sha, in.SHA256)
	case in.Make != "":
		return fmt.Errorf("the SHA-256 of the base (uncompressed) is %s, but the lock has %s: use the base that was exported with this lock, or build without --locked, which renews it", sha, in.SHA256)
	}
	return fmt.Errorf("the SHA-256 of the base (uncompressed) is %s, but the lock has %s: use the base that was exported with this lock, or build without --base", sha, in.SHA256)
}

func (b *executor) lockedHint(in plan.Input, compiledBy string) string {
	renew := "renew the lock by building without --locked"
	if b.doc == nil {
		renew = "make the plan again"
	}
	switch in.Make {
	case makeDebian:
		return "; the Debian archive has changed: use the exported base (--base FILE, see edgebake build --export-base), or " + renew
	case makeGo:
		if in.Go == "" {
			return "; this input was compiled by " + compiledBy + " here, and the lock does not record its Go release: try the release that was current when the lock was made (GOTOOLCHAIN=go1.X.Y), or " + renew
		}
	}
	if b.doc == nil {
		return "; " + renew
	}
	return "; build without --locked to renew the lock"
}

// exportBase copies the uncompressed tar of the base to path. With it, a locked build still works
// after the Debian archive has changed.
func (b *executor) exportBase(path string) error {
	sha := cmp.Or(b.given, b.inputs[inputBase].Uncompressed, b.inputs[inputBase].SHA256)
	src, err := b.Cache.OpenBlob(sha)
	if err != nil {
		return fmt.Errorf("exporting the base: %w", err)
	}
	defer src.Close()
	out, err := file.Create(path, 0o666, true)
	if err != nil {
		return err
	}
	defer out.Discard()
	if _, err := out.ReadFrom(io.NewSectionReader(src, 0, 1<<62)); err != nil {
		return fmt.Errorf("exporting the base to %s: %w", path, file.Explain(err, filepath.Dir(path)))
	}
	if err := b.Cache.Unchanged(); err != nil {
		return fmt.Errorf("exporting the base to %s: %w", path, err)
	}
	return out.Commit()
}
