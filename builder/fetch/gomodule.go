package fetch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"go/version"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/edgebake/edgebake/builder/procgroup"
	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
	"golang.org/x/sys/unix"
)

// GoRecipe describes how to compile programs of a module from the Go module proxy. With the same
// recipe and Go release, every computer compiles the same bytes.
type GoRecipe struct {
	Module   string   `json:"module"`
	Version  string   `json:"version"`
	Packages []string `json:"packages"` // import paths of main packages
	LDFlags  string   `json:"ldflags,omitempty"`
	Arch     string   `json:"arch"` // GOARCH; GOOS is always linux
	// StagingReplace is for k8s.io/kubernetes, whose go.mod replaces the k8s.io modules with local
	// directories. With it, their published releases are used instead: v0.x.y for v1.x.y.
	StagingReplace bool `json:"stagingReplace,omitempty"`
}

// KubernetesRecipe returns the recipe that compiles commands ("kubelet", "kubeadm" …) of a
// Kubernetes release and sets their version variables, which kubeadm needs.
func KubernetesRecipe(version, arch string, commands ...string) (GoRecipe, error) {
	if !semver.IsValid(version) || semver.Canonical(version) != version {
		return GoRecipe{}, fmt.Errorf("compiling Kubernetes %q: not a version, write it like v1.36.3", version)
	}
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	const p = "k8s.io/component-base/version."
	r := GoRecipe{Module: "k8s.io/kubernetes", Version: version, Arch: arch, StagingReplace: true,
		LDFlags: fmt.Sprintf("-s -w -X %[1]sgitVersion=%[2]s -X %[1]sgitMajor=%[3]s -X %[1]sgitMinor=%[4]s -X %[1]sgitTreeState=archive", p, version, major, minor)}
	for _, c := range commands {
		r.Packages = append(r.Packages, r.Module+"/cmd/"+c)
	}
	return r, nil
}

// ContainerdRecipe returns the recipe that compiles containerd 2.x, such as "2.2.9": the daemon,
// its runc shim and ctr.
func ContainerdRecipe(version, arch string) (GoRecipe, error) {
	v := "v" + strings.TrimPrefix(version, "v")
	if !semver.IsValid(v) || semver.Canonical(v) != v {
		return GoRecipe{}, fmt.Errorf("compiling containerd %q: not a version, write it like 2.2.9", version)
	}
	if semver.Major(v) != "v2" {
		return GoRecipe{}, fmt.Errorf("compiling containerd %s: only 2.x can be compiled from its module; get 1.7 from Debian (containerd.debian) or a release server", version)
	}
	r := GoRecipe{Module: "github.com/containerd/containerd/v2", Version: v, Arch: arch,
		LDFlags: "-s -w -X github.com/containerd/containerd/v2/version.Version=" + v}
	for _, c := range []string{"containerd", "containerd-shim-runc-v2", "ctr"} {
		r.Packages = append(r.Packages, r.Module+"/cmd/"+c)
	}
	return r, nil
}

// newGoTool returns the go command on PATH for compiling a recipe.
func newGoTool(r GoRecipe, log io.Writer) (*goTool, error) {
	path, err := exec.LookPath("go")
	if err != nil {
		return nil, err
	}
	return &goTool{path: path, arch: r.Arch, log: log}, nil
}

