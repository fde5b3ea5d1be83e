// Command packaging makes edgebake's packages for each architecture: a Debian package and container
// images. They contain edgebake, the programs for nodes of all architectures, manual pages and
// shell completions. The same commit gives the same bytes, except for the container image on
// Debian, whose base comes from the current Debian archive.
package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/edgebake/edgebake/builder"
	"github.com/edgebake/edgebake/builder/procgroup"
)

// nfpm is the program that writes the Debian package. Later versions require modules that some
// module proxies do not have.
const nfpm = "github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.4"

// architectures lists the architectures of nodes and of the computers that run edgebake.
var architectures = []string{"amd64", "arm64"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	p := packages{log: os.Stdout, nodes: architectures}
	flag.StringVar(&p.src, "src", ".", "source tree")
	flag.StringVar(&p.out, "o", "", "directory to write to (default: build/packages, from which packages of earlier versions are removed)")
	arch := flag.String("arch", strings.Join(architectures, ","), "architectures of the computers that edgebake is for")
	only := flag.String("only", "deb,container,debian", "what to make: deb, container (edgebake alone), debian (a container with what base.debian needs)")
	flag.StringVar(&p.suite, "suite", "trixie", "Debian suite of the container")
	flag.Func("source", "line for apt of the container's Debian, e.g. of a snapshot; repeatable (default: today's archive)", func(s string) error {
		p.sources = append(p.sources, s)
		return nil
	})
	flag.Parse()
	if p.out == "" {
		p.out, p.replace = filepath.Join("build", "packages"), true
	}
	p.arch, p.only = strings.Split(*arch, ","), strings.Split(*only, ",")
	if err := p.build(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "packaging:", err)
		os.Exit(1)
	}
}

// packages is the state of one run.
type packages struct {
	src, out   string
	arch, only []string
	nodes      []string // architectures of nodes
	suite      string
	sources    []string
	replace    bool // remove the packages of earlier versions
	log        io.Writer

	date    time.Time
	commit  bool   // built from a commit, which is part of the version
	version string // as printed by edgebake
	stage   string // contains a directory with the files of each architecture
}

func (p *packages) build(ctx context.Context) error {
	var err error
	for _, dir := range []*string{&p.src, &p.out} {
		if *dir, err = filepath.Abs(*dir); err != nil {
			return err
		}
	}
	if p.date, p.commit, err = sourceDate(ctx, p.src); err != nil {
		return err
	}
	if err := os.MkdirAll(p.out, 0o755); err != nil {
		return err
	}
	if p.stage, err = os.MkdirTemp(p.out, ".stage-"); err != nil {
		return err
	}
	defer os.RemoveAll(p.stage)
	if err := p.layOut(ctx); err != nil {
		return err
	}
	for _, what := range p.only {
		switch what {
		case "deb":
			err = p.debs(ctx)
		case "container":
			err = p.container()
		case "debian":
			err = p.debianContainer(ctx)
		default:
			err = errors.New("want deb, container or debian")
		}
		if err != nil {
			return fmt.Errorf("making %s: %w", what, err)
		}
	}
	return nil
}

// sourceDate returns SOURCE_DATE_EPOCH, or else the date of the commit.
func sourceDate(ctx context.Context, src string) (date time.Time, commit bool, err error) {
	epoch := os.Getenv("SOURCE_DATE_EPOCH")
	if epoch == "" {
		cmd := procgroup.Command(ctx, "git", "-c", "safe.directory=*", "log", "-1", "--format=%ct")
		cmd.Dir = src
		out, err := cmd.Output()
		if err != nil {
			return date, false, fmt.Errorf("asking git for the date of the commit: %w: set SOURCE_DATE_EPOCH where there is no repository", err)
		}
		epoch, commit = strings.TrimSpace(string(out)), true
	}
	n, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return date, false, fmt.Errorf("SOURCE_DATE_EPOCH=%s: want seconds since 1970", epoch)
	}
	return time.Unix(n, 0).UTC(), commit, nil
}

