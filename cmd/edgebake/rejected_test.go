package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/configs/ondisk/slot"
	"github.com/edgebake/edgebake/test/buildtest"
)

// names lists a directory.
func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// TestBadInputsOfABuild wants each problem named with its place and its fix,
// all of them at once, and nothing written.
func TestBadInputsOfABuild(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "something else") }))
	t.Cleanup(server.Close)
	without := func(parts ...string) []buildtest.Entry {
		return slices.DeleteFunc(buildtest.Base(), func(e buildtest.Entry) bool {
			return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(e.Name, p) })
		})
	}
	for _, tt := range []struct {
		name string
		base []buildtest.Entry
		edit func(string) string
		prep func(t *testing.T, c *cli)
		args []string
		want []string
	}{
		{name: "files that are not there", prep: func(t *testing.T, c *cli) {
			for _, f := range []string{"base.tar", "programs/kubelet", "programs/kubeadm", "programs/ipvscare", "notes.txt"} {
				if err := os.Remove(f); err != nil {
					t.Fatal(err)
				}
			}
		}, want: []string{"image.yaml:6:5: base.tar: open base.tar: no such file", "image.yaml:10:5: kubernetes.source: open programs/kubelet",
			"image.yaml:10:5: kubernetes.source: open programs/kubeadm", "agents.ipvscare: open programs/ipvscare", "files[1].source: open notes.txt"}},
		{name: "an overlay around the Image", edit: func(s string) string {
			return strings.Replace(s, "dir: overlay", "dir: .", 1)
		}, want: []string{"overlays[0].dir: packing overlay .: the Image lies in it", "a directory of its own"}},
		{name: "named pipes", edit: func(s string) string {
			return strings.Replace(s, "layout: images", "archive: pipe", 1)
		}, prep: func(t *testing.T, c *cli) {
			for _, f := range []string{"notes.txt", "pipe"} {
				os.Remove(f)
				if err := syscall.Mkfifo(f, 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}, want: []string{"files[1].source: notes.txt is not a file", "images[0]: ", "archive pipe is not a file"}},
		{name: "a wrong digest", edit: func(s string) string {
			return strings.Replace(s, "file: base.tar", "file: base.tar\n    sha256: "+strings.Repeat("ab", 32), 1)
		}, want: []string{"image.yaml:6:5: base.tar: ", "expected " + strings.Repeat("ab", 32), "correct its sha256"}},
		{name: "a base without kernel and systemd", base: without("vmlinuz", "systemd/systemd"),
			want: []string{"the base has no kernel", "linux-image", "the base has no systemd", "systemd-sysv"}},
		{name: "an archive that leads out", base: append(buildtest.Base(),
			buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "../up"}}, buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "/abs"}}),
			want: []string{`"../up": path leads out of the tree`, `"/abs": absolute path`, "tar -C DIR"}},
		{name: "an OCI base that is not there", edit: func(s string) string { return strings.Replace(s, "tar:\n    file: base.tar", "oci: {layout: gone}", 1) },
			want: []string{"image.yaml:5:8: base.oci: the image: OCI layout gone not found: make it"}},
		{name: "an OCI base with a broken layer", edit: func(s string) string {
			return strings.Replace(s, "tar:\n    file: base.tar", "oci: {layout: images}", 1)
		},
			prep: func(t *testing.T, c *cli) {
				blobs, err := filepath.Glob("images/blobs/sha256/*")
				if err != nil {
					t.Fatal(err)
				}
				for _, b := range blobs {
					if raw, err := os.ReadFile(b); err != nil || raw[0] == '{' {
						continue
					}
					if err := os.Truncate(b, 20); err != nil {
						t.Fatal(err)
					}
				}
			}, want: []string{"image.yaml:5:8: base.oci: the image from OCI layout images: fetching layer 1 of 1 sha256:", "it ends after 20 of "}},
		{name: "a compressed archive that is cut short", prep: func(t *testing.T, c *cli) {
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			if _, err := z.Write(bytes.Repeat([]byte("much of the same "), 1000)); err != nil {
				t.Fatal(err)
			}
			if err := z.Close(); err != nil {
				t.Fatal(err)
			}
			c.file("base.tar", b.String()[:b.Len()-10])
		}, want: []string{"image.yaml:6:5: base.tar: uncompressing (gzip): unexpected EOF: it is cut short; fetch it again"}},
		{name: "no archive", prep: func(t *testing.T, c *cli) { c.file("base.tar", "hello") },
			want: []string{"image.yaml:6:5: base.tar: not a tar archive (5 bytes): make one"}},
		{name: "what two layers have", prep: func(t *testing.T, c *cli) {
			for _, f := range []string{"overlay/usr/bin/su", "overlay/etc/machine-id"} {
				if err := os.MkdirAll(filepath.Dir(f), 0o755); err != nil {
					t.Fatal(err)
				}
				c.file(f, "mine")
			}
		}, edit: func(s string) string { return strings.Replace(s, "path: /etc/motd", "path: /usr/bin", 1) },
			want: []string{"image.yaml:22:10: overlays[0].dir: usr/bin/su: layer base already has it: set `replace: true`",
				"image.yaml:24:11: files[0].path: usr/bin: is a directory in layer base and a file here; remove one of them"}},
		{name: "a link that leads round", base: append(buildtest.Base(), buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "./a", Linkname: "b"}},
			buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "./b", Linkname: "a"}}),
			edit: func(s string) string { return strings.Replace(s, "path: /etc/motd", "path: /a/motd", 1) },
			want: []string{"image.yaml:24:11: files[0].path: a/motd: symbolic links loop at ", "(of layer base); correct where they point"}},
		{name: "templates that cannot be", edit: func(s string) string {
			return strings.Replace(s, "{{.Name}} on", "{{.Nme}} on", 1) + "  - path: /etc/half\n    contents: \"{{.Name\"\n    template: true\n"
		}, want: []string{"files[0].contents: the template asks for .Nme, which is not a field of Image", "e.g. {{.Name}}", "files[2].contents: reading the template: "}},
		{name: "a download of something else", edit: func(s string) string {
			return strings.Replace(s, "file: base.tar", "url: "+server.URL+"/base.tar\n    sha256: "+strings.Repeat("ab", 32), 1)
		}, want: []string{"image.yaml:6:5: base.tar: input base: fetching " + server.URL, "expected abab", "correct the URL, or its sha256"}},
		{name: "an exported base that is not there", edit: func(s string) string { return strings.Replace(s, "  tar:\n    file: base.tar\n", "  debian: {}\n", 1) },
			args: []string{"--base", "gone.tar"}, want: []string{"edgebake: --base gone.tar: open gone.tar: no such file"}},
		{name: "an exported base that is none", prep: func(t *testing.T, c *cli) { c.file("kept.tar", "hello") },
			edit: func(s string) string { return strings.Replace(s, "  tar:\n    file: base.tar\n", "  debian: {}\n", 1) },
			args: []string{"--base", "kept.tar"}, want: []string{"edgebake: --base kept.tar: not a tar archive"}},
		{name: "outputs that are there", prep: func(t *testing.T, c *cli) { c.file("kept.tar", "mine") },
			args: []string{"--export-base", "kept.tar"}, want: []string{"--export-base: kept.tar exists; --force replaces it"}},
		{name: "no place for the lock", args: []string{"--lock", "no/where.lock", "--export-base", "no/base.tar"},
			want: []string{"lock no/where.lock: ", "make directory no first", "--lock names another place", "--export-base: "}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCLI(t)
			if tt.base == nil {
				tt.base = buildtest.Base()
			}
			if err := buildtest.Write(c.dir, tt.base, tt.edit); err != nil {
				t.Fatal(err)
			}
			if tt.prep != nil {
				tt.prep(t, c)
			}
			before := names(t, c.dir)
			c.run(1, append([]string{"build", "image.yaml"}, tt.args...)...)
			c.want(c.err, tt.want...)
			if after := names(t, c.dir); !slices.Equal(before, after) {
				t.Errorf("there is %q now, there was %q", after, before)
			}
			if b, err := os.ReadFile("kept.tar"); err == nil && string(b) != "mine" && string(b) != "hello" {
				t.Error("a file was replaced")
			}
		})
	}
}