// GoBuild compiles the recipe's packages and returns the blob of each. Packages that the same Go
// release has already compiled come from the cache. GoBuild writes its progress to log.
func GoBuild(ctx context.Context, c *Cache, r GoRecipe, log io.Writer) (map[string]string, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	// Do not use GoCommand, which rejects an old go even if all programs are cached. The build
	// calls it before it compiles.
	g, err := newGoTool(r, log)
	if err != nil {
		return nil, fmt.Errorf("compiling %s: no go command on PATH; install Go, or get the programs by source url or file", r.Module)
	}
	facts, err := g.facts(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("finding the version of go: %w", err)
	}

	// All packages are compiled in one temporary module. It is made for the first package that is
	// not cached.
	var scratch string
	defer func() {
		if scratch != "" {
			os.RemoveAll(scratch)
		}
	}()
	module := sync.OnceValue(func() (err error) {
		if scratch, err = c.TempDir(); err != nil {
			return err
		}
		return g.scratchModule(ctx, scratch, r)
	})
	blobs := map[string]string{}
	for _, pkg := range r.Packages {
		k, err := r.key(facts, pkg)
		if err != nil {
			return nil, err
		}
		sha, err := c.Make(ctx, k, func(ctx context.Context, w io.Writer) error {
			if err := module(); err != nil {
				return err
			}
			return g.build(ctx, scratch, pkg, r.LDFlags, w)
		})
		if err != nil {
			return nil, fmt.Errorf("compiling %s %s for %s: %w", pkg, r.Version, r.Arch, err)
		}
		blobs[pkg] = sha
	}
	return blobs, nil
}

// GoRelease returns the Go release that would compile the recipe on this computer: the release of
// the go on PATH or, if the module requires a newer one, the release that go downloads. It fetches
// the module only if the go on PATH is older than want.
func GoRelease(ctx context.Context, c *Cache, r GoRecipe, want string, log io.Writer) (string, error) {
	g, err := newGoTool(r, log)
	if err != nil {
		return "", err
	}
	have, err := g.facts(ctx, c)
	if err != nil {
		return "", fmt.Errorf("finding the version of go: %w", err)
	}
	own := strings.TrimSpace(string(have))
	if own == want || version.Compare(own, want) > 0 {
		return own, nil
	}
	dir, err := c.TempDir()
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	if err := g.scratchModule(ctx, dir, r); err != nil {
		return "", err
	}
	stdout, err := g.run(ctx, dir, "env", "GOVERSION")
	if err != nil {
		return "", fmt.Errorf("finding the Go release that compiles %s %s: %w", r.Module, r.Version, err)
	}
	return strings.TrimSpace(string(stdout)), nil
}

