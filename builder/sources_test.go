package builder

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/ondisk/file"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/imagetest"
)

// start resolves an Image.
func start(t *testing.T, img *configs.Image, o Options) *executor {
	t.Helper()
	b, err := Job{Image: img, Options: o}.start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// merged resolves, makes and merges the inputs, as a build does before it writes.
func (p *project) merged(t *testing.T) (*executor, map[string]tree.Node) {
	t.Helper()
	b := start(t, p.image(t), p.options(""))
	if err := b.makeInputs(t.Context()); err != nil {
		t.Fatal(err)
	}
	id, err := b.plan.With(b.inputs).ID()
	if err != nil {
		t.Fatal(err)
	}
	c, err := b.compose(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]tree.Node{}
	for _, n := range c.merged {
		by[n.Path] = n
	}
	return b, by
}

// TestOCIBase uses a container image with two layers as the base.
func TestOCIBase(t *testing.T) {
	p := newProject(t, buildtest.Base(), func(s string) string {
		return strings.Replace(s, "  tar:\n    file: base.tar\n", "  oci:\n    layout: base\n", 1)
	})
	put := func(entries []buildtest.Entry) imagetest.Layer {
		return imagetest.Layer{Tar: func(w *imagetest.Writer) error {
			for _, e := range entries {
				if err := w.Put(e.Header, e.Body); err != nil {
					return err
				}
			}
			return nil
		}}
	}
	reg := func(name, body string) buildtest.Entry {
		return buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, Body: body}
	}
	write := func(both string) {
		t.Helper()
		dir := filepath.Join(p.dir, "base")
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		_, err := imagetest.WriteLayout(dir, imagetest.Image{Ref: "example.test/base:1", Layers: []imagetest.Layer{
			put(append(buildtest.Base(), reg("etc/old", "1"), reg("etc/both", "1"))),
			put([]buildtest.Entry{reg("etc/.wh.old", ""), reg("etc/both", both), reg("lib/new", "2")}),
		}})
		if err != nil {
			t.Fatal(err)
		}
	}
	write("2")
	b, by := p.merged(t)
	if _, ok := by["etc/old"]; ok {
		t.Error("a file that the second layer removed is there")
	}
	if _, ok := by["usr/lib/new"]; !ok {
		t.Error("a file below a link of the first layer is not where the link points")
	}
	if got, err := tree.ReadContent(by["etc/both"].Data, b.Cache, 100); err != nil || string(got) != "2" {
		t.Errorf("etc/both is %q, %v", got, err)
	}
	if by["usr/bin/ping"].Xattrs["security.capability"] == "" || by["usr/bin/ping"].Inode != by["usr/bin/ping4"].Inode {
		t.Error("capability or hard link got lost")
	}
	first := b.input(inputBase)
	if first.SHA256 == "" || first.Make != "oci" {
		t.Errorf("input base: %+v", first)
	}
	// Resolving again returns the digest without making the base.
	pl, err := Resolve(t.Context(), p.image(t), p.options(""))
	if err != nil {
		t.Fatal(err)
	}
	if pl.Inputs[inputBase].SHA256 != first.SHA256 {
		t.Error("Resolve does not find the base in the cache")
	}
	// The name now points to another image: only a locked build keeps the old one.
	write("3")
	o := p.options("")
	o.Lock = pl.Lock()
	if pl, err = Resolve(t.Context(), p.image(t), o); err != nil || pl.Inputs[inputBase].SHA256 == first.SHA256 {
		t.Errorf("the locked base is used instead of the current one: %v", err)
	}
	o.Locked = true
	if pl, err = Resolve(t.Context(), p.image(t), o); err != nil || pl.Inputs[inputBase].SHA256 != first.SHA256 {
		t.Errorf("--locked: %v", err)
	}
	// The Image's date is the time of directories that no layer contains, so it changes the base.
	write("2")
	later := p.image(t)
	later.SourceDate = "2027-01-01T00:00:00Z"
	if pl, err = Resolve(t.Context(), later, p.options("")); err != nil || pl.Inputs[inputBase].SHA256 == first.SHA256 {
		t.Errorf("a base of another date is used: %v", err)
	}
}