// TestBadContainerImages wants every problem with container images at once,
// each with its line and its fix, before anything is compiled or written.
func TestBadContainerImages(t *testing.T) {
	c := newCLI(t)
	c.project(func(s string) string {
		s = strings.Replace(s, "version: 2.2.9", "version: 2.99.0", 1)
		s = strings.Replace(s, "images:\n", `images:
  - {ref: "edgebake.test/gone:1", layout: gone}
  - {ref: "edgebake.test/gone:2", archive: gone.tar}
  - {ref: "edgebake.test/other:1", layout: images}
  - {ref: "edgebake.test/none:1", layout: overlay}
  - {ref: "edgebake.test/folder:1", archive: overlay}
`, 1)
		return s + "imagesFrom: [pods.yaml, more/*.yaml]\n"
	})
	c.file("pods.yaml", `kind: Pod
metadata: {name: web}
spec:
  containers:
  - image: 127.0.0.1:1/web:1
  - image: edgebake.test/web
`)
	before := names(t, c.dir)
	for _, command := range []string{"build", "plan", "images"} {
		c.run(1, command, "image.yaml")
		c.want(c.err,
			`image.yaml:12:12: containerd.version: containerd "2.99.0": its store is unknown to this edgebake, which knows 1.7, 2.0, 2.1, 2.2, 2.3, 2.4; choose one of these versions, or imageStore.mode: import`,
			"image.yaml:19:5: images[0]: image edgebake.test/gone:1: OCI layout gone not found: make it",
			"image.yaml:20:5: images[1]: image edgebake.test/gone:2: archive gone.tar not found: make it",
			"image.yaml:21:5: images[2]: image edgebake.test/other:1: OCI layout images: it has no image of that name, but edgebake.test/pause:1; write one of these as ref",
			"image.yaml:22:5: images[3]: image edgebake.test/none:1: overlay is not an OCI layout: it has no index.json",
			"image.yaml:23:5: images[4]: image edgebake.test/folder:1: image archive overlay is a directory; where that is an OCI layout, name it as layout",
			"pods.yaml:5: Pod web: image 127.0.0.1:1/web:1: fetching manifest: ",
			`pods.yaml:6: Pod web: image reference "edgebake.test/web" has no tag`,
			`: imagesFrom[1]: "more/*.yaml": no file matches`)
		if strings.Contains(c.err, "done") {
			t.Errorf("%s says that something was done:\n%s", command, c.err)
		}
		if after := names(t, c.dir); !slices.Equal(before, after) {
			t.Errorf("there is %q now, there was %q", after, before)
		}
	}
}