// FindGoVersion returns an UnknownVersionError if the module has no such version. It does not fetch
// the module. If the proxy does not respond, FindGoVersion returns nil, and compiling reports the
// error.
func FindGoVersion(ctx context.Context, c *Cache, r GoRecipe) error {
	g, err := newGoTool(r, io.Discard)
	if err != nil {
		return nil
	}
	dir, err := c.TempDir()
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module scratch\n"), 0o644); err != nil {
		return fmt.Errorf("making a scratch module: %w", err)
	}
	patient, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	_, err = g.run(patient, dir, "list", "-m", r.Module+"@"+r.Version)
	if err != nil {
		err = g.unknownVersion(patient, dir, r)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// Compiled returns the blob of each of the recipe's packages. It returns false unless the Go
// release that this computer would use has already compiled all of them.
func Compiled(ctx context.Context, c *Cache, r GoRecipe) (map[string]string, bool) {
	g, err := newGoTool(r, io.Discard)
	if err != nil {
		return nil, false
	}
	facts, err := g.facts(ctx, c)
	if err != nil {
		return nil, false // compiling reports the error
	}
	blobs := map[string]string{}
	for _, pkg := range r.Packages {
		key, err := r.key(facts, pkg)
		if err != nil {
			return nil, false
		}
		sha, ok := c.Lookup(key)
		if !ok {
			return nil, false
		}
		blobs[pkg] = sha
	}
	return blobs, true
}

// key returns the cache key for one program of the recipe.
func (r GoRecipe) key(facts []byte, pkg string) (string, error) {
	r.Packages = []string{pkg}
	b, err := json.Marshal(r)
	return fmt.Sprintf("go %s %s", strings.Join(strings.Fields(string(facts)), " "), b), err
}

// CompiledBy returns the Go release that compiled a program, or "" if it is unknown.
func CompiledBy(program io.ReaderAt) string {
	info, err := buildinfo.Read(program)
	if err != nil {
		return ""
	}
	return info.GoVersion
}

func (r GoRecipe) check() error {
	var errs []error
	if err := module.Check(r.Module, r.Version); err != nil {
		errs = append(errs, err)
	}
	if !slices.Contains([]string{"amd64", "arm64"}, r.Arch) {
		errs = append(errs, fmt.Errorf("architecture %q: want amd64 or arm64", r.Arch))
	}
	if len(r.Packages) == 0 {
		errs = append(errs, errors.New("no packages named"))
	}
	for _, p := range r.Packages {
		if p != r.Module && !strings.HasPrefix(p, r.Module+"/") {
			errs = append(errs, fmt.Errorf("package %s is not in module %s", p, r.Module))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("compiling %s: %w", r.Module, err)
	}
	return nil
}

// leastGo is the first Go release that downloads a newer release if a module requires it.
const leastGo = "1.21"

var goRelease = regexp.MustCompile(`\bgo(1\.[0-9]+(\.[0-9]+)?)`)

// ErrNoGo means that there is no go command.
var ErrNoGo = errors.New("there is no go on PATH: install Go (https://go.dev/dl)")

// GoCommand returns the path of the go command, or ErrNoGo. It rejects an old go, which would call
// a newer go.mod malformed.
func GoCommand(ctx context.Context) (string, error) {
	path, err := exec.LookPath("go")
	if errors.Is(err, exec.ErrNotFound) {
		return "", ErrNoGo
	}
	if err != nil {
		return "", err
	}
	cmd := procgroup.Command(ctx, path, "version")
	cmd.Env = append(cmd.Env, "GOTOOLCHAIN=local") // do not use the release that a go.mod in a parent directory requires
	stdout, err := cmd.Output()
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	// If go cannot report its version, it fails later with the reason.
	if m := goRelease.FindSubmatch(stdout); err == nil && m != nil && semver.Compare("v"+string(m[1]), "v"+leastGo) < 0 {
		return "", fmt.Errorf("go %s at %s is too old: at least %s is required (it downloads the release that it needs): see https://go.dev/dl, or install Debian's from backports", m[1], path, leastGo)
	}
	return path, nil
}

// goTool runs the go command. Of the user's settings, only those for the module proxy affect it.
type goTool struct {
	path, arch string
	log        io.Writer
}

// environ returns the environment for go, with all settings that affect the result. None of their
// values is empty: instead of an empty value, go would use the one in its env file.
func (g *goTool) environ() []string {
	drop := []string{"GOFLAGS", "GOEXPERIMENT", "GODEBUG", "GOOS", "GOARCH", "GOROOT", "GOBIN", "GO111MODULE", "GOGCCFLAGS", "CC", "CXX", "PWD"}
	env := slices.DeleteFunc(procgroup.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains(drop, name) || strings.HasPrefix(name, "CGO_")
	})
	return append(env, "GOFLAGS=-mod=mod", "GO111MODULE=on", "GOWORK=off", "CGO_ENABLED=0",
		"GOOS=linux", "GOARCH="+g.arch, "GOAMD64=v1", "GOARM64=v8.0", "GOFIPS140=off")
}

// run runs go in dir and returns standard output, even if go fails. Standard error goes to the log
// and into the error. The caller must remove dir, since an interrupted go may leave files in it.
func (g *goTool) run(ctx context.Context, dir string, args ...string) ([]byte, error) {
	cmd := procgroup.Command(ctx, g.path, args...)
	cmd.Dir = dir
	cmd.Env = append(g.environ(), "GOTMPDIR="+dir)
	var out bytes.Buffer
	stderr := &tail{max: 4 << 10}
	cmd.Stdout = &out
	cmd.Stderr = io.MultiWriter(g.log, stderr)
	// An interrupted go needs time to remove its files.
	err := procgroup.Run(cmd, 10*time.Second)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		for _, full := range []error{unix.ENOSPC, unix.EDQUOT} {
			if text := []byte(full.Error()); bytes.Contains(stderr.b, text) || bytes.Contains(out.Bytes(), text) {
				return out.Bytes(), fmt.Errorf("go %s: %w: free space with `edgebake cache prune` and `go clean -cache`, or use a cache on another disk (--cache)", args[0], full)
			}
		}
		// With -json, go reports errors on standard output.
		return out.Bytes(), fmt.Errorf("go %s: %w\n%s%s", strings.Join(args, " "), err, stderr.b, lastBytes(out.Bytes(), 4<<10))
	}
	return out.Bytes(), nil
}

