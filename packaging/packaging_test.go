package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"go.yaml.in/yaml/v3"
	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
	"golang.org/x/sys/unix"

	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/pace"
)

// TestMain sets the date of the packages, since git may reject a clone that belongs to another
// user.
func TestMain(m *testing.M) {
	os.Setenv("SOURCE_DATE_EPOCH", "1767225600")
	os.Exit(m.Run())
}

// makeIn makes packages of the source tree in a new directory and returns their paths.
func makeIn(t *testing.T, p packages) []string {
	t.Helper()
	p.src, p.log, p.out = "..", t.Output(), t.TempDir()
	if p.suite == "" {
		p.suite = "trixie"
	}
	if err := p.build(t.Context()); err != nil {
		t.Fatal(err)
	}
	made, err := filepath.Glob(filepath.Join(p.out, "*"))
	if err != nil || len(made) == 0 {
		t.Fatalf("made %q, %v", made, err)
	}
	if left, err := filepath.Glob(filepath.Join(p.out, ".*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %q, %v", left, err)
	}
	return made
}

// TestPackages makes the packages of this computer's architecture twice and compares them. Then it
// uses them without the source tree, without Go, and with an empty home directory.
func TestPackages(t *testing.T) {
	pace.Takes(t, 60*time.Second)
	host := packages{arch: []string{runtime.GOARCH}, nodes: []string{runtime.GOARCH}, only: []string{"deb", "container"}}
	made := makeIn(t, host)
	t.Setenv("TZ", "Pacific/Chatham")
	old := syscall.Umask(0o077)
	again := makeIn(t, host)
	syscall.Umask(old)
	same(t, made, again)

	root := t.TempDir()
	run(t, exec.Command(desk.NeedProgram(t, "dpkg-deb", "dpkg"), "-x", find(t, made, ".deb"), root))
	t.Run("installed", func(t *testing.T) { installed(t, root) })
	t.Run("documents", func(t *testing.T) { documents(t, root) })
	t.Run("quickstart", func(t *testing.T) { quickstart(t, root) })
	t.Run("manuals", func(t *testing.T) { manuals(t, root) })
	t.Run("completions", func(t *testing.T) { completions(t, root) })
	t.Run("container", func(t *testing.T) { container(t, find(t, made, ".oci.tar"), root) })
}

// TestAllPackages makes all packages for all architectures twice. lintian checks the Debian
// packages, and dpkg installs one. edgebake in the Debian-based container image builds an image
// without Go.
func TestAllPackages(t *testing.T) {
	nightly(t)
	desk.NeedRoot(t, "a chroot in which dpkg installs")
	all := packages{arch: architectures, nodes: architectures, only: []string{"deb", "container", "debian"}}
	made := makeIn(t, all)
	same(t, made, makeIn(t, all))
	lintian := desk.NeedProgram(t, "lintian", "lintian")
	for _, deb := range made {
		if strings.HasSuffix(deb, ".deb") {
			run(t, exec.Command(lintian, "--allow-root", "--fail-on=error,warning", "--tag-display-limit=0", deb))
		}
	}
	index, err := readArchive(t, find(t, made, runtime.GOARCH+".oci.tar")).ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Fatal(err)
	}
	img := imageFor(t, index, runtime.GOARCH)
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	unpack(t, img, root)
	work := filepath.Join(root, "work")
	resolv, err := os.ReadFile("/etc/resolv.conf")
	if err := errors.Join(err, os.Mkdir(work, 0o777), os.WriteFile(filepath.Join(root, "etc/resolv.conf"), resolv, 0o644)); err != nil {
		t.Fatal(err)
	}
	env := config.Config.Env
	for _, name := range []string{"http_proxy", "https_proxy", "no_proxy"} {
		if v := os.Getenv(name); v != "" {
			env = append(env, name+"="+v)
		}
	}
	err = buildtest.Write(work, buildtest.Base(), func(doc string) string {
		doc = strings.Replace(withoutAgents(doc), "  tar:\n    file: base.tar\n", "  debian: {suite: trixie}\n", 1)
		return strings.Replace(doc, "/etc/motd", "/etc/motd.site", 1) // Debian has its own /etc/motd
	})
	if err != nil {
		t.Fatal(err)
	}
	within(t, root, env, "/usr/bin/edgebake", "build", "image.yaml")
	within(t, root, env, "/usr/bin/edgebake", "inspect", "tiny.raw", "--verify")

	deb, err := os.ReadFile(find(t, made, runtime.GOARCH+".deb"))
	if err := errors.Join(err, os.WriteFile(filepath.Join(work, "edgebake.deb"), deb, 0o644)); err != nil {
		t.Fatal(err)
	}
	within(t, root, env, "dpkg", "--install", "edgebake.deb")
	if out := within(t, root, env, "dpkg", "--verify", "edgebake"); strings.Contains(out, "/usr/bin/") || strings.Contains(out, "/usr/lib/") {
		t.Errorf("the installed files differ from the package:\n%s", out)
	}
	within(t, root, env, "edgebake", "version")
}