// layOut writes each architecture's files as they will be installed.
func (p *packages) layOut(ctx context.Context) error {
	nodes := filepath.Join(p.stage, "nodes")
	for _, arch := range p.nodes {
		for _, name := range []string{"firstboot", "ipvscare", "installer"} {
			fmt.Fprintf(p.log, "compiling %s for %s\n", name, arch)
			if err := builder.CompileProgram(ctx, p.src, name, arch, filepath.Join(nodes, name+"-linux-"+arch)); err != nil {
				return err
			}
		}
	}
	own := filepath.Join(p.stage, "edgebake")
	if err := p.compile(ctx, runtime.GOARCH, own); err != nil {
		return err
	}
	var reported struct{ Version string }
	out, err := procgroup.Command(ctx, own, "version", "--output", "json").Output()
	if err == nil {
		err = json.Unmarshal(out, &reported)
	}
	if err != nil {
		return fmt.Errorf("asking edgebake for its version: %w", err)
	}
	p.version = reported.Version
	if err := p.checkRelease(ctx, filepath.Join(nodes, "firstboot-linux-"+runtime.GOARCH)); err != nil {
		return err
	}
	for _, arch := range p.arch {
		root := filepath.Join(p.stage, arch)
		if err := p.compile(ctx, arch, filepath.Join(root, "usr/bin/edgebake")); err != nil {
			return err
		}
		if err := os.CopyFS(filepath.Join(root, "usr/lib/edgebake"), os.DirFS(nodes)); err != nil {
			return err
		}
		if err := errors.Join(p.manuals(ctx, own, root), p.completions(ctx, own, root), p.docs(root), p.normalize(root)); err != nil {
			return err
		}
	}
	return nil
}

// checkRelease checks that a release's programs for images print its version. Their version is a
// constant in the source: Go does not add one.
func (p *packages) checkRelease(ctx context.Context, firstboot string) error {
	if strings.ContainsAny(p.version, "-+(") {
		return nil // not a release
	}
	out, err := procgroup.Command(ctx, firstboot, "version").Output()
	if err != nil {
		return fmt.Errorf("asking firstboot for its version: %w", err)
	}
	if reported := strings.TrimSpace(string(out)); reported != "firstboot "+p.version {
		return fmt.Errorf("this is release %s, but its programs for images report version %q: set the version in cmd/internal/version/version.go before the tag", p.version, reported)
	}
	return nil
}

// compile compiles edgebake itself. Go takes its version from the git repository.
func (p *packages) compile(ctx context.Context, arch, out string) error {
	fmt.Fprintf(p.log, "compiling edgebake for %s\n", arch)
	cmd := procgroup.Command(ctx, "go", "build", "-trimpath", "-ldflags=-s -w", "-buildvcs="+strconv.FormatBool(p.commit), "-o", out, "./cmd/edgebake")
	cmd.Dir = p.src
	cmd.Env = append(append(cmd.Env, builder.ProgramEnv(arch)...),
		// Go calls git, which rejects a repository that belongs to another user.
		"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*")
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("compiling edgebake for %s: %w\n%s", arch, err, output)
	}
	return nil
}

func (p *packages) manuals(ctx context.Context, edgebake, root string) error {
	dir := filepath.Join(root, "usr/share/man/man1")
	cmd := procgroup.Command(ctx, edgebake, "man", "--output", dir)
	cmd.Env = append(cmd.Env, "SOURCE_DATE_EPOCH="+strconv.FormatInt(p.date.Unix(), 10))
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("making the manual pages: %w\n%s", err, output)
	}
	pages, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, page := range pages {
		name := filepath.Join(dir, page.Name())
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if err := errors.Join(writeGzip(name+".gz", text), os.Remove(name)); err != nil {
			return err
		}
	}
	return nil
}