// facts returns the Go release, on which the result depends. It runs go in a new module, because
// the module in the current directory may require another release.
func (g *goTool) facts(ctx context.Context, c *Cache) ([]byte, error) {
	dir, err := c.TempDir()
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module scratch\n"), 0o644); err != nil {
		return nil, err
	}
	stdout, err := g.run(ctx, dir, "env", "GOVERSION", "GOEXPERIMENT")
	if err != nil {
		return nil, err
	}
	version, experiments, _ := strings.Cut(string(stdout), "\n")
	return []byte(version), Experiments(experiments)
}

// Experiments returns an error if experiments, the output of `go env GOEXPERIMENT`, is not empty.
// An empty environment variable does not override go's env file, and every value changes the
// program, even the default.
func Experiments(experiments string) error {
	if experiments = strings.TrimSpace(experiments); experiments != "" {
		return fmt.Errorf("GOEXPERIMENT=%s is set in go's own file (`go env GOENV` names it), and would change the program's bytes: remove it with `go env -u GOEXPERIMENT`", experiments)
	}
	return nil
}

func (g *goTool) build(ctx context.Context, dir, pkg, ldflags string, w io.Writer) error {
	fmt.Fprintf(g.log, "compiling %s\n", pkg)
	start := time.Now()
	sum := sha256.Sum256([]byte(pkg))
	out := filepath.Join(dir, "out-"+hex.EncodeToString(sum[:4]))
	if _, err := g.run(ctx, dir, "build", "-mod=mod", "-trimpath", "-buildvcs=false", "-ldflags="+ldflags, "-o", out, pkg); err != nil {
		return err
	}
	f, err := os.Open(out)
	if err != nil {
		return fmt.Errorf("reading the compiled program: %w", err)
	}
	defer f.Close()
	if _, err := io.Copy(w, f); err != nil {
		return err
	}
	fmt.Fprintf(g.log, "compiled %s in %.0f s\n", pkg, time.Since(start).Seconds())
	return os.Remove(out)
}

// scratchModule writes a go.mod that requires the recipe's module. It copies settings that apply
// only in a main module: replacements, language version, GODEBUG defaults.
func (g *goTool) scratchModule(ctx context.Context, dir string, r GoRecipe) error {
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module scratch\n"), 0o644); err != nil {
		return fmt.Errorf("making a scratch module: %w", err)
	}
	fmt.Fprintf(g.log, "fetching %s %s\n", r.Module, r.Version)
	out, err := g.run(ctx, dir, "mod", "download", "-json", r.Module+"@"+r.Version)
	var got struct{ GoMod, Error string }
	if err != nil {
		if unknown := g.unknownVersion(ctx, dir, r); unknown != nil {
			return unknown
		}
		if ctx.Err() == nil && json.Unmarshal(out, &got) == nil && got.Error != "" {
			err = fmt.Errorf("%s%s", strings.TrimPrefix(got.Error, r.Module+"@"+r.Version+": "), g.proxies(ctx, dir))
		}
		return fmt.Errorf("fetching module %s %s: %w", r.Module, r.Version, err)
	}
	if err := json.Unmarshal(out, &got); err != nil {
		return fmt.Errorf("parsing the output of go mod download for %s: %w", r.Module, err)
	}
	theirs, err := os.ReadFile(got.GoMod)
	if err != nil {
		return fmt.Errorf("reading go.mod of %s: %w", r.Module, err)
	}
	ours, err := scratchGoMod(r, got.GoMod, theirs)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), ours, 0o644); err != nil {
		return fmt.Errorf("making a scratch module: %w", err)
	}
	return nil
}

