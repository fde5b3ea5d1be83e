package builder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"golang.org/x/sync/errgroup"
)

// makeInputs brings the bytes of every input into the cache and completes the
// plan's digests. What needs the network and what needs the processor go side
// by side; compilers run one after the other, since one already takes all
// there is.
func (b *build) makeInputs(ctx context.Context) error {
	compile, rest := b.missingInputs()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		for _, name := range compile {
			if err := b.makeOne(ctx, name); err != nil {
				return err
			}
		}
		return nil
	})
	for _, name := range rest {
		g.Go(func() error { return b.makeOne(ctx, name) })
	}
	if err := errors.Join(g.Wait(), b.kept); err != nil {
		return err
	}
	return b.fillGoReleases()
}

// fillGoReleases names the Go release of compiled programs that are cached, where the
// lock does not: it may be older than Input.Go. The release is read from the program.
func (b *build) fillGoReleases() error {
	for name, in := range b.plan.Inputs {
		if in.Make != "go" || in.Go != "" {
			continue
		}
		var err error
		if in.Go, err = b.compiledBy(in.SHA256); err != nil {
			return err
		}
		b.plan.Inputs[name] = in
	}
	return nil
}

// missingInputs are those whose bytes are not in the cache: what Go compiles, and
// all else.
func (b *build) missingInputs() (compile, rest []string) {
	for _, name := range slices.Sorted(maps.Keys(b.makes)) {
		switch in := b.input(name); {
		case name == inputBase && b.Base != "": // whatever the lock or the cache has
			rest = append(rest, name)
		case in.SHA256 != "" && b.Cache.Has(in.SHA256):
		case in.Make == "go":
			compile = append(compile, name)
		default:
			rest = append(rest, name)
		}
	}
	return compile, rest
}

// checkInputs finds what would keep inputs from being made, before the first
// one is.
func (b *build) checkInputs(ctx context.Context) error {
	compile, rest := b.missingInputs()
	if err := errors.Join(b.missingTools(ctx, compile, rest), b.checkBase(ctx)); err != nil {
		return err
	}
	errs := []error{b.checkGo(ctx, compile), b.checkVersions(ctx, compile)}
	if slices.Contains(rest, inputBase) && b.Base == "" && b.checkNames != nil {
		errs = append(errs, b.checkNames(ctx))
	}
	return errors.Join(errs...)
}