// TestImagesCommand is the list as text and JSON, and what a lock rejects.
func TestImagesCommand(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.run(0, "images", "image.yaml")
	c.want(c.out, "edgebake.test/pause:1", "SHARED", "1 image, 1 layer, ")
	c.run(0, "images", "image.yaml", "-o", "json")
	c.want(c.out, `"ref": "edgebake.test/pause:1"`, `"size": `, `"shared": 0`)
	c.run(1, "images", "image.yaml", "--locked")
	c.want(c.err, "--locked: there is no lock image.lock: build once without --locked to make it, or name another with --lock")
	c.run(1, "plan", "image.yaml", "--locked", "--lock", "other.lock")
	c.want(c.err, "--locked: there is no lock other.lock: ")
	image, err := os.ReadFile("image.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c.runIn(t.Context(), string(image), 2, "plan", "-", "--locked")
	c.want(c.err, "--locked: an Image from standard input has no lock beside it: name one with --lock")
	c.run(0, "build", "image.yaml")
	c.want(c.out, "2 Debian packages, 1 container image of 8 KiB in 1 layer\n")
	c.run(0, "images", "image.yaml", "--locked")
	c.project(func(s string) string { return strings.Replace(s, "layout: images", "layout: ./images", 1) })
	c.run(1, "images", "image.yaml", "--locked")
	c.want(c.err, "--locked: the lock and the Image differ:\ninput image edgebake.test/pause:1 is described otherwise")
	if n := strings.Count(c.err, "build without --locked"); n != 1 {
		t.Errorf("the fix is told %d times: %s", n, c.err)
	}
	c.project(func(s string) string {
		s = strings.Replace(s, "  sandbox: edgebake.test/pause:1\n", "", 1)
		return strings.Replace(s, "images:\n  - ref: edgebake.test/pause:1\n    layout: images\n", "", 1)
	})
	c.run(0, "images", "image.yaml")
	c.want(c.out, "no container images")
	c.run(0, "images", "image.yaml", "-o", "json")
	if strings.TrimSpace(c.out) != "[]" {
		t.Errorf("no images as JSON: %s", c.out)
	}
	// A slip in a flag is told before anything is asked for.
	for _, args := range [][]string{{"images", "nowhere.yaml"}, {"inspect", "nowhere.raw"}, {"cache"}} {
		c.run(2, append(args, "-o", "yaml")...)
		c.want(c.err, "text or json")
	}
}

// TestBadIgnition wants an Ignition config's problems under the name that the
// person gave it, from every command that reads a Site.
func TestBadIgnition(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.run(0, "build", "image.yaml")
	c.file("site.yaml", site+"ignitionFile: mine.ign\n")
	before := names(t, c.dir)
	commands := [][]string{{"validate", "site.yaml"}, {"render", "--ignition", "site.yaml"}, {"stamp", "tiny.raw", "site.yaml"}}
	for _, args := range commands {
		c.run(1, args...)
		c.want(c.err, "site.yaml:8:15: ignitionFile: open mine.ign: no such file")
	}
	for body, want := range map[string]string{
		"{": "mine.ign: ",
		`{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"etc/x"}]}}`:                                                                "storage.files.0.path: path not absolute",
		`{"ignition":{"version":"9.0.0"}}`:                                                                                                       "mine.ign: ignition.version must be one of 3.0.0 to 3.6.0",
		`{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/x","contents":{"source":"http://127.0.0.1/y"}}]}}`:                        "must be inline (data:)",
		`{"ignition":{"version":"3.6.0"},"storage":{"files":[{"path":"/x","contents":{"source":"data:,` + strings.Repeat("x", 17<<20) + `"}}]}}`: "mine.ign: has 17.0 MiB; the slot has room for 15 MiB: put large files into the Image",
	} {
		c.file("mine.ign", body)
		for _, args := range append(commands, []string{"stamp", "tiny.raw", "site.yaml", "--ignition", "mine.ign", "--output", "new.raw"}) {
			c.run(1, args...)
			c.want(c.err, want, "mine.ign:")
		}
	}
	if err := os.Remove("mine.ign"); err != nil {
		t.Fatal(err)
	}
	c.run(1, "stamp", "tiny.raw", "site.yaml", "--ignition", "mine.ign")
	c.want(c.err, "--ignition: open mine.ign")
	if after := names(t, c.dir); !slices.Equal(before, after) {
		t.Errorf("there is %q now, there was %q", after, before)
	}
	c.run(0, "inspect", "tiny.raw")
	c.want(c.out, "slot        golden")
}

// TestNoPermission is an ordinary user in directories of others.
func TestNoPermission(t *testing.T) {
	if dir := os.Getenv("EDGEBAKE_TEST_USER"); dir != "" {
		asUser(t, dir)
		return
	}
	c := newCLI(t)
	c.project(nil)
	c.file("site.yaml", site)
	c.run(0, "build", "image.yaml", "--output", "other.raw", "--lock", "other.lock")
	for _, d := range []string{"ro", "mine"} {
		if err := os.Mkdir(d, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	exe := filepath.Join(c.dir, "test")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	c.file("test", string(data))
	// Everything can be read and nothing but "mine" written.
	err = filepath.WalkDir(c.dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Chmod(p, 0o555)
	})
	if err != nil {
		t.Fatal(err)
	}
	for d := filepath.Dir(c.dir); d != filepath.Clean(os.TempDir()) && len(d) > 1; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod("mine", 0o777); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Chmod(c.dir, 0o755); os.Chmod("ro", 0o755) })
	before := names(t, c.dir)
	cmd := exec.Command(exe, "-test.run", "^TestNoPermission$", "-test.v")
	cmd.Env = append(os.Environ(), "EDGEBAKE_TEST_USER="+c.dir, "HOME=/nowhere")
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	if after := names(t, c.dir); !slices.Equal(before, after) || len(names(t, "ro")) > 0 {
		t.Errorf("there is %q now, there was %q", after, before)
	}
}