// proxies describes where go looks for modules, and the alternatives, for an error.
func (g *goTool) proxies(ctx context.Context, dir string) string {
	out, err := g.run(ctx, dir, "env", "GOPROXY")
	if err != nil {
		return ""
	}
	var urls []string
	for _, u := range strings.FieldsFunc(strings.TrimSpace(string(out)), func(r rune) bool { return r == ',' || r == '|' }) {
		urls = append(urls, Redact(u))
	}
	return fmt.Sprintf(": go gets modules from %s (GOPROXY); without them, get the programs from a release server (source: url) or a directory (source: file)", strings.Join(urls, ", "))
}

// UnknownVersionError means that a module does not have a version.
type UnknownVersionError struct {
	Module, Version string
	// Newest contains the newest release and, if it differs, the newest release of the same minor
	// version.
	Newest []string
}

func (e *UnknownVersionError) Error() string {
	return fmt.Sprintf("the Go module proxy has no %s %s: the newest is %s", e.Module, e.Version, strings.Join(e.Newest, ", the newest of that minor version is "))
}

// unknownVersion returns an UnknownVersionError if the proxy has other versions of the module, but
// not this one.
func (g *goTool) unknownVersion(ctx context.Context, dir string, r GoRecipe) error {
	out, err := g.run(ctx, dir, "list", "-m", "-versions", r.Module)
	if err != nil {
		return nil // the proxy does not respond
	}
	all := strings.Fields(string(out))
	if len(all) < 2 || slices.Contains(all, r.Version) {
		return nil
	}
	newest, same := "", ""
	for _, v := range all[1:] { // after the module's name, versions in ascending order
		if semver.Prerelease(v) != "" {
			continue
		}
		newest = v
		if semver.MajorMinor(v) == semver.MajorMinor(r.Version) {
			same = v
		}
	}
	e := &UnknownVersionError{Module: r.Module, Version: r.Version, Newest: []string{newest}}
	if same != "" && same != newest {
		e.Newest = append(e.Newest, same)
	}
	return e
}

// scratchGoMod returns the go.mod of the temporary module. theirs is the go.mod of the recipe's
// module.
func scratchGoMod(r GoRecipe, file string, theirs []byte) ([]byte, error) {
	mod, err := modfile.Parse(file, theirs, nil)
	if err != nil {
		return nil, fmt.Errorf("reading go.mod of %s: %w", r.Module, err)
	}
	var b bytes.Buffer
	b.WriteString("module scratch\n")
	if mod.Go != nil {
		fmt.Fprintf(&b, "\ngo %s\n", mod.Go.Version)
	}
	for _, d := range mod.Godebug {
		fmt.Fprintf(&b, "\ngodebug %s=%s\n", d.Key, d.Value)
	}
	fmt.Fprintf(&b, "\nrequire %s %s\n", r.Module, r.Version)
	for _, rep := range mod.Replace {
		local := strings.HasPrefix(rep.New.Path, ".")
		switch {
		case local && r.StagingReplace:
			fmt.Fprintf(&b, "\nreplace %s => %s v0.%s\n", rep.Old.Path, rep.Old.Path, strings.TrimPrefix(r.Version, "v1."))
		case !local:
			fmt.Fprintf(&b, "\nreplace %s %s => %s %s\n", rep.Old.Path, rep.Old.Version, rep.New.Path, rep.New.Version)
		}
	}
	return b.Bytes(), nil
}

// tail keeps the last max bytes that are written to it.
type tail struct {
	b   []byte
	max int
}

func (t *tail) Write(p []byte) (int, error) {
	t.b = slices.Clone(lastBytes(append(t.b, p...), t.max))
	return len(p), nil
}

func lastBytes(b []byte, n int) []byte { return b[max(0, len(b)-n):] }