func (p *packages) completions(ctx context.Context, edgebake, root string) error {
	for shell, name := range map[string]string{
		"bash": "usr/share/bash-completion/completions/edgebake",
		"zsh":  "usr/share/zsh/vendor-completions/_edgebake",
		"fish": "usr/share/fish/vendor_completions.d/edgebake.fish",
	} {
		script, err := procgroup.Command(ctx, edgebake, "completion", shell).Output()
		if err != nil {
			return fmt.Errorf("making the completions of %s: %w", shell, err)
		}
		if err := writeFile(filepath.Join(root, name), script); err != nil {
			return err
		}
	}
	return nil
}

// docs writes the files that Debian requires in every package.
func (p *packages) docs(root string) error {
	doc := filepath.Join(root, "usr/share/doc/edgebake")
	news, err := os.ReadFile(filepath.Join(p.src, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	debian := fmt.Sprintf("edgebake (%s) unstable; urgency=medium\n\n  * For the changes of this version, see NEWS.md.gz.\n\n -- edgebake developers <edgebake@edgebake.io>  %s\n",
		debianVersion(p.version, p.date), p.date.Format(time.RFC1123Z))
	return errors.Join(
		writeGzip(filepath.Join(doc, "changelog.gz"), []byte(debian)),
		writeGzip(filepath.Join(doc, "NEWS.md.gz"), news),
		p.copyDocs(doc),
		writeFile(filepath.Join(doc, "copyright"), []byte(copyright)),
		writeFile(filepath.Join(root, "usr/share/lintian/overrides/edgebake"), []byte(overrides)),
	)
}

// copyDocs copies the documents that the README links to, under the same names.
func (p *packages) copyDocs(doc string) error {
	var errs []error
	for _, pattern := range []string{"README.md", "ARCHITECTURE.md", "docs/*.md", "docs/*.svg", "docs/*.png", "docs/decisions/*.md", "test/bench/results/*.md", "configs/examples/*.yaml"} {
		files, err := filepath.Glob(filepath.Join(p.src, pattern))
		if err == nil && len(files) == 0 {
			err = fmt.Errorf("there is no %s in %s", pattern, p.src)
		}
		errs = append(errs, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err == nil && filepath.Base(file) == "quickstart.yaml" {
				text, err = quickstartAlone(text)
			}
			// Debian requires this name and a compressed changelog.
			text = bytes.ReplaceAll(text, []byte("](CHANGELOG.md)"), []byte("](NEWS.md.gz)"))
			errs = append(errs, err, writeFile(filepath.Join(doc, filepath.Dir(pattern), filepath.Base(file)), text))
		}
	}
	return errors.Join(errs...)
}

// quickstartAlone returns the example without its two container images, which exist only after
// `make demo` in a clone.
func quickstartAlone(doc []byte) ([]byte, error) {
	text := string(doc)
	var errs []error
	cut := func(from, to, instead string) {
		i := strings.Index(text, from)
		if i < 0 || !strings.Contains(text[i:], to) {
			errs = append(errs, fmt.Errorf("the example quickstart.yaml has no %q before %q any more", from, to))
			return
		}
		end := i + strings.Index(text[i:], to) + len(to)
		text = text[:i] + instead + text[end:]
	}
	cut("# A small image", "joins it to a control plane.\n", `# A small image for virtual machines: Debian, and Kubernetes and containerd built
# from their sources. Copy it to a directory of yours, then:
#   edgebake build quickstart.yaml
#   edgebake init --join -    # paste kubeadm's line: writes site.yaml, and another Image
#   edgebake stamp quickstart.raw site.yaml --output node.raw
#   edgebake boot node.raw
`)
	cut("  # The pause image:", "sandbox: edgebake.test/pause:1\n", "")
	cut("# Container images on board", "layout: ../../build/images\n  - ref: edgebake.test/hello:1\n    layout: ../../build/images\n", `# Container images on board start without any registry. The pause image, which every
# pod starts with, is named in containerd.sandbox too.
#   images:
#     - ref: registry.example.com/pause:3.10
`)
	return []byte(text), errors.Join(errs...)
}

const copyright = `Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: edgebake
Source: https://github.com/edgebake/edgebake

Files: *
Copyright: 2026 the edgebake authors
License: Apache-2.0
 On Debian systems, the complete text of the Apache License, version 2.0, is in
 /usr/share/common-licenses/Apache-2.0.
`

// overrides disables lintian's reports about Go programs, programs for other architectures, and
// programs that read dpkg's database in an image.
const overrides = `# Go's programs are linked statically.
edgebake: statically-linked-binary *
# What the images of nodes get, for nodes of all architectures.
edgebake: binary-from-other-architecture *
# It is the database in an image that they read, not this computer's.
edgebake: uses-dpkg-database-directly *
`

// normalize sets the modes and times of all files.
func (p *packages) normalize(root string) error {
	return filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		mode := os.FileMode(0o644)
		if d.IsDir() || slices.Contains(programDirs, filepath.Dir(rel)) {
			mode = 0o755
		}
		return errors.Join(err, os.Chmod(path, mode), os.Chtimes(path, p.date, p.date))
	})
}

