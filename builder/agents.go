package builder

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/builder/procgroup"
	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
)

// modulePath is the path of edgebake's Go module.
const modulePath = "github.com/edgebake/edgebake"

// resolveAgents pins edgebake's own programs for the image.
func (b *resolver) resolveAgents(ctx context.Context) error {
	agents := []struct {
		name, given, sha string
		err              error
	}{
		{name: "firstboot", given: b.img.Agents.Firstboot},
		{name: "ipvscare", given: b.img.Agents.IPVSCare},
	}
	var wg sync.WaitGroup // compile in parallel: go takes seconds even if nothing has changed
	for i := range agents {
		a := &agents[i]
		wg.Go(func() {
			if a.given == "" {
				a.sha, a.err = b.agent(ctx, a.name)
				return
			}
			if a.sha, a.err = b.importNamed(ctx, a.given, ""); a.err == nil {
				a.err = b.checkFile(a.sha, "usr/bin/"+a.name, a.given)
			}
			a.err = fieldError("agents."+a.name, a.err)
		})
	}
	wg.Wait()
	var errs []error
	for _, a := range agents {
		if recipe, ok := agentRecipe(b.Options, a.name, b.arch); ok && errors.Is(a.err, errNoAgent) {
			errs = append(errs, b.addGo("agents."+a.name, program{a.name, "usr/bin/" + a.name}, recipe))
			continue
		}
		if a.err != nil {
			errs = append(errs, a.err)
			continue
		}
		compiledBy, err := b.compiledBy(a.sha)
		if err != nil {
			return err
		}
		b.add(origin{field: "agents." + a.name}, a.name, plan.Input{Make: makeAgent, File: a.given, Go: compiledBy, SHA256: a.sha}, program{a.name, "usr/bin/" + a.name}.layer())
	}
	return errors.Join(errs...)
}

// Program returns one of edgebake's programs for an architecture. It tries edgebake's package, the
// source tree around the current directory, the directory of the running edgebake, and the module
// proxy, in this order.
func Program(ctx context.Context, name, arch string, o Options) ([]byte, error) {
	b := &buildEnv{Options: o, arch: arch}
	o.Cache.Until(ctx)
	sha, err := b.agent(ctx, name)
	if r, ok := agentRecipe(o, name, arch); ok && errors.Is(err, errNoAgent) {
		made, ok := fetch.Compiled(ctx, b.Cache, r)
		err = nil
		if !ok {
			s := b.startStep(name, compiling)
			if made, err = fetch.GoBuild(ctx, b.Cache, r, s); err == nil {
				s.done()
			}
		}
		sha = made[r.Packages[0]]
	}
	if err != nil {
		return nil, err
	}
	return b.Cache.ReadBlob(sha)
}

// agentRecipe returns the recipe that compiles one of edgebake's programs from the module proxy, in
// the version of the running edgebake. It returns false if the proxy may not have that version.
func agentRecipe(o Options, name, arch string) (fetch.GoRecipe, bool) {
	v := o.Published
	if v == "" {
		v = "v" + o.Version
		if !semver.IsValid(v) || semver.Build(v) != "" || semver.Canonical(v) != v || module.IsPseudoVersion(v) {
			return fetch.GoRecipe{}, false // "(devel)", or a commit that may exist only here
		}
	}
	return fetch.GoRecipe{Module: modulePath, Version: v, Packages: []string{modulePath + "/cmd/" + name}, Arch: arch, LDFlags: "-s -w"}, true
}

// errNoAgent means that one of edgebake's programs is missing.
var errNoAgent = errors.New("install edgebake's package, which contains it, or set its path in agents of the Image")

// packaged is the directory of the programs that edgebake's package contains for every
// architecture, relative to the directory of the running edgebake.
const packaged = "../lib/edgebake"

// agent puts one of edgebake's programs into the cache. It tries edgebake's package, the source
// tree around the current directory, and the directory of the running edgebake, in this order.
func (b *buildEnv) agent(ctx context.Context, name string) (string, error) {
	dir, err := ownDir()
	if err != nil {
		return "", fmt.Errorf("looking for %s next to edgebake: %w", name, err)
	}
	forArch := name + "-linux-" + b.arch
	// An installed edgebake uses the programs of its package, even if the current directory is a
	// source tree: that may have another version.
	if p := filepath.Join(dir, packaged, forArch); fileExists(p) {
		return b.importProgram(ctx, p)
	}
	// Prefer the source tree: the programs next to the running edgebake may be from an older build.
	if src, ok := sourceTree(); ok {
		return b.compileAgent(ctx, name, src)
	}
	for _, f := range []string{forArch, name} {
		if p := filepath.Join(dir, f); fileExists(p) && elfArch(p) == b.arch {
			return b.importFile(ctx, p, "")
		}
	}
	return "", fmt.Errorf("there is no %s next to edgebake (in %s): %w", forArch, dir, errNoAgent)
}