// asUser is the part of TestNoPermission that runs as an ordinary user.
func asUser(t *testing.T, dir string) {
	c := &cli{t: t, dir: dir}
	t.Chdir(dir)
	cache := filepath.Join(dir, "mine", "cache")
	build := func(args ...string) []string { return append([]string{"build", "image.yaml"}, args...) }
	for _, tt := range []struct {
		args  []string
		cache string
		want  []string
	}{
		{build("--output", "ro/x.raw", "--lock", "mine/lock"), cache, []string{"output ro/x.raw: ", "directory ro cannot be written by this user; write elsewhere"}},
		{build("--output", "mine/x.raw"), cache, []string{"lock image.lock: ", "directory . cannot be written by this user", "--lock names another place"}},
		{build("--output", "mine/x.raw", "--lock", "mine/lock", "--export-base", "ro/base.tar"), cache, []string{"--export-base: ", "directory ro cannot be written"}},
		{build("--output", "mine/x.raw", "--lock", "mine/lock"), filepath.Join(dir, "ro", "cache"), []string{"opening cache", "--cache or EDGEBAKE_CACHE choose another"}},
		{[]string{"stamp", "other.raw", "site.yaml"}, cache, []string{"other.raw: permission denied: stamping in place needs write permission; or have a copy stamped (--output)"}},
		{[]string{"stamp", "other.raw", "site.yaml", "--output", "ro/new.raw"}, cache, []string{"directory ro cannot be written by this user"}},
		{[]string{"init", "--dir", "ro"}, cache, []string{"directory ro cannot be written by this user"}},
	} {
		t.Setenv("EDGEBAKE_CACHE", tt.cache)
		c.run(1, tt.args...)
		c.want(c.err, tt.want...)
	}
	if got := fmt.Sprint(names(t, "mine")); got != "[cache]" {
		t.Errorf("in the user's own directory there is %s", got)
	}
}