// programDirs lists the directories for programs.
var programDirs = []string{"usr/bin", "usr/lib/edgebake"}

// debs writes the Debian packages.
func (p *packages) debs(ctx context.Context) error {
	version := debianVersion(p.version, p.date)
	for _, arch := range p.arch {
		out := filepath.Join(p.out, fmt.Sprintf("edgebake_%s_%s.deb", version, arch))
		cmd := procgroup.Command(ctx, "go", "run", nfpm, "package", "--config", filepath.Join(p.src, "packaging/nfpm.yaml"), "--packager", "deb", "--target", out)
		cmd.Dir = p.src
		cmd.Env = append(cmd.Env, "GOFLAGS=", "ARCH="+arch, "VERSION="+version, "STAGE="+filepath.Join(p.stage, arch),
			"SOURCE_DATE_EPOCH="+strconv.FormatInt(p.date.Unix(), 10))
		if output, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nfpm: %w\n%s", err, output)
		}
		if err := p.made(out); err != nil {
			return err
		}
	}
	return nil
}

// made prints the name and size of a package. If p.replace is set, it removes earlier versions.
func (p *packages) made(name string) error {
	fi, err := os.Stat(name)
	if err != nil {
		return err
	}
	fmt.Fprintf(p.log, "made %s (%d MiB)\n", name, fi.Size()>>20)
	if !p.replace {
		return nil
	}
	dir, base := filepath.Split(name)
	all, err := os.ReadDir(dir)
	for _, other := range all {
		if ok, _ := filepath.Match(anyVersion.ReplaceAllString(base, "${1}_*$2"), other.Name()); ok && other.Name() != base {
			err = errors.Join(err, os.Remove(filepath.Join(dir, other.Name())))
		}
	}
	return err
}

// anyVersion matches the file names of Debian packages and container images of every version.
var anyVersion = regexp.MustCompile(`^([^_]+)_[^_]+(_[a-z0-9]+\.deb|_[a-z0-9]+\.oci\.tar|\.oci\.tar)$`)

// debianVersion returns a version that dpkg sorts correctly: prereleases and commits come before
// the release.
func debianVersion(version string, date time.Time) string {
	if version == "(devel)" {
		return "0~" + date.Format("20060102150405")
	}
	release, pre, ok := strings.Cut(version, "-")
	if !ok {
		return version
	}
	return release + "~" + strings.ReplaceAll(pre, "-", ".")
}

func writeFile(name string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return os.WriteFile(name, data, 0o644)
}

func writeGzip(name string, data []byte) error {
	var b strings.Builder
	w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := w.Write(data); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return writeFile(name, []byte(b.String()))
}
