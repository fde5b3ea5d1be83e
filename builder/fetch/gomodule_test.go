package fetch

import (
	"archive/zip"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/desk"
)

func TestScratchGoModStandsInForTheModulesOwn(t *testing.T) {
	const theirs = `module k8s.io/kubernetes

go 1.26.0

godebug default=go1.26

require (
	k8s.io/api v0.0.0
	example.com/x v1.0.0
)

replace (
	k8s.io/api => ./staging/src/k8s.io/api
	k8s.io/kms => ./staging/src/k8s.io/kms
	example.com/x => example.com/fork v1.2.3
)
`
	r, err := KubernetesRecipe("v1.36.3", "amd64", "kubelet")
	if err != nil {
		t.Fatal(err)
	}
	got, err := scratchGoMod(r, "go.mod", []byte(theirs))
	if err != nil {
		t.Fatal(err)
	}
	const want = `module scratch

go 1.26.0

godebug default=go1.26

require k8s.io/kubernetes v1.36.3

replace k8s.io/api => k8s.io/api v0.36.3

replace k8s.io/kms => k8s.io/kms v0.36.3

replace example.com/x  => example.com/fork v1.2.3
`
	if string(got) != want {
		t.Errorf("go.mod:\n%s\nwant:\n%s", got, want)
	}
	r.StagingReplace = false
	got, err = scratchGoMod(r, "go.mod", []byte(theirs))
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(got, []byte("k8s.io/api")) {
		t.Errorf("a directory of another module is replaced without StagingReplace:\n%s", got)
	}
}

func TestGoRecipeTellsAllThatIsWrong(t *testing.T) {
	_, err := GoBuild(t.Context(), nil, GoRecipe{Module: "example.com/m", Version: "1", Arch: "mips", Packages: []string{"example.com/other"}}, io.Discard)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"version", "mips", "example.com/other"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
	for _, v := range []string{"1.36.3", "v1.36", "latest"} {
		if _, err := KubernetesRecipe(v, "amd64", "kubelet"); err == nil {
			t.Errorf("Kubernetes version %q accepted", v)
		}
	}
	if _, err := ContainerdRecipe("1.7.24", "amd64"); err == nil || !strings.Contains(err.Error(), "debian") {
		t.Errorf("containerd 1.7.24: %v", err)
	}
}

func TestGoBuildWithoutGoSaysSo(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	c, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	_, err = GoBuild(t.Context(), c, GoRecipe{Module: "go.etcd.io/etcd/server/v3", Version: "v3.6.8", Arch: "amd64", Packages: []string{"go.etcd.io/etcd/server/v3"}}, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "no go command") {
		t.Fatalf("error: %v", err)
	}
}

// TestGoBuildRejectsExperiments checks that GOEXPERIMENT in go's env file is rejected, since go
// uses it if the environment variable is empty.
func TestGoBuildRejectsExperiments(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "env")
	if err := os.WriteFile(file, []byte("GOEXPERIMENT=jsonv2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOENV", file)
	c, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	_, err = GoBuild(t.Context(), c, GoRecipe{Module: "go.etcd.io/etcd/server/v3", Version: "v3.6.8", Arch: "amd64", Packages: []string{"go.etcd.io/etcd/server/v3"}}, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "GOEXPERIMENT=jsonv2 is set in go's own file") {
		t.Fatalf("error: %v", err)
	}
}

// TestGoLeavesNothing checks that the files of an interrupted go are removed.
func TestGoLeavesNothing(t *testing.T) {
	bin, tmp := t.TempDir(), t.TempDir()
	script := "#!/bin/sh\n[ \"$1\" = version ] && exit\nmkdir -p \"${GOTMPDIR:-$TMPDIR}/go-build$1\"\n[ \"$1\" = env ] && echo go1.26.0\n"
	desk.WriteProgram(t, filepath.Join(bin, "go"), script)
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Setenv("TMPDIR", tmp)
	t.Setenv("GOTMPDIR", "")
	c, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := GoRecipe{Module: "example.com/hello", Version: "v1.0.0", Packages: []string{"example.com/hello/cmd/hello"}, Arch: "amd64"}
	if _, err := GoBuild(t.Context(), c, r, io.Discard); err == nil {
		t.Fatal("no error from a go that compiles nothing")
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left in TMPDIR: %v, %v", left, err)
	}
	if left, err := os.ReadDir(c.session); err != nil || len(left) != 1 || left[0].Name() != startedFile {
		t.Errorf("left in the session's directory: %v, %v", left, err)
	}
}