// TestCAFile wants the certificate that caFile names in the slot, and its
// problems under the field's name, from every command that reads a Site.
func TestCAFile(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.run(0, "build", "image.yaml")
	if err := os.Mkdir("sites", 0o755); err != nil {
		t.Fatal(err)
	}
	c.file("sites/site.yaml", strings.Replace(site, "caCertHashes: [", "caFile: ca.crt #", 1))
	commands := [][]string{{"validate", "sites/site.yaml"}, {"render", "--ignition", "sites/site.yaml"}, {"stamp", "tiny.raw", "sites/site.yaml"}}
	for _, tc := range []struct{ body, want string }{{"", "no such file"}, {"not PEM", "contains no PEM certificate"}} {
		if tc.body != "" {
			c.file("sites/ca.crt", tc.body)
		}
		for _, args := range commands {
			c.run(1, args...)
			c.want(c.err, "sites/site.yaml:6:9: caFile: ", tc.want)
		}
	}
	server := httptest.NewTLSServer(nil) // its certificate is a CA
	defer server.Close()
	c.file("sites/ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	for _, args := range commands {
		c.run(0, args...)
	}
	// The slot holds the certificate itself.
	dev, err := media.Inspect("tiny.raw")
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(dev.Partitions, func(p media.Partition) bool { return p.Label == ondisk.LabelSlot })
	f, err := os.Open("tiny.raw")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	held, err := slot.Read(io.NewSectionReader(f, dev.Partitions[i].Start, dev.Partitions[i].Size))
	if err != nil {
		t.Fatal(err)
	}
	s, err := configs.ParsePublicSite("slot", held.Files[ondisk.SlotSite])
	if err != nil || s.CAFile != "" || !strings.HasPrefix(s.CACert, "-----BEGIN CERTIFICATE-----") {
		t.Errorf("in the slot: %+v, %v", s, err)
	}
}