// importProgram imports a file into the cache if it is a program for the image's architecture.
func (b *buildEnv) importProgram(ctx context.Context, path string) (string, error) {
	if got := elfArch(path); got != b.arch {
		return "", fmt.Errorf("reading %s: not a program for %s: install edgebake's package again", path, b.arch)
	}
	return b.importFile(ctx, path, "")
}

// ownDir returns the directory of the running edgebake, with symbolic links resolved.
func ownDir() (string, error) {
	exe, err := os.Executable()
	if err != nil {
		return "", err
	}
	if real, err := filepath.EvalSymlinks(exe); err == nil {
		exe = real
	}
	return filepath.Dir(exe), nil
}

// sourceTree returns edgebake's source tree if it contains the current directory.
func sourceTree() (string, bool) {
	dir, err := os.Getwd()
	if err != nil {
		return "", false
	}
	for {
		if mod, err := os.ReadFile(filepath.Join(dir, "go.mod")); err == nil {
			return dir, bytes.HasPrefix(mod, []byte("module "+modulePath+"\n"))
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", false
		}
		dir = up
	}
}

// agentEnv lists the settings that determine the compiled bytes. An empty value does not override
// go's env file, so CompileProgram also checks that GOEXPERIMENT is empty.
var agentEnv = []string{"GOOS=linux", "CGO_ENABLED=0", "GOFLAGS=-mod=readonly", "GOWORK=off", "GOEXPERIMENT=", "GOAMD64=v1", "GOARM64=v8.0", "GOFIPS140=off"}

func (b *buildEnv) compileAgent(ctx context.Context, name, src string) (string, error) {
	s := b.startStep(name, "compiling from the source tree")
	defer s.done()
	tmp, err := b.Cache.TempDir()
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	out := filepath.Join(tmp, name)
	// go skips linking if the output already has the right contents, so start with the last result.
	key := fmt.Sprintf("agent %s %s %s", src, name, b.arch)
	last, ok := b.Cache.Lookup(key)
	if ok {
		if err := b.copyBlob(last, out); err != nil {
			return "", err
		}
	}
	if err := CompileProgram(ctx, src, name, b.arch, out); err != nil {
		return "", err
	}
	f, err := os.Open(out)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sha, _, err := b.Cache.Put(ctx, "", f)
	if err != nil || sha == last {
		return sha, err
	}
	return sha, b.Cache.Remember(key, sha)
}

// copyBlob copies a blob to a file.
func (b *buildEnv) copyBlob(sha, path string) error {
	from, err := b.Cache.OpenBlob(sha)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, io.NewSectionReader(from, 0, 1<<62))
	return errors.Join(err, to.Close())
}

// ProgramEnv returns the environment variables that determine the bytes of edgebake's programs.
func ProgramEnv(arch string) []string { return append([]string{"GOARCH=" + arch}, agentEnv...) }

// CompileProgram compiles one of edgebake's programs from the source tree src. make (AGENT in the
// Makefile) and the packaging command produce the same bytes.
func CompileProgram(ctx context.Context, src, name, arch, out string) error {
	goCmd, err := fetch.GoCommand(ctx)
	if errors.Is(err, fetch.ErrNoGo) {
		return fmt.Errorf("compiling %s in %s: %w, or edgebake's package, which contains %[1]s", name, src, err)
	}
	if err != nil {
		return fmt.Errorf("compiling %s in %s: %w", name, src, err)
	}
	dir := filepath.Dir(out)
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	work, err := os.MkdirTemp(dir, "go-") // an interrupted go may leave its temporary directory
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	run := func(args ...string) (string, error) {
		cmd := procgroup.Command(ctx, goCmd, args...)
		cmd.Dir = src
		cmd.Env = append(cmd.Env, ProgramEnv(arch)...)
		cmd.Env = append(cmd.Env, "GOTMPDIR="+work)
		var out, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &stderr
		if err := procgroup.Run(cmd, 10*time.Second); err != nil {
			return "", fmt.Errorf("compiling %s in %s: %w\n%s%s", name, src, err, stderr.Bytes(), out.Bytes())
		}
		return out.String(), nil
	}
	experiments, err := run("env", "GOEXPERIMENT")
	if err != nil {
		return err
	}
	if err := fetch.Experiments(experiments); err != nil {
		return fmt.Errorf("compiling %s in %s: %w", name, src, err)
	}
	_, err = run("build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", out, "./cmd/"+name)
	return err
}

// elfArch returns the GOARCH of an ELF file, or "" if it is unknown.
func elfArch(path string) string {
	f, err := elf.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	return archOf(f.Machine)
}

func archOf(m elf.Machine) string {
	switch m {
	case elf.EM_X86_64:
		return "amd64"
	case elf.EM_AARCH64:
		return "arm64"
	}
	return ""
}