// server is a release server in memory.
type server struct {
	*httptest.Server
	mu    sync.Mutex
	files map[string]string
	asked []string
}

func newServer(t *testing.T) *server {
	s := &server{files: map[string]string{}}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.asked = append(s.asked, r.URL.Path)
		body, ok := s.files[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		w.Write([]byte(body))
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *server) requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	got := s.asked
	s.asked = nil
	return got
}

func TestReleaseServer(t *testing.T) {
	s := newServer(t)
	program := buildtest.ELF(elf.EM_X86_64)
	sha := func(body string) string {
		f := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(f, []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
		d, err := file.SHA256(f)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	for _, name := range []string{"kubelet", "kubeadm"} {
		s.files["/k8s/v1.36.3/bin/linux/amd64/"+name] = program + name
		s.files["/k8s/v1.36.3/bin/linux/amd64/"+name+".sha256"] = sha(program + name)
	}
	raw, err := buildtest.Tar([]buildtest.Entry{
		{Header: tar.Header{Typeflag: tar.TypeDir, Name: "bin/", Mode: 0o755, Uid: 1001}},
		{Header: tar.Header{Typeflag: tar.TypeReg, Name: "bin/containerd", Mode: 0o700, Uid: 1001}, Body: program},
		{Header: tar.Header{Typeflag: tar.TypeReg, Name: "bin/containerd-shim-runc-v2", Mode: 0o755}, Body: program},
		{Header: tar.Header{Typeflag: tar.TypeReg, Name: "bin/ctr", Mode: 0o755}, Body: program},
		{Header: tar.Header{Typeflag: tar.TypeReg, Name: "bin/containerd-stress", Mode: 0o755}, Body: program},
	})
	if err != nil {
		t.Fatal(err)
	}
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	w.Write(raw)
	w.Close()
	archive := "containerd-2.2.9-linux-amd64.tar.gz"
	s.files["/ctd/v2.2.9/"+archive] = z.String()
	s.files["/ctd/v2.2.9/"+archive+".sha256sum"] = sha(z.String()) + "  " + archive + "\n"

	fromServer := func(doc string) string {
		doc = strings.Replace(doc, "file: {dir: programs}", fmt.Sprintf("url: {base: %s/k8s, sha256: {kubelet: %s, kubeadm: %s}}",
			s.URL, sha(program+"kubelet"), sha(program+"kubeadm")), 1)
		return strings.Replace(doc, "file: {dir: programs}", fmt.Sprintf("url: {base: %s/ctd/, sha256: {%s: %s}}", s.URL, archive, sha(z.String())), 1)
	}
	p := newProject(t, buildtest.Base(), fromServer)
	b, by := p.merged(t)
	if n := by["usr/bin/containerd"]; n.Inode == nil || n.Mode != tree.ModeRegular|0o755 || n.UID != 0 {
		t.Errorf("usr/bin/containerd: %+v", n.Inode)
	}
	if _, ok := by["usr/bin/containerd-stress"]; ok {
		t.Error("the image contains a program that was not requested")
	}
	if got, err := tree.ReadContent(by["usr/bin/kubelet"].Data, b.Cache, 1000); err != nil || string(got) != program+"kubelet" {
		t.Errorf("kubelet: %v", err)
	}

	// With the lock and the cache, no server is needed.
	s.requests()
	o := p.options("")
	o.Lock, o.Locked = b.plan.With(b.inputs).Lock(), true
	again := start(t, p.image(t), o)
	if err := again.makeInputs(t.Context()); err != nil {
		t.Fatal(err)
	}
	if asked := s.requests(); len(asked) != 0 {
		t.Errorf("a locked build asked for %q", asked)
	}

	// The file on the server has changed.
	s.mu.Lock()
	s.files["/k8s/v1.36.3/bin/linux/amd64/kubelet"] = "changed"
	s.mu.Unlock()
	if o.Cache, err = fetch.Open(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	defer o.Cache.Close()
	again = start(t, p.image(t), o)
	if err := again.makeInputs(t.Context()); err == nil || !strings.Contains(err.Error(), "input kubelet: ") || !strings.Contains(err.Error(), "the file on the server is not the expected one") {
		t.Errorf("a changed file: %v", err)
	}

}

// TestPublishedDigest gets digests from the server first, and later from the lock.
func TestPublishedDigest(t *testing.T) {
	s := newServer(t)
	sum := strings.Repeat("ab", 32)
	s.files["/plain.sha256"] = sum + "\n"
	s.files["/named.sha256sum"] = sum + "  named\n"
	s.files["/junk.sha256"] = "<html>not found</html>"
	p := newProject(t, buildtest.Base(), nil)
	b, err := newResolver(t.Context(), p.image(t), p.options(""))
	if err != nil {
		t.Fatal(err)
	}
	src := configs.URLSource{Base: s.URL, SHA256FromServer: true}
	for _, name := range []string{"plain", "named"} {
		if err := b.resolveRelease(t.Context(), "kubernetes.source", name, s.URL+"/"+name, src, &plan.Layer{}); err != nil || b.plan.Inputs[name].SHA256 != sum {
			t.Errorf("%s: %+v, %v", name, b.plan.Inputs[name], err)
		}
	}
	for name, want := range map[string]string{"junk": "contains no SHA-256", "none": "404"} {
		err := b.resolveRelease(t.Context(), "kubernetes.source", name, s.URL+"/"+name, src, &plan.Layer{})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), name+": <hex>") {
			t.Errorf("%s: %v", name, err)
		}
	}
	// If the server fails for one sidecar, the next is not tried.
	if err := b.resolveRelease(t.Context(), "kubernetes.source", "plain", "ftp://host/plain", src, &plan.Layer{}); err == nil || strings.Count(err.Error(), "fetching") != 1 || strings.Contains(err.Error(), "no digest is known") {
		t.Errorf("no answer: %v", err)
	}
	src.SHA256FromServer = false
	if err := b.resolveRelease(t.Context(), "kubernetes.source", "plain", s.URL+"/plain", src, &plan.Layer{}); err == nil || !strings.Contains(err.Error(), "sha256FromServer") {
		t.Errorf("an unrequested digest: %v", err)
	}
	src.SHA256FromServer = true
	b.Lock = b.plan.Lock()
	s.requests()
	if err := b.resolveRelease(t.Context(), "kubernetes.source", "plain", s.URL+"/plain", src, &plan.Layer{}); err != nil || len(s.requests()) != 0 {
		t.Errorf("the lock's digest is not used: %v", err)
	}
	b.Lock, b.Locked = &plan.Lock{Version: plan.LockVersion}, true
	if err := b.resolveRelease(t.Context(), "kubernetes.source", "plain", s.URL+"/plain", src, &plan.Layer{}); err == nil || !strings.Contains(err.Error(), "is not in the lock") {
		t.Errorf("an empty lock: %v", err)
	}
}

func TestArchiveLacksProgram(t *testing.T) {
	s := newServer(t)
	raw, err := buildtest.Tar([]buildtest.Entry{{Header: tar.Header{Typeflag: tar.TypeReg, Name: "bin/containerd", Mode: 0o755}, Body: buildtest.ELF(elf.EM_X86_64)}})
	if err != nil {
		t.Fatal(err)
	}
	archive := "containerd-2.2.9-linux-amd64.tar.gz"
	s.files["/v2.2.9/"+archive] = string(raw)
	p := newProject(t, buildtest.Base(), func(doc string) string {
		at := strings.LastIndex(doc, "file: {dir: programs}")
		f := filepath.Join(t.TempDir(), "x")
		if err := os.WriteFile(f, raw, 0o644); err != nil {
			t.Fatal(err)
		}
		d, err := file.SHA256(f)
		if err != nil {
			t.Fatal(err)
		}
		return doc[:at] + fmt.Sprintf("url: {base: %s, sha256: {%s: %s}}", s.URL, archive, d) + doc[at+len("file: {dir: programs}"):]
	})
	_, err = p.build(t, filepath.Join(t.TempDir(), "x.raw"))
	for _, want := range []string{"the archive has no file bin/ctr", "the archive has no file bin/containerd-shim-runc-v2"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
}

// TestAgentsAreCompiledAlike checks that make and compileAgent compile with the same settings.
// Otherwise, the image would depend on the directory in which edgebake runs.
func TestAgentsAreCompiledAlike(t *testing.T) {
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	want := "AGENT := " + strings.Join(agentEnv, " ") + " go build -trimpath -buildvcs=false -ldflags='-s -w'\n"
	if !strings.Contains(string(makefile), want) {
		t.Errorf("the Makefile lacks %q", want)
	}
}

func TestAgentsRejectExperiments(t *testing.T) {
	file := filepath.Join(t.TempDir(), "env")
	if err := os.WriteFile(file, []byte("GOEXPERIMENT=jsonv2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOENV", file)
	out := filepath.Join(t.TempDir(), "installer")
	err := CompileProgram(t.Context(), "..", "installer", "amd64", out)
	if err == nil || !strings.Contains(err.Error(), "compiling installer in ..: GOEXPERIMENT=jsonv2 is set") {
		t.Errorf("error: %v", err)
	}
	if _, err := os.Stat(out); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the program was compiled in spite of GOEXPERIMENT: %v", err)
	}
}

// TestOldGo checks that edgebake and make report a go that is too old and cannot fetch another
// release, before they compile.
func TestOldGo(t *testing.T) {
	bin := t.TempDir()
	goes := func(version string) {
		script := "#!/bin/sh\n[ \"$1\" = version ] && { echo 'go version " + version + " linux/amd64'; exit; }\necho 'go.mod:3: invalid go version' >&2\nexit 1\n"
		desk.WriteProgram(t, filepath.Join(bin, "go"), script)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	p := newProject(t, buildtest.Base(), func(s string) string {
		i := strings.Index(s, "kubernetes:")
		return s[:i] + strings.Replace(s[i:], "file: {dir: programs}", "goModule: {}", 1)
	})
	for version, old := range map[string]bool{"go1.19.8": true, "go1.20": true, "go1.21.0": false, "go1.26.1": false, "devel go1.27-0123abc": false} {
		goes(version)
		told := func(what, said string) {
			t.Helper()
			if strings.Contains(said, "is too old: at least") != old || old && strings.Contains(said, "invalid go version") || !strings.Contains(said, "go") {
				t.Errorf("%s with %s: %s", what, version, said)
			}
		}
		err := CompileProgram(t.Context(), "..", "installer", "amd64", filepath.Join(t.TempDir(), "installer"))
		told("CompileProgram", fmt.Sprint(err))
		_, err = Build(t.Context(), p.image(t), p.options(filepath.Join(t.TempDir(), "x.raw")))
		told("Build", fmt.Sprint(err))
		if old && !strings.Contains(fmt.Sprint(err), "kubernetes.source: compiling kubeadm needs Go, and go 1.") {
			t.Errorf("Build with %s: %v", version, err)
		}
		said, err := exec.Command("make", "-C", "..", "build").CombinedOutput()
		if err == nil {
			t.Error("make compiled with a go that cannot")
		}
		told("make", string(said))
	}
}

func TestAgentsLeaveNothing(t *testing.T) {
	bin, tmp, outs := t.TempDir(), t.TempDir(), t.TempDir()
	script := "#!/bin/sh\n[ \"$1\" = version ] && exit\nmkdir -p \"${GOTMPDIR:-$TMPDIR}/go-build$1\"\n[ \"$1\" != build ]\n"
	desk.WriteProgram(t, filepath.Join(bin, "go"), script)
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Setenv("TMPDIR", tmp)
	t.Setenv("GOTMPDIR", "")
	if err := CompileProgram(t.Context(), "..", "installer", "amd64", filepath.Join(outs, "installer")); err == nil {
		t.Error("no error from a go that compiles nothing")
	}
	for _, dir := range []string{tmp, outs} {
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
}

func TestAgents(t *testing.T) {
	p := newProject(t, buildtest.Base(), func(s string) string {
		return strings.Replace(s, "agents: {firstboot: programs/firstboot, ipvscare: programs/ipvscare}\n", "", 1)
	})
	// The current directory is outside the source tree, and no program is next to edgebake.
	t.Chdir(t.TempDir())
	_, err := Resolve(t.Context(), p.image(t), p.options(""))
	for _, want := range []string{"there is no firstboot-linux-amd64 next to edgebake", "there is no ipvscare-linux-amd64", "set its path in agents"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
	// A released edgebake compiles its programs from the module proxy.
	o := p.options("")
	o.Version = "0.1.0"
	pl, err := Resolve(t.Context(), p.image(t), o)
	if err != nil {
		t.Fatal(err)
	}
	in := pl.Inputs["firstboot"]
	if in.Make != "go" || !strings.Contains(string(in.Recipe), `"github.com/edgebake/edgebake/cmd/firstboot"`) || !strings.Contains(string(in.Recipe), `"v0.1.0"`) {
		t.Errorf("firstboot: %+v", in)
	}
	for _, v := range []string{"(devel)", "0.1.0+dirty", "0.0.0-20260101000000-abcdefabcdef", "0.1", "test"} {
		if _, ok := agentRecipe(Options{Version: v}, "firstboot", "amd64"); ok {
			t.Errorf("version %s is taken for a published one", v)
		}
	}
	// An edgebake from `go install` uses its own version, even that of a commit.
	const commit = "v0.0.0-20260101000000-abcdefabcdef"
	if r, ok := agentRecipe(Options{Version: commit[1:], Published: commit}, "firstboot", "amd64"); !ok || r.Version != commit {
		t.Errorf("%+v, %v", r, ok)
	}
}

// TestLockedImagesOffline removes the container images' directory: a locked build finds all of them
// in the cache.
func TestLockedImagesOffline(t *testing.T) {
	p := newProject(t, buildtest.Base(), nil)
	dir := t.TempDir()
	first, err := p.build(t, filepath.Join(dir, "1.raw"))
	if err != nil {
		t.Fatal(err)
	}
	o := p.options(filepath.Join(dir, "2.raw"))
	o.Lock, o.Locked = first.Plan.Lock(), true
	if _, err := Build(t.Context(), p.image(t), o); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(p.dir, "images")); err != nil {
		t.Fatal(err)
	}
	o.Output = filepath.Join(dir, "3.raw")
	third, err := Build(t.Context(), p.image(t), o)
	if err != nil {
		t.Fatal(err)
	}
	if third.Report.Golden != first.Report.Golden {
		t.Error("not the same image")
	}
}

// TestAgentFollowsItsSource checks that the last compiled program speeds up the next build, but is
// not used if the source has changed.
func TestAgentFollowsItsSource(t *testing.T) {
	src := t.TempDir()
	main := filepath.Join(src, "cmd/firstboot/main.go")
	if err := errors.Join(os.MkdirAll(filepath.Dir(main), 0o755), os.WriteFile(filepath.Join(src, "go.mod"), []byte("module "+modulePath+"\n\ngo 1.26\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	t.Chdir(src)
	cache, err := fetch.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cache.Close() })
	var first string
	for i, says := range []string{"one", "one", "two", "one"} {
		if err := os.WriteFile(main, []byte("package main\n\nfunc main() { println(\""+says+"\") }\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		made, err := Program(t.Context(), "firstboot", runtime.GOARCH, Options{Cache: cache})
		if err != nil {
			t.Fatal(err)
		}
		program := filepath.Join(t.TempDir(), "firstboot")
		desk.WriteProgram(t, program, string(made))
		if out, err := exec.Command(program).CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != says {
			t.Errorf("the program of build %d printed %q, %v; want %q", i, out, err, says)
		}
		if first == "" {
			first = string(made)
		}
		if same := string(made) == first; same != (says == "one") {
			t.Errorf("build %d, %s: the bytes of the first: %v", i, says, same)
		}
	}
}

// TestExportCompressedBase checks that a base that was downloaded compressed is exported
// uncompressed, and that another build gives the same image with the base in either form.
func TestExportCompressedBase(t *testing.T) {
	s := newServer(t)
	p := newProject(t, buildtest.Base(), nil)
	raw, err := os.ReadFile(filepath.Join(p.dir, "base.tar"))
	if err != nil {
		t.Fatal(err)
	}
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	w.Write(raw)
	w.Close()
	s.files["/base.tar.gz"] = z.String()
	sum := fmt.Sprintf("%x", sha256.Sum256(z.Bytes()))
	doc := filepath.Join(p.dir, "image.yaml")
	text, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	text = bytes.Replace(text, []byte("file: base.tar"), []byte("url: "+s.URL+"/base.tar.gz\n    sha256: "+sum), 1)
	if err := os.WriteFile(doc, text, 0o644); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := func(name string, content []byte) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	o := p.options(filepath.Join(dir, "first.raw.zst"))
	first, err := Build(t.Context(), p.image(t), o)
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := first.Plan.Lock().Encode()
	if err != nil {
		t.Fatal(err)
	}
	lock, err := plan.DecodeLock(encoded)
	if err != nil {
		t.Fatal(err)
	}
	exported := filepath.Join(dir, "exported.tar")
	o.Lock = lock
	if err := ExportBase(t.Context(), first.Plan, o, exported); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(exported); err != nil || !bytes.Equal(got, raw) {
		t.Fatalf("the exported base is not the tar (%v)", err)
	}
	s.files = nil // the server is gone
	other := buildtest.Base()
	otherTar, err := buildtest.Tar(other[:len(other)-1])
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, base string
		lock       *plan.Lock
		locked     bool
		want       string // part of the error
		not        string // must not be in the error
	}{
		{name: "exported, locked", base: exported, lock: lock, locked: true},
		{name: "exported", base: exported, lock: lock},
		{name: "the archive itself, locked", base: file("base.tar.gz", z.Bytes()), lock: lock, locked: true},
		{name: "the archive itself, no lock", base: file("base.tar.gz", z.Bytes())},
		{name: "another, locked", base: file("other.tar", otherTar), lock: lock, locked: true, want: "base.tar.sha256 is " + sum},
		{name: "another, no lock", base: file("other.tar", otherTar), want: "base.tar.sha256 is " + sum, not: "--locked"},
		{name: "exported, without its lock", base: exported, want: "or the exported base with its lock", not: "--locked"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := p.options(filepath.Join(t.TempDir(), "x.raw.zst"))
			if o.Cache, err = fetch.Open(t.TempDir()); err != nil {
				t.Fatal(err)
			}
			defer o.Cache.Close()
			o.Base, o.Lock, o.Locked = tt.base, tt.lock, tt.locked
			r, err := Build(t.Context(), p.image(t), o)
			if tt.want != "" {
				if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "--base "+tt.base+": ") || tt.not != "" && strings.Contains(err.Error(), tt.not) {
					t.Errorf("the build: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if r.Report.Plan != first.Report.Plan || r.Report.Golden != first.Report.Golden {
				t.Errorf("another image: plan %s, want %s", r.Report.Plan, first.Report.Plan)
			}
			if got := r.Plan.Lock().Inputs[inputBase]; got.SHA256 != sum || got.Uncompressed != lock.Inputs[inputBase].Uncompressed || got.Uncompressed == "" {
				t.Errorf("the next lock has %+v", got)
			}
			again := filepath.Join(t.TempDir(), "again.tar")
			if err := ExportBase(t.Context(), r.Plan, o, again); err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(again); err != nil || !bytes.Equal(got, raw) {
				t.Errorf("exported again it is another base (%v)", err)
			}
		})
	}
}