// Who has a disk in hand can write into its slot, and must not write to the
// terminal of whoever inspects it.
func TestInspectObeysNoControlCharacters(t *testing.T) {
	var out bytes.Buffer
	i := &media.Info{Image: ondisk.ImageInfo{Name: "a\x1b]0;b\a"}}
	i.Slot.Report = "node is Ready\r\n\x1b[2Jgone\x9b2J\u009b2J\n\tüber"
	i.Packages = []media.Package{{Name: "p\x7f", Version: "1"}}
	printInfo(streams{}.printable(&results{Writer: &out}), i, false, false, true)
	if strings.ContainsAny(out.String(), "\x1b\x07\x7f\r\u009b") || !utf8.Valid(out.Bytes()) {
		t.Errorf("printed %q", out.String())
	}
	for _, want := range []string{"a?]0;b?", "node is Ready\n?[2Jgone", "\n\tüber"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in %q", want, out.String())
		}
	}
}

// TestTooSmallPartitions: a size that does not suffice is found with the content,
// and told with its field.
func TestTooSmallPartitions(t *testing.T) {
	c := newCLI(t)
	c.project(func(s string) string { return s + "disk: {root: 260MiB, data: 64MiB}\n" })
	c.run(1, "build", "image.yaml")
	c.want(c.err, "image.yaml:30:14: disk.root: laying out partition ROOT-A: its content and headroom need", "it was given 260 MiB",
		"image.yaml:30:28: disk.data: laying out partition DATA: ")
	// What is too small for anything is told before an input is made.
	c.project(func(s string) string { return s + "disk: {root: 100MiB}\n" })
	c.run(1, "build", "image.yaml")
	c.want(c.err, "image.yaml:30:14: disk.root: 100MiB is too small for any content")
	if strings.Contains(c.err, "merge") {
		t.Errorf("inputs were made first:\n%s", c.err)
	}
}