// proxy makes a module proxy in a directory. It serves one module with the main package program.
func proxy(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	v := filepath.Join(dir, "proxy", "example.com", "hello", "@v")
	files := map[string]string{"go.mod": "module example.com/hello\n\ngo 1.21\n", "cmd/hello/main.go": program}
	if err := os.MkdirAll(v, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, body := range map[string][]byte{
		"list":        []byte("v1.0.0\n"),
		"v1.0.0.info": []byte(`{"Version":"v1.0.0"}`),
		"v1.0.0.mod":  []byte(files["go.mod"]),
		"v1.0.0.zip":  zipOf(t, "example.com/hello@v1.0.0/", files),
	} {
		if err := os.WriteFile(filepath.Join(v, name), body, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("GOPROXY", "file://"+filepath.Join(dir, "proxy"))
	t.Setenv("GOSUMDB", "off")
	t.Setenv("GOMODCACHE", filepath.Join(dir, "mod"))
	t.Cleanup(func() {
		// The module cache is read-only, so TempDir could not remove it.
		cmd := exec.Command("go", "clean", "-modcache")
		cmd.Env = append(os.Environ(), "GOMODCACHE="+filepath.Join(dir, "mod"))
		cmd.Run()
	})
}

func TestGoBuildIsTheSameEverywhere(t *testing.T) {
	proxy(t, "package main\n\nvar version = \"unset\"\n\nfunc main() { println(version) }\n")
	r := GoRecipe{Module: "example.com/hello", Version: "v1.0.0", Packages: []string{"example.com/hello/cmd/hello"},
		LDFlags: "-s -w -X main.version=7", Arch: "amd64"}
	build := func() (string, *Cache) {
		c, err := Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		blobs, err := GoBuild(t.Context(), c, r, t.Output())
		if err != nil {
			t.Fatal(err)
		}
		return blobs[r.Packages[0]], c
	}
	first, c := build()
	t.Setenv("GOFLAGS", "-tags=surprise -race")
	t.Setenv("GOAMD64", "v3")
	t.Setenv("GOARCH", "arm64")
	t.Setenv("CGO_ENABLED", "1")
	t.Setenv("GODEBUG", "netdns=cgo")
	// The current directory is a module that requires another Go release.
	t.Setenv("GOTOOLCHAIN", "auto")
	here := t.TempDir()
	if err := os.WriteFile(filepath.Join(here, "go.mod"), []byte("module here\n\ngo 1.999.0\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Chdir(here)
	second, _ := build()
	if first != second {
		t.Errorf("digests differ with the caller's settings: %s, %s", first, second)
	}
	left, err := os.ReadDir(c.session)
	if err != nil {
		t.Fatal(err)
	}
	if len(left) != 1 || left[0].Name() != startedFile {
		t.Errorf("scratch files left: %v", left)
	}
	prog := filepath.Join(t.TempDir(), "hello")
	b, err := os.ReadFile(c.BlobPath(first))
	if err != nil {
		t.Fatal(err)
	}
	desk.WriteProgram(t, prog, string(b))
	if out, err := exec.Command(prog).CombinedOutput(); err != nil || string(out) != "7\n" {
		t.Errorf("the program printed %q, %v", out, err)
	}
	// Now the program is in the cache, so GoBuild must work without a module proxy.
	t.Setenv("GOPROXY", "off")
	t.Setenv("GOMODCACHE", t.TempDir())
	if _, err := GoBuild(t.Context(), c, r, io.Discard); err != nil {
		t.Errorf("from the cache: %v", err)
	}
}

func TestGoBuildShowsWhatGoSays(t *testing.T) {
	proxy(t, "package main\n\nfunc main() { undefinedThing() }\n")
	c, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := GoRecipe{Module: "example.com/hello", Version: "v1.0.0", Packages: []string{"example.com/hello/cmd/hello"}, Arch: "amd64"}
	_, err = GoBuild(t.Context(), c, r, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "undefinedThing") || !strings.Contains(err.Error(), "example.com/hello/cmd/hello") {
		t.Errorf("error: %v", err)
	}
	r.Version = "v1.9.9"
	_, err = GoBuild(t.Context(), c, r, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "v1.9.9") {
		t.Errorf("unknown version: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := GoBuild(ctx, c, r, io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func zipOf(t *testing.T, prefix string, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, body := range files {
		w, err := z.Create(prefix + name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, body); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestGoWithoutRoom checks that the error says that the disk is full, even if only the compiler's
// output does.
func TestGoWithoutRoom(t *testing.T) {
	for _, stream := range []string{"1", "2"} {
		dir := t.TempDir()
		path := filepath.Join(dir, "go")
		desk.WriteProgram(t, path, "#!/bin/sh\necho compile: writing output: write x.a: no space left on device >&"+stream+"\nexit 1\n")
		g := &goTool{path: path, arch: "amd64", log: io.Discard}
		_, err := g.run(t.Context(), dir, "build", "-o", "x")
		if !NoSpace(err) || !strings.Contains(err.Error(), "edgebake cache prune") {
			t.Errorf("%v", err)
		}
	}
}

func TestUnknownVersion(t *testing.T) {
	proxy(t, "package main\n\nfunc main() {}\n")
	c, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := GoRecipe{Module: "example.com/hello", Version: "v1.7.0", Packages: []string{"example.com/hello/cmd/hello"}, Arch: "amd64"}
	_, err = GoBuild(t.Context(), c, r, io.Discard)
	var unknown *UnknownVersionError
	if !errors.As(err, &unknown) || unknown.Error() != "the Go module proxy has no example.com/hello v1.7.0: the newest is v1.0.0" {
		t.Errorf("error: %v", err)
	}
}

// TestDownloadFailsInWords checks that the error for a failed download contains go's message, which
// go prints as JSON, and the proxy settings.
func TestDownloadFailsInWords(t *testing.T) {
	proxy(t, "package main\n\nfunc main() {}\n")
	t.Setenv("GOPROXY", "http://127.0.0.1:1")
	c, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := GoRecipe{Module: "example.com/hello", Version: "v1.0.0", Packages: []string{"example.com/hello/cmd/hello"}, Arch: "amd64"}
	_, err = GoBuild(t.Context(), c, r, io.Discard)
	if err == nil {
		t.Fatal("no error without a proxy")
	}
	for _, want := range []string{"fetching module example.com/hello v1.0.0: Get ", "connection refused", "http://127.0.0.1:1 (GOPROXY)"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
	if strings.ContainsAny(err.Error(), "{}") || strings.Count(err.Error(), "example.com/hello@v1.0.0") > 0 {
		t.Errorf("error: %v", err)
	}
}

// TestFindGoVersion checks that an unknown version is found without fetching the module, that other
// errors are left to the compilation, and that compiled programs need no proxy.
func TestFindGoVersion(t *testing.T) {
	proxy(t, "package main\n\nfunc main() {}\n")
	c, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := GoRecipe{Module: "example.com/hello", Version: "v1.7.0", Packages: []string{"example.com/hello/cmd/hello"}, Arch: "amd64"}
	var unknown *UnknownVersionError
	if err := FindGoVersion(t.Context(), c, r); !errors.As(err, &unknown) || unknown.Version != "v1.7.0" {
		t.Errorf("error: %v", err)
	}
	r.Version = "v1.0.0"
	if err := FindGoVersion(t.Context(), c, r); err != nil {
		t.Error(err)
	}
	if fetched, _ := filepath.Glob(filepath.Join(os.Getenv("GOMODCACHE"), "cache/download/example.com/hello/@v/*.zip")); len(fetched) > 0 {
		t.Errorf("the module was fetched: %v", fetched)
	}
	if _, err := GoBuild(t.Context(), c, r, io.Discard); err != nil {
		t.Fatal(err)
	}
	empty := t.TempDir()
	t.Setenv("GOPROXY", "file://"+empty)
	t.Setenv("GOMODCACHE", filepath.Join(empty, "mod"))
	if err := FindGoVersion(t.Context(), c, r); err != nil {
		t.Errorf("a compiled program: %v", err)
	}
	r.Version = "v1.7.0"
	if err := FindGoVersion(t.Context(), c, r); err != nil {
		t.Errorf("with an empty proxy: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := FindGoVersion(ctx, c, r); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
