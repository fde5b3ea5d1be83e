package builder

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/procgroup"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/strict"
)

// aptIndex looks up names in Debian's archive with apt, which reports a wrong name in seconds;
// mmdebstrap needs minutes. It need not check signatures: nothing from it enters the image.
type aptIndex struct {
	dir string
}

// aptConf makes apt use its own directory and none of this computer's settings.
const aptConf = `Dir "%[1]s";
Dir::State "%[1]s";
Dir::State::status "%[1]s/status";
Dir::Cache "%[1]s";
Dir::Log "%[1]s";
Dir::Etc "%[1]s";
Dir::Etc::sourcelist "%[1]s/sources.list";
APT::Architecture "%[2]s";
APT::Architectures "%[2]s";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Retries "1";
Acquire::AllowInsecureRepositories "true";
Debug::NoLocking "true";
`

// defaultMirror is the Debian mirror that mmdebstrap uses.
const defaultMirror = "http://deb.debian.org/debian"

func (b *buildEnv) newAptIndex(r debianRecipe) (*aptIndex, error) {
	dir, err := b.Cache.TempDir()
	if err != nil {
		return nil, err
	}
	x := &aptIndex{dir}
	sources := r.Sources
	if len(sources) == 0 {
		sources = []string{"deb " + defaultMirror + " " + r.Suite + " " + strings.Join(r.Components, " ")}
	}
	var errs []error
	for _, d := range []string{"apt.conf.d", "preferences.d", "sources.list.d", "lists/partial", "archives/partial"} {
		errs = append(errs, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	for name, text := range map[string]string{
		"conf": fmt.Sprintf(aptConf, dir, r.Arch), "status": "", "sources.list": strings.Join(sources, "\n") + "\n",
	} {
		errs = append(errs, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	return x, errors.Join(errs...)
}

// run runs a program and returns its standard output (out) and standard error (errOut).
func (x *aptIndex) run(ctx context.Context, name string, args ...string) (out, errOut string, err error) {
	cmd := procgroup.Command(ctx, name, args...)
	cmd.Env = append(cmd.Env, "APT_CONFIG="+filepath.Join(x.dir, "conf"), "LC_ALL=C.UTF-8")
	cmd.Dir = "/"
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = procgroup.Run(cmd, 5*time.Second)
	return stdout.String(), stderr.String(), err
}

var (
	// apt prints the second message for a source with trusted=yes.
	missingSuite = regexp.MustCompile(`(?m)^[WE]: (?:The repository '(\S+) (\S+) [^']*' (?:does not have|no longer has) a Release file|` +
		`Failed to fetch (\S+)/dists/(\S+)/[^/\s]+/binary-\S+\s+(?:404|File not found))`)
	missingPackage = regexp.MustCompile(`(?m)^E: (?:Unable to locate package (\S+)|Package '(\S+)' has no installation candidate|Version '([^']*)' for '(\S+)' was not found|Release '([^']*)' for '(\S+)' was not found)`)
)

// checkArchive reports suites and packages that are missing from the archive, before mmdebstrap
// runs.
func (b *executor) checkArchive(ctx context.Context, r debianRecipe) error {
	if _, err := exec.LookPath("apt-get"); err != nil {
		return nil // mmdebstrap also needs apt, and reports that it is missing
	}
	x, err := b.newAptIndex(r)
	if err != nil {
		return fmt.Errorf("reading the archive's index: %w", err)
	}
	defer os.RemoveAll(x.dir)
	s := b.startStep("archive", "looking for the suite and packages in the archive's index")
	_, stderr, err := x.run(ctx, "apt-get", "-q", "update", "--error-on=any")
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		if errs := b.missingSuites(r, stderr); errs != nil {
			return errs
		}
		s.log("could not read the archive's index: " + firstError(stderr))
		return nil // mmdebstrap will report other errors of apt
	}
	_, stderr, _ = x.run(ctx, "apt-get", append([]string{"-q", "--simulate", "--no-install-recommends", "install", "--"}, r.Packages...)...)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err := b.missingPackages(ctx, x, r, stderr); err != nil {
		return err
	}
	s.done()
	return nil
}

// firstError returns the first error that apt printed. Later errors usually follow from it.
func firstError(stderr string) string {
	for line := range strings.Lines(stderr) {
		if strings.HasPrefix(line, "E: ") {
			return strings.TrimSpace(strings.TrimPrefix(line, "E: "))
		}
	}
	return strings.TrimSpace(stderr)
}

// missingSuites returns an error for each suite that apt did not find, with the Image's field that
// names the suite.
func (b *executor) missingSuites(r debianRecipe, stderr string) error {
	var errs []error
	var seen []string
	for _, m := range missingSuite.FindAllStringSubmatch(stderr, -1) {
		uri, suite := cmp.Or(m[1], m[3]), cmp.Or(m[2], m[4])
		if slices.Contains(seen, uri+" "+suite) {
			continue
		}
		seen = append(seen, uri+" "+suite)
		field, known := "base.debian.suite", []string{"bookworm", "trixie", "forky", "sid", "stable", "testing", "unstable"}
		if i := slices.IndexFunc(r.Sources, func(line string) bool {
			return strings.Contains(line, strings.TrimSuffix(uri, "/")) && slices.Contains(strings.Fields(line), suite)
		}); i >= 0 {
			field = fmt.Sprintf("base.debian.sources[%d]", i)
		}
		errs = append(errs, fieldError(field, fmt.Errorf("the archive %s has no suite %s%s", uri, suite, strict.DidYouMean(suite, known))))
	}
	return errors.Join(errs...)
}

// missingPackages returns an error for each package that apt did not find, with the Image's field
// that names the package.
func (b *executor) missingPackages(ctx context.Context, x *aptIndex, r debianRecipe, stderr string) error {
	found := missingPackage.FindAllStringSubmatch(stderr, -1)
	if len(found) == 0 {
		return nil
	}
	names, _, err := x.run(ctx, "apt-cache", "pkgnames")
	if err != nil {
		return fmt.Errorf("listing the packages with apt: %w", err)
	}
	known := strings.Fields(names)
	slices.Sort(known)
	var errs []error
	for _, m := range found {
		name := cmp.Or(m[1], m[2], m[4], m[6])
		var what string
		switch {
		case m[3] != "":
			what = fmt.Sprintf("suite %s has no version %s of %s for %s%s", r.Suite, m[3], name, r.Arch, x.versions(ctx, name))
		case m[5] != "":
			what = fmt.Sprintf("there is no %s for %s in %s: check the suite and base.debian.sources", name, r.Arch, m[5])
		default:
			bare, _, _ := strings.Cut(name, ":")
			what = fmt.Sprintf("suite %s has no package %s for %s (components: %s)%s", r.Suite, name, r.Arch, strings.Join(r.Components, ", "), strict.DidYouMean(bare, known))
		}
		i := -1
		if b.doc != nil {
			i = slices.IndexFunc(b.doc.Base.Debian.Packages, func(p string) bool {
				return packageName(p) == name && configs.PackageIsFor(p, r.Arch)
			})
		}
		if i < 0 {
			errs = append(errs, fieldError("base.debian.suite", fmt.Errorf("%s; every node needs it", what)))
			continue
		}
		errs = append(errs, fieldError(fmt.Sprintf("base.debian.packages[%d]", i), errors.New(what)))
	}
	return errors.Join(errs...)
}

// packageName returns NAME from a package written as NAME=VERSION, NAME/SUITE or NAME [ARCH].
func packageName(spec string) string {
	if i := strings.IndexAny(spec, "=/ "); i >= 0 {
		return spec[:i]
	}
	return spec
}

// versions lists the versions of a package in the archive.
func (x *aptIndex) versions(ctx context.Context, name string) string {
	out, _, err := x.run(ctx, "apt-cache", "madison", "--", name)
	if err != nil {
		return ""
	}
	var all []string
	for line := range strings.Lines(out) {
		if f := strings.Split(line, "|"); len(f) == 3 {
			all = append(all, strings.TrimSpace(f[1]))
		}
	}
	if all = slices.Compact(all); len(all) == 0 {
		return ""
	}
	return ": it has " + strings.Join(all, ", ")
}