// TestValidateLooksForFiles: what a document names is looked for before a
// build, all of it, and nothing is opened or written.
func TestValidateLooksForFiles(t *testing.T) {
	c := newCLI(t)
	c.project(func(s string) string {
		s = strings.Replace(s, "config: bridge, podCIDR: 10.244.0.0/16", "config: net.conflist", 1)
		s = strings.Replace(s, "file: base.tar", "file: gone.tar", 1)
		s = strings.Replace(s, "dir: programs", "dir: bin", 1)
		s = strings.Replace(s, "dir: overlay", "dir: gone", 1)
		s = strings.Replace(s, "    layout: images\n", "    layout: none\n  - ref: edgebake.test/app:1\n    archive: images\nimagesFrom: [apps/*.yaml, app.yaml]\n", 1)
		return strings.Replace(s, "source: notes.txt", "source: overlay", 1)
	})
	c.file("app.yaml", "kind: Pod\nspec: {containers: [{image: 'UPPER/case'}]}\n")
	before := names(t, c.dir)
	c.run(1, "validate", "image.yaml")
	c.want(c.err, "image.yaml:6:5: base.tar: open gone.tar: no such file or directory: make it, or correct the path (a relative one begins at the Image's directory)",
		"kubernetes.source.file.dir: open bin: no such file or directory: make it", "cni.config: open net.conflist", "overlays[0].dir: open gone", "files[1].source: overlay is not a file",
		"image.yaml:20:13: images[0].layout: open none: no such file", "images[1].archive: images is not a file", `imagesFrom[0]: "apps/*.yaml": no file matches`, "UPPER/case")
	if got := names(t, c.dir); !slices.Equal(got, before) {
		t.Errorf("left %q, there was %q", got, before)
	}
	// What a build begins with as a warning is told here, once.
	c.run(0, "init", "--dir", "new", "--quiet")
	c.run(0, "validate", "new/image.yaml")
	for _, want := range []string{"new/image.yaml: containerd.sandbox names no pause image", "new/image.yaml: no kube-proxy on board"} {
		if strings.Count(c.err, want) != 1 {
			t.Errorf("want once %q: %q", want, c.err)
		}
	}
	// Seen from another directory too.
	c.project(nil)
	t.Chdir("/")
	c.run(0, "validate", filepath.Join(c.dir, "image.yaml"))

	t.Chdir(c.dir)
	c.file("site.yaml", site+"ignitionFile: gone.ign\ncaFile: gone.crt\n")
	c.run(1, "validate", "site.yaml")
	c.want(c.err, "ignitionFile: open gone.ign", "caFile: open gone.crt")
}

// What a program says that a build calls is told whole: its fix is behind it.
func TestWordsOfProgramsAreTold(t *testing.T) {
	doc := document{name: "image.yaml", data: []byte("apiVersion: edgebake.io/v1alpha1\nkind: Image\nbase:\n  debian: {}\n")}
	said := strings.Repeat("Err: not there\n", 300) + "the last line"
	err := doc.explain(&configs.FieldError{Path: "base.debian", Err: errors.New(said)})
	if want := "image.yaml:4:11: base.debian: " + said; err == nil || err.Error() != want {
		t.Errorf("%v", err)
	}
}

// A date that is mistyped is told before minutes of building, not when every stamp is
// rejected for it.
func TestDateInTheFuture(t *testing.T) {
	c := newCLI(t)
	const date = "2077-01-01T00:00:00Z"
	c.project(func(s string) string {
		return strings.Replace(s, "kind: Image\n", "kind: Image\nsourceDate: "+date+"\n", 1)
	})
	const want = "image.yaml:3:13: sourceDate: " + date + " is in the future by this computer's clock, and until then the image can be stamped with --undated only: set it to the current date, or set the clock (warning)\n"
	for _, args := range []string{"validate image.yaml", "validate --quiet image.yaml", "plan image.yaml", "build image.yaml"} {
		c.run(0, strings.Fields(args)...)
		if n := strings.Count(c.err, want); n != 1 {
			t.Errorf("%s: told %d times, want once:\n%s", args, n, c.err)
		}
	}
	c.project(nil)
	c.run(0, "validate", "image.yaml")
	if strings.Contains(c.err, "sourceDate") {
		t.Errorf("said %q", c.err)
	}
}

// TestReportOfAnotherBuild: a build that was cut off between its files is
// noticed.
func TestReportOfAnotherBuild(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.run(0, "build", "image.yaml")
	c.run(0, "inspect", "tiny.raw")
	if c.err != "" {
		t.Errorf("said of a whole build: %s", c.err)
	}
	report, err := os.ReadFile("tiny.report.json")
	if err != nil {
		t.Fatal(err)
	}
	c.file("notes.txt", "another note")
	c.run(0, "build", "image.yaml", "--force")
	c.file("tiny.report.json", string(report))
	c.run(0, "inspect", "tiny.raw")
	c.want(c.err, "WARNING: tiny.report.json is of another build", "build the image again")

	// A lock of other inputs says what to do.
	c.file("notes.txt", "a third note")
	c.run(1, "build", "image.yaml", "--force", "--locked")
	c.want(c.err, "input file 1 has sha256", "build without --locked, which renews the lock")
}