// missingTools finds the programs that making these inputs needs and that are not
// here, all of them before the first one is made.
func (b *build) missingTools(ctx context.Context, compile, rest []string) error {
	var errs []error
	var goErr error
	if len(compile) > 0 {
		_, goErr = fetch.GoCommand(ctx)
	}
	if goErr != nil {
		var told []string
		for _, name := range compile {
			field := b.origins[name].field
			if slices.Contains(told, field) {
				continue
			}
			told = append(told, field)
			hint := fmt.Sprintf("take the programs from a release server (source: url) or a directory (source: file): `edgebake explain image.%s` has both", field)
			if strings.HasPrefix(field, "agents.") {
				hint = "install edgebake's package, which has it"
			}
			release := ""
			if in := b.input(name); b.Locked && in.Go != "" {
				release = " (the lock's is of " + in.Go + ")"
			}
			errs = append(errs, &configs.FieldError{Path: field, Err: fmt.Errorf("compiling %s needs Go%s, and %w, or %s", name, release, goErr, hint)})
		}
	}
	if !slices.Contains(rest, inputBase) || b.Base != "" || b.img.Base.Debian == nil {
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
	if b.img.Arch != runtime.GOARCH {
		errs = append(errs, fieldError("base.debian", checkEmulation(ctx, b.img.Arch)))
	}
	return errors.Join(errs...)
}

// compiledBy is the Go release that compiled a program in the cache.
func (b *build) compiledBy(sha string) (string, error) {
	f, err := b.Cache.OpenBlob(sha)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return fetch.CompiledBy(f), nil
}

// checkGo rejects a Go release other than that of the locked programs that are to be
// compiled, before minutes are spent on bytes that are not the lock's.
func (b *build) checkGo(ctx context.Context, compile []string) error {
	if !b.Locked {
		return nil
	}
	type wanted struct{ field, module, version, release string }
	var order []wanted
	names := map[wanted][]string{}
	for _, name := range compile {
		in := b.input(name)
		if in.Go == "" || in.SHA256 == "" {
			continue // the lock is older than Input.Go: a wrong release shows in the digest
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
			err = fmt.Errorf("the lock has %s compiled by %s; the go here is %s, which gives other bytes: to fix: set GOTOOLCHAIN=%[2]s in the environment (go fetches that release), or build without --locked, which renews the lock", strings.Join(names[w], " and "), w.release, have)
		}
		errs = append(errs, fieldError(w.field, err))
	}
	return errors.Join(errs...)
}

// checkVersions rejects versions that the module proxy does not have, before minutes
// are spent on compiling the other programs.
func (b *build) checkVersions(ctx context.Context, compile []string) error {
	type wanted struct{ module, version string }
	var order []string // an input of each version
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
	s := b.step("versions", "looking for the programs' versions on the Go module proxy")
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

// goRecipe is how an input is compiled.
func (b *build) goRecipe(name string) (r fetch.GoRecipe, err error) {
	err = json.Unmarshal(b.input(name).Recipe, &r)
	return r, err
}

// blameVersion ties a version that does not exist to its field.
func (b *build) blameVersion(name string, err error) error {
	if unknown := (*fetch.UnknownVersionError)(nil); errors.As(err, &unknown) {
		return &configs.FieldError{Path: strings.TrimSuffix(b.origins[name].field, ".source") + ".version", Err: unknown}
	}
	return err
}

func (b *build) makeOne(ctx context.Context, name string) error {
	err := b.makeInput(ctx, name)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if field := (*configs.FieldError)(nil); errors.As(err, &field) {
		return err // it knows its place
	}
	if placed := b.blameVersion(name, err); placed != err {
		return placed
	}
	from := b.origins[name]
	if from.flag == "" {
		err = fmt.Errorf("input %s: %w", name, err)
	}
	return from.blame(err)
}

// compiling is what a person is told who waits for it.
const compiling = "compiled by Go: a minute or two on a quick computer"

func (b *build) makeInput(ctx context.Context, name string) error {
	in := b.input(name)
	what, compiled := "fetching", ""
	switch in.Make {
	case "":
	case "mmdebstrap":
		what = "making it with mmdebstrap: a minute, more on a slow line"
		if b.img.Arch != runtime.GOARCH {
			what = "making it with mmdebstrap; its packages' scripts run in emulation: about eight minutes, once"
		}
	case "go":
		r, err := b.goRecipe(name)
		if err != nil {
			return err
		}
		what = compiling
		if made, ok := fetch.Compiled(ctx, b.Cache, r); ok {
			what, compiled = "cached", made[r.Packages[0]]
		}
	default:
		what = "making it (" + in.Make + ")"
	}
	s := b.step(name, what)
	var sha string
	var err error
	switch {
	case name == inputBase && b.Base != "":
		sha, err = b.giveBase(ctx, &in)
	case compiled != "":
		sha = compiled
	default:
		sha, err = b.makes[name](ctx, s)
	}
	if err != nil {
		return err
	}
	compiledBy := ""
	if in.Make == "go" {
		if compiledBy, err = b.compiledBy(sha); err != nil {
			return err
		}
	}
	if in.SHA256 != "" && sha != in.SHA256 {
		if name == inputBase && b.Base != "" && (b.Locked || in.Make == "") {
			return b.otherBase(in, sha)
		}
		if b.Locked || in.Make == "" {
			return fmt.Errorf("made %s, locked is %s%s", sha, in.SHA256, lockedHint(in, compiledBy))
		}
		why := ""
		if in.Go != compiledBy && in.Go != "" {
			why = fmt.Sprintf("; compiled by %s, was by %s", compiledBy, in.Go)
		}
		s.warn("differs from the lock, which is renewed (%.12s, was %.12s%s)", sha, in.SHA256, why)
	}
	in.Go = compiledBy
	b.mu.Lock()
	in.SHA256 = sha
	b.plan.Inputs[name] = in
	b.mu.Unlock()
	s.done()
	return nil
}

// giveBase brings the file of --base into the cache and returns the digest that it has
// in the plan: the one that the plan has already, where the file is that base,
// compressed or not.
func (b *build) giveBase(ctx context.Context, in *plan.Input) (sha string, err error) {
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

// otherBase says that --base is not the base that the Image or the lock has.
func (b *build) otherBase(in plan.Input, sha string) error {
	switch {
	case in.Make == "" && b.img.Base.Tar.SHA256 != "":
		return fmt.Errorf("it is %s (uncompressed), base.tar.sha256 is %s: give the archive that has this digest; or the base that was exported, with the lock that was written then; or correct base.tar.sha256", sha, in.SHA256)
	case b.Locked && in.Make != "":
		return fmt.Errorf("it is %s (uncompressed), locked is %s: give the base that was exported with this lock, or build without --locked, which renews it", sha, in.SHA256)
	}
	return fmt.Errorf("it is %s (uncompressed), locked is %s: give the base that was exported with this lock, or build without --base", sha, in.SHA256)
}

func lockedHint(in plan.Input, compiledBy string) string {
	switch in.Make {
	case "mmdebstrap":
		return "; the Debian archive has moved on: give the base that was exported (--base FILE, see edgebake build --export-base), or renew the lock by building without --locked"
	case "go":
		if in.Go == "" {
			return "; it was compiled by " + compiledBy + " here, and the lock does not say by which Go release its own was: try the one that was current then (GOTOOLCHAIN=go1.X.Y), or renew the lock by building without --locked"
		}
	}
	return "; build without --locked to renew the lock"
}

// exportBase copies the base's tar, uncompressed, out of the cache, so that a locked
// build works when the archive it came from has moved on.
func (b *build) exportBase(ctx context.Context, path string) error {
	sha, err := b.archive(ctx, inputBase)
	if err != nil {
		return fmt.Errorf("exporting the base: %w", err)
	}
	src, err := b.Cache.OpenBlob(sha)
	if err != nil {
		return fmt.Errorf("exporting the base: %w", err)
	}
	defer src.Close()
	out, err := disk.Create(path, 0o666, true)
	if err != nil {
		return err
	}
	defer out.Discard()
	if _, err := out.ReadFrom(io.NewSectionReader(src, 0, 1<<62)); err != nil {
		return fmt.Errorf("exporting the base to %s: %w", path, disk.Explain(err, filepath.Dir(path)))
	}
	if err := b.Cache.Unchanged(); err != nil {
		return fmt.Errorf("exporting the base to %s: %w", path, err)
	}
	return out.Commit()
}

// CheckFile tells, before long work begins, why a file could not be written
// at its end: it is there already and must not be replaced, or its directory is
// not to be written to.
func CheckFile(path string, replace bool) error {
	if fi, err := os.Lstat(path); err == nil {
		switch {
		case fi.IsDir():
			return fmt.Errorf("%s is a directory; name a file", path)
		case !replace:
			return fmt.Errorf("%s exists; --force replaces it", path)
		}
	}
	if err := disk.Writable(filepath.Dir(path)); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// WriteFile writes a small file that appears under its name only when it is
// complete, and replaces what is there. perm is less the umask.
func WriteFile(path string, data []byte, perm fs.FileMode) error {
	out, err := disk.Create(path, perm, true)
	if err != nil {
		return err
	}
	defer out.Discard()
	if _, err := out.Write(data); err != nil {
		return fmt.Errorf("writing %s: %w", path, disk.Explain(err, filepath.Dir(path)))
	}
	return out.Commit()
}