// TestModuleCanBeFetched checks that a Go module may contain every file of the source tree. For
// example, a module cannot contain a file with the name of a Windows device.
func TestModuleCanBeFetched(t *testing.T) {
	files, err := zip.CheckDir(sourceOnly(t))
	if err := errors.Join(err, files.Err()); err != nil {
		t.Error(err)
	}
}

// TestGoInstall installs edgebake with the Go tool from a proxy. Then edgebake must compile its
// programs for nodes, with the same version.
func TestGoInstall(t *testing.T) {
	nightly(t)
	const version = "v0.0.0-20260101000000-abcdefabcdef"
	proxy := t.TempDir()
	at := filepath.Join(proxy, "github.com/edgebake/edgebake/@v")
	if err := os.MkdirAll(at, 0o755); err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile("../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	if err := zip.CreateFromDir(&archive, module.Version{Path: "github.com/edgebake/edgebake", Version: version}, sourceOnly(t)); err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"list": []byte(version + "\n"), version + ".mod": mod, version + ".zip": archive.Bytes(), version + ".info": []byte(`{"Version":"` + version + `"}`)} {
		if err := os.WriteFile(filepath.Join(at, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cache := strings.TrimSpace(run(t, exec.Command("go", "env", "GOMODCACHE")))
	bin := t.TempDir()
	t.Setenv("GOPROXY", "file://"+proxy+",file://"+filepath.Join(cache, "cache/download")+","+strings.TrimSpace(run(t, exec.Command("go", "env", "GOPROXY"))))
	t.Setenv("GOMODCACHE", filepath.Join(t.TempDir(), "mod"))
	t.Setenv("GONOSUMDB", "github.com/edgebake/edgebake")
	t.Setenv("GOFLAGS", "-trimpath")
	t.Setenv("GOBIN", bin)
	t.Cleanup(func() { run(t, exec.Command("go", "clean", "-modcache")) }) // the module cache is read-only
	dir := t.TempDir()
	install := exec.Command("go", "install", "github.com/edgebake/edgebake/cmd/edgebake@"+version)
	install.Dir = dir
	run(t, install)
	if err := buildtest.Write(dir, buildtest.Base(), withoutAgents); err != nil {
		t.Fatal(err)
	}
	work := t.TempDir()
	for _, command := range []string{"build", "plan"} {
		cmd := exec.Command(filepath.Join(bin, "edgebake"), command, "image.yaml", "--cache", work)
		cmd.Dir = dir
		if out := run(t, cmd); command == "plan" && !strings.Contains(out, version) {
			t.Errorf("the plan lacks %s:\n%s", version, out)
		}
	}
}

// sourceOnly copies the source tree, without build results, to a new directory.
func sourceOnly(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	// In CI, the clone may belong to another user.
	list := exec.Command("git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = ".."
	for name := range strings.SplitSeq(strings.TrimRight(run(t, list), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join("..", name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted, but not yet committed
		}
		to := filepath.Join(dir, name)
		if err := errors.Join(err, os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, text, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func nightly(t *testing.T) {
	t.Helper()
	if os.Getenv("EDGEBAKE_NIGHTLY") == "" {
		t.Skip("minutes; make nightly runs it")
	}
}

// same checks that two runs made the same files.
func same(t *testing.T, made, again []string) {
	t.Helper()
	if len(made) != len(again) {
		t.Fatalf("made %q, then %q", made, again)
	}
	for i := range made {
		a, err := os.ReadFile(made[i])
		b, err2 := os.ReadFile(again[i])
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		if filepath.Base(made[i]) != filepath.Base(again[i]) || !bytes.Equal(a, b) {
			t.Errorf("%s and %s differ", made[i], again[i])
		}
	}
}

func find(t *testing.T, made []string, ending string) string {
	t.Helper()
	i := slices.IndexFunc(made, func(name string) bool { return strings.HasSuffix(name, ending) })
	if i < 0 {
		t.Fatalf("no %s among %q", ending, made)
	}
	return made[i]
}

func run(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		t.Fatalf("%q: %v\n%s%s", cmd.Args, err, out.Bytes(), said.Bytes())
	}
	return out.String()
}

// lonely returns a command that runs an installed edgebake with an empty home directory and with no
// other program on PATH.
func lonely(t *testing.T, root, dir string, args ...string) *exec.Cmd {
	bin := filepath.Join(root, "usr/bin")
	cmd := exec.Command(filepath.Join(bin, "edgebake"), args...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + bin, "HOME=" + t.TempDir()}
	return cmd
}

func installed(t *testing.T, root string) {
	dir := t.TempDir()
	run(t, lonely(t, root, dir, "version"))
	run(t, lonely(t, root, dir, "init"))
	run(t, lonely(t, root, dir, "validate", "image.yaml"))

	// The first build reports everything that is missing at once, before it does any work.
	out, err := lonely(t, root, dir, "build", "image.yaml").CombinedOutput()
	if err == nil {
		t.Error("the build succeeded without its tools")
	}
	for _, want := range []string{"containerd.source: ", "kubernetes.source: ", "needs Go", "base.debian: making the Debian base needs mmdebstrap: apt-get install"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("error lacks %q:\n%s", want, out)
		}
	}
	if strings.Contains(string(out), "agents.") {
		t.Errorf("the package has them:\n%s", out)
	}

	// The package and the clone must build the same bytes, even if the package's edgebake runs in
	// the clone.
	if err := buildtest.Write(dir, buildtest.Base(), withoutAgents); err != nil {
		t.Fatal(err)
	}
	clone, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(dir, "image.yaml")
	run(t, lonely(t, root, dir, "build", image, "--force", "--output", filepath.Join(dir, "away.raw")))
	run(t, lonely(t, root, clone, "build", image, "--force", "--output", filepath.Join(dir, "within.raw")))
	own := filepath.Join(t.TempDir(), "edgebake")
	compile := exec.Command("go", "build", "-o", own, "./cmd/edgebake")
	compile.Dir = clone
	run(t, compile)
	build := exec.Command(own, "build", image, "--force", "--output", filepath.Join(dir, "clone.raw"), "--cache", t.TempDir())
	build.Dir = clone
	run(t, build)
	want := golden(t, filepath.Join(dir, "clone.report.json"))
	for _, name := range []string{"away", "within"} {
		if got := golden(t, filepath.Join(dir, name+".report.json")); got != want || got == "" {
			t.Errorf("%s: golden digest %q, the clone's %q", name, got, want)
		}
	}
}

// documents checks each link in the package's documents, and each example that they name.
func documents(t *testing.T, root string) {
	doc := filepath.Join(root, "usr/share/doc/edgebake")
	link := regexp.MustCompile(`\]\(([^)#:]+)(?:#([^)]*))?\)|\]\(#([^)]+)\)`)
	example := regexp.MustCompile(`configs/examples/[a-z.-]+`)
	headings := regexp.MustCompile(`(?m)^#+ (.*)$`)
	notInAnchors := regexp.MustCompile(`[^\pL\pN _-]`)
	read := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	pages, links := 0, 0
	err := filepath.WalkDir(doc, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(name) != ".md" {
			return err
		}
		pages++
		text := read(name)
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			links++
			to, anchor := name, m[3]
			if m[1] != "" {
				to, anchor = filepath.Join(filepath.Dir(name), m[1]), m[2]
			}
			if _, err := os.Stat(to); err != nil || !strings.HasPrefix(to, doc) {
				t.Errorf("%s leads to %s, which is not in the package", strings.TrimPrefix(name, doc), m[0])
				continue
			}
			found := anchor == ""
			if !found {
				for _, h := range headings.FindAllStringSubmatch(read(to), -1) {
					found = found || anchor == strings.ReplaceAll(notInAnchors.ReplaceAllString(strings.ToLower(h[1]), ""), " ", "-")
				}
			}
			if !found {
				t.Errorf("%s leads to %s: there is no such heading", strings.TrimPrefix(name, doc), m[0])
			}
		}
		for _, path := range example.FindAllString(text, -1) {
			if _, err := os.Stat(filepath.Join(doc, strings.TrimRight(path, "."))); err != nil {
				t.Errorf("%s names %s: %v", strings.TrimPrefix(name, doc), path, err)
			}
		}
		return nil
	})
	if err != nil || pages < 10 || links < 50 {
		t.Errorf("%d pages with %d links, %v", pages, links, err)
	}
}

// quickstart copies the package's examples to an empty directory, validates them, and builds
// quickstart.yaml. It replaces the inputs that require Go and mmdebstrap.
func quickstart(t *testing.T, root string) {
	dir := t.TempDir()
	examples := filepath.Join(root, "usr/share/doc/edgebake/configs/examples")
	for _, name := range []string{"quickstart.yaml", "openyurt.yaml", "release-server.yaml", "raspberry-pi.yaml", "image.yaml", "site.yaml"} {
		text, err := os.ReadFile(filepath.Join(examples, name))
		if err := errors.Join(err, os.WriteFile(filepath.Join(dir, name), text, 0o644)); err != nil {
			t.Fatal(err)
		}
		run(t, lonely(t, root, dir, "validate", name))
	}
	text, err := os.ReadFile(filepath.Join(dir, "quickstart.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, of := range []string{"edgebake.test", "make demo", "../"} {
		if strings.Contains(string(text), of) {
			t.Errorf("the package's quickstart speaks of %q, which is a clone's:\n%s", of, text)
		}
	}
	if err := buildtest.Write(dir, buildtest.Base(), nil); err != nil {
		t.Fatal(err)
	}
	const compiled = "goModule: {}"
	own := strings.ReplaceAll(string(text), compiled, "file: {dir: programs}")
	if own == string(text) {
		t.Errorf("nothing is compiled:\n%s", text)
	}
	own = strings.Replace(own, "  debian:\n    suite: trixie\n", "  tar: {file: base.tar}\n", 1)
	if err := os.WriteFile(filepath.Join(dir, "quickstart.yaml"), []byte(own), 0o644); err != nil {
		t.Fatal(err)
	}
	run(t, lonely(t, root, dir, "build", "quickstart.yaml"))
	run(t, lonely(t, root, dir, "inspect", "quickstart.raw", "--verify"))
}

func withoutAgents(doc string) string {
	var kept []string
	for line := range strings.Lines(doc) {
		if !strings.HasPrefix(line, "agents:") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

func golden(t *testing.T, report string) string {
	t.Helper()
	raw, err := os.ReadFile(report)
	var r struct{ Golden string }
	if err := errors.Join(err, json.Unmarshal(raw, &r)); err != nil {
		t.Fatal(err)
	}
	return r.Golden
}

// commandLists matches the lists of subcommands in a command's help, with their headings.
var commandLists = regexp.MustCompile(`(?m)^[A-Z][\w ,]*:\n(?:  [a-z-]+ {2,}.*\n)+`)

// manuals renders each manual page with man, which must print no warning. The page must contain all
// words of the command's help.
func manuals(t *testing.T, root string) {
	man := desk.NeedProgram(t, "man", "man-db")
	pages, err := filepath.Glob(filepath.Join(root, "usr/share/man/man1/*.1.gz"))
	if err != nil || len(pages) < 30 {
		t.Fatalf("%d pages, %v", len(pages), err)
	}
	for _, page := range pages {
		cmd := exec.Command(man, "--warnings", "--local-file", page)
		cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "MANWIDTH=400", "MAN_KEEP_FORMATTING=", "MANOPT=--nh --nj")
		var out, said bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &said
		if err := cmd.Run(); err != nil || said.Len() > 0 {
			t.Errorf("%s: %v\n%s", filepath.Base(page), err, said.Bytes())
		}
		words := strings.Fields(out.String())
		command := strings.Split(strings.TrimSuffix(filepath.Base(page), ".1.gz"), "-")
		help := run(t, lonely(t, root, root, append(command[1:], "--help")...))
		if usage := "\n  " + strings.Join(command, " "); !strings.Contains(help, usage+" ") && !strings.Contains(help, usage+"\n") {
			t.Errorf("%s is about no command: %q says\n%s", filepath.Base(page), command, help)
		}
		help = commandLists.ReplaceAllString(help, "") // the section SEE ALSO contains these names
		help, _, _ = strings.Cut(help, "\nUse \"")
		headings := []string{"Usage:", "Examples:", "[command]", "Flags:", "Global"}
		for _, word := range strings.Fields(strings.ReplaceAll(help, "-h, --help", "")) {
			if !slices.Contains(words, word) && !slices.Contains(words, word+",") && !slices.Contains(headings, word) {
				t.Errorf("%s lacks %q of the command's help", filepath.Base(page), word)
			}
		}
	}
}

func completions(t *testing.T, root string) {
	bash := filepath.Join(root, "usr/share/bash-completion/completions/edgebake")
	run(t, exec.Command("bash", "-n", bash))
	for _, name := range []string{"usr/share/zsh/vendor-completions/_edgebake", "usr/share/fish/vendor_completions.d/edgebake.fish"} {
		if text, err := os.ReadFile(filepath.Join(root, name)); err != nil || !bytes.Contains(text, []byte(" __complete ")) {
			t.Errorf("%s: %v\n%.200s", name, err, text)
		}
	}
	if out := run(t, lonely(t, root, root, "__complete", "report", "x.raw", "--outp")); !strings.Contains(out, "--output") {
		t.Errorf("completing --outp: %s", out)
	}
}

// container runs edgebake in a root file system that contains only the container image.
func container(t *testing.T, archive, deb string) {
	index, err := readArchive(t, archive).ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(index); err != nil {
		t.Fatal(err)
	}
	img := imageFor(t, index, runtime.GOARCH)
	root := t.TempDir()
	unpack(t, img, root)
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if got := config.Config.Entrypoint; !slices.Equal(got, []string{"edgebake"}) {
		t.Errorf("entry point %q", got)
	}
	for _, name := range []string{"usr/bin/edgebake", "usr/lib/edgebake/firstboot-linux-" + runtime.GOARCH} {
		a, err := os.ReadFile(filepath.Join(root, name))
		b, err2 := os.ReadFile(filepath.Join(deb, name))
		if err := errors.Join(err, err2); err != nil || !bytes.Equal(a, b) {
			t.Errorf("%s is not the Debian package's (%v)", name, err)
		}
	}
	work := filepath.Join(root, "work")
	if err := os.Mkdir(work, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := buildtest.Write(work, buildtest.Base(), withoutAgents); err != nil {
		t.Fatal(err)
	}
	within(t, root, config.Config.Env, "/usr/bin/edgebake", "version")
	within(t, root, config.Config.Env, "/usr/bin/edgebake", "validate", "image.yaml")
	within(t, root, config.Config.Env, "/usr/bin/edgebake", "build", "image.yaml")
	within(t, root, config.Config.Env, "/usr/bin/edgebake", "inspect", "tiny.raw", "--verify")
}

// within runs a program in a root file system, in the directory /work.
func within(t *testing.T, root string, env []string, args ...string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(root, "proc"), 0o755); err != nil {
		t.Fatal(err)
	}
	unshare := desk.NeedProgram(t, "unshare", "util-linux")
	flags := []string{}
	if os.Geteuid() != 0 {
		flags = append(flags, "--map-root-user")
	}
	cmd := exec.Command(unshare, slices.Concat(flags, []string{"--mount", "--pid", "--fork", "--mount-proc", "--root=" + root, "--wd=/work", "--"}, args)...)
	cmd.Env = env
	return run(t, cmd)
}

// readArchive unpacks an OCI archive and returns its layout.
func readArchive(t *testing.T, archive string) layout.Path {
	t.Helper()
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	dir := t.TempDir()
	untar(t, f, dir)
	oci, err := layout.FromPath(dir)
	if err != nil {
		t.Fatal(err)
	}
	return oci
}

// imageFor returns the image for an architecture.
func imageFor(t *testing.T, index v1.ImageIndex, arch string) v1.Image {
	t.Helper()
	m, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range m.Manifests {
		if d.MediaType.IsIndex() {
			below, err := index.ImageIndex(d.Digest)
			if err != nil {
				t.Fatal(err)
			}
			return imageFor(t, below, arch)
		}
		if d.Platform.Architecture == arch {
			img, err := index.Image(d.Digest)
			if err != nil {
				t.Fatal(err)
			}
			return img
		}
	}
	t.Fatalf("no image for %s", arch)
	return nil
}

func unpack(t *testing.T, img v1.Image, dir string) {
	t.Helper()
	r := mutate.Extract(img)
	defer r.Close()
	untar(t, r, dir)
}

func untar(t *testing.T, r io.Reader, dir string) {
	t.Helper()
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Join(dir, h.Name)
		err = os.MkdirAll(filepath.Dir(name), 0o755)
		switch h.Typeflag {
		case tar.TypeDir:
			err = errors.Join(err, os.MkdirAll(name, 0o755), os.Chmod(name, fs.FileMode(h.Mode).Perm()))
		case tar.TypeReg:
			data, err2 := io.ReadAll(tr)
			err = errors.Join(err, err2, os.WriteFile(name, data, fs.FileMode(h.Mode).Perm()))
		case tar.TypeChar: // Debian contains device files if root made it
			err = errors.Join(err, syscall.Mknod(name, syscall.S_IFCHR|uint32(h.Mode), int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor)))))
		case tar.TypeSymlink:
			err = errors.Join(err, os.Symlink(h.Linkname, name))
		case tar.TypeLink:
			err = errors.Join(err, os.Link(filepath.Join(dir, h.Linkname), name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// programs maps each program that edgebake runs by name to its Debian package. "" means that every
// Debian system has the program.
var programs = map[string]string{
	"apt-cache": "mmdebstrap", "apt-get": "mmdebstrap", // mmdebstrap depends on apt
	"arch-test": "arch-test",
	"go":        "golang-go",
	"lsblk":     "", "wipefs": "", "/usr/sbin/wipefs": "", // util-linux
	"mmdebstrap": "mmdebstrap", "newuidmap": "uidmap",
	"qemu-img": "qemu-utils", "qemu-system-x86_64": "qemu-system-x86", "qemu-system-aarch64": "qemu-system-arm",
	"xorriso": "xorriso",
}

// computed lists the calls in which the program's name is not a literal, by file and expression,
// with the names that the expression may have.
var computed = map[string][]string{
	"builder/agents.go goCmd":          {"go"},
	"builder/archive.go name":          {"apt-get", "apt-cache"},
	"builder/fetch/gomodule.go g.path": {"go"},
	"builder/fetch/gomodule.go path":   {"go"},
	"builder/make.go tool":             {"mmdebstrap", "newuidmap"},
	"builder/qemu/host.go name":        {"qemu-system-x86_64", "qemu-system-aarch64"},
	"builder/qemu/host.go p.Path":      {"qemu-system-x86_64", "qemu-system-aarch64"},
	"builder/qemu/host.go path":        {"qemu-system-x86_64", "qemu-system-aarch64"},
	"builder/qemu/host.go tool":        {"qemu-img"},
	"builder/qemu/trial.go prog.Path":  {"qemu-system-x86_64", "qemu-system-aarch64"},
}

// TestProgramsAreDeclared checks that the package recommends or suggests exactly the packages of
// the programs that edgebake runs, and of the data that they need.
func TestProgramsAreDeclared(t *testing.T) {
	raw, err := os.ReadFile("nfpm.yaml")
	var config struct{ Recommends, Suggests []string }
	if err := errors.Join(err, yaml.Unmarshal(raw, &config)); err != nil {
		t.Fatal(err)
	}
	declared := append(config.Recommends, config.Suggests...)
	called := map[string]bool{}
	for place, program := range calls(t) {
		names := computed[place]
		if program != "" {
			names = []string{program}
		}
		if names == nil {
			t.Errorf("%s: which program is that? add it to computed", place)
		}
		for _, name := range names {
			called[name] = true
			if pkg, ok := programs[name]; !ok {
				t.Errorf("%s calls %s: add it to programs, and its package to nfpm.yaml", place, name)
			} else if pkg != "" && !slices.Contains(declared, pkg) {
				t.Errorf("%s calls %s: nfpm.yaml lacks %s", place, name, pkg)
			}
		}
	}
	if got, want := slices.Sorted(maps.Keys(called)), slices.Sorted(maps.Keys(programs)); !slices.Equal(got, want) {
		t.Errorf("programs that are called: %q, listed: %q", got, want)
	}
	// edgebake runs no program of the last five packages, which contain an emulator for other
	// architectures, certificates, keyrings and firmware.
	needed := append(slices.Collect(maps.Values(programs)), "qemu-user-static", "ca-certificates", "debian-archive-keyring", "ovmf", "qemu-efi-aarch64")
	for _, pkg := range declared {
		if !slices.Contains(needed, pkg) {
			t.Errorf("nfpm.yaml has %s, which nothing needs", pkg)
		}
	}
}

// calls returns each call of a program in edgebake's source, by file and expression. The value is
// the program's name if the expression is a literal.
func calls(t *testing.T) map[string]string {
	t.Helper()
	list := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}} {{.Dir}}{{end}}", "./cmd/edgebake")
	list.Dir = ".."
	found := map[string]string{}
	for line := range strings.Lines(run(t, list)) {
		path, dir, _ := strings.Cut(strings.TrimSpace(line), " ")
		rel, ours := strings.CutPrefix(path, "github.com/edgebake/edgebake/")
		if !ours || rel == "builder/procgroup" { // procgroup starts the programs that its callers name
			continue
		}
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			set := token.NewFileSet()
			f, err := parser.ParseFile(set, file, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(f, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				s, ok := call.Fun.(*ast.SelectorExpr)
				if !ok || !isExec(s) {
					return true
				}
				arg := call.Args[0]
				if s.Sel.Name == "CommandContext" || s.X.(*ast.Ident).Name == "procgroup" {
					arg = call.Args[1]
				}
				place := rel + "/" + filepath.Base(file) + " "
				if literal, ok := arg.(*ast.BasicLit); ok {
					name, err := strconv.Unquote(literal.Value)
					if err != nil {
						t.Fatal(err)
					}
					found[place+name] = name
					return true
				}
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				found[place+string(text[set.Position(arg.Pos()).Offset:set.Position(arg.End()).Offset])] = ""
				return true
			})
		}
	}
	if len(found) < 8 {
		t.Fatalf("only these calls were found: %q", found)
	}
	return found
}

func isExec(s *ast.SelectorExpr) bool {
	x, ok := s.X.(*ast.Ident)
	return ok && (x.Name == "exec" && slices.Contains([]string{"Command", "CommandContext", "LookPath"}, s.Sel.Name) ||
		x.Name == "procgroup" && s.Sel.Name == "Command")
}

// TestDebianVersion checks with dpkg that versions sort correctly.
func TestDebianVersion(t *testing.T) {
	dpkg := desk.NeedProgram(t, "dpkg", "dpkg")
	date := time.Unix(1767225600, 0).UTC()
	var last string
	for _, v := range []string{"(devel)", "0.0.0-20260101000000-abcdefabcdef", "0.0.0-20260102000000-0bcdefabcdef+dirty", "0.1.0-rc.1", "0.1.0", "0.1.1-0.20260101000000-abcdefabcdef", "0.1.1", "0.10.0"} {
		got := debianVersion(v, date)
		if last != "" {
			run(t, exec.Command(dpkg, "--compare-versions", last, "lt", got))
		}
		last = got
	}
}

// TestCheckRelease checks that a release is rejected if the source has another version. Other
// builds are not checked.
func TestCheckRelease(t *testing.T) {
	said := filepath.Join(t.TempDir(), "firstboot")
	desk.WriteProgram(t, said, "#!/bin/sh\necho firstboot 0.2.0\n")
	for v, ok := range map[string]bool{"0.2.0": true, "0.1.0": false} {
		if err := (&packages{version: v}).checkRelease(t.Context(), said); (err == nil) != ok {
			t.Errorf("%s: %v", v, err)
		}
	}
	for _, v := range []string{"(devel)", "0.2.0-dev", "0.0.0-20260101000000-abcdefabcdef+dirty"} {
		if err := (&packages{version: v}).checkRelease(t.Context(), "/does/not/exist"); err != nil {
			t.Errorf("%s: %v", v, err)
		}
	}
}

// TestEarlierPackagesGo checks which earlier packages are removed. The patterns in README and
// install.md must match one file each, even after several runs.
func TestEarlierPackagesGo(t *testing.T) {
	for _, replace := range []bool{true, false} {
		p := packages{out: t.TempDir(), log: t.Output(), replace: replace}
		earlier := []string{"edgebake_0.1.0~a_amd64.deb", "edgebake_0.1.0~a_arm64.deb", "edgebake_0.1.0-a.oci.tar", "edgebake-debian_0.1.0-a_amd64.oci.tar", "notes.txt"}
		now := []string{"edgebake_0.1.0~b_amd64.deb", "edgebake_0.1.0-b.oci.tar", "edgebake-debian_0.1.0-b_amd64.oci.tar"}
		want := slices.Concat(earlier, now)
		if replace { // packages of other kinds stay
			want = slices.Concat([]string{"edgebake_0.1.0~a_arm64.deb", "notes.txt"}, now)
		}
		for _, name := range slices.Concat(earlier, now) {
			if err := os.WriteFile(filepath.Join(p.out, name), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range now {
			if err := p.made(filepath.Join(p.out, name)); err != nil {
				t.Fatal(err)
			}
		}
		var got []string
		left, err := os.ReadDir(p.out)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range left {
			got = append(got, f.Name())
		}
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("replace %v: left %q, want %q", replace, got, want)
		}
	}
}
