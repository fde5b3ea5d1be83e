package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"aead.dev/minisign"
)

// TestSignedImages: what was signed at the build is known after stamping,
// copying and flashing, and nothing else passes.
func TestSignedImages(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.file("site.yaml", site)
	c.file("office.key", plainKey)
	c.file("locked.key", encryptedKey)
	c.file("office.pub", "untrusted comment: minisign public key\n"+publicKey+"\n")
	stranger, _, err := minisign.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	c.file("stranger.pub", stranger.String())
	c.run(0, "build", "image.yaml", "--output", "plain.raw")
	c.run(0, "build", "image.yaml", "--output", "a.raw.zst", "--sign", "office.key")
	c.run(0, "build", "image.yaml", "--output", "b.raw.zst", "--sign", "office.key")
	a, errA := os.ReadFile("a.raw.zst")
	b, errB := os.ReadFile("b.raw.zst")
	if errA != nil || errB != nil || string(a) != string(b) {
		t.Errorf("two signed builds differ: %v %v", errA, errB)
	}
	t.Setenv(passwordVariable, "wrong")
	c.run(1, "build", "image.yaml", "--output", "c.raw", "--sign", "locked.key")
	c.want(c.err, "the password is wrong")
	if _, err := os.Stat("c.raw"); err == nil {
		t.Error("built without its signature")
	}
	t.Setenv(passwordVariable, keyPassword)
	c.run(0, "build", "image.yaml", "--output", "c.raw", "--sign", "locked.key")

	c.run(0, "stamp", "a.raw.zst", "site.yaml", "--output", "stamped.raw")
	c.disk("disk", 8<<30)
	c.run(0, "flash", "b.raw.zst", "disk", "--site", "site.yaml", "--yes", "--key", publicKey)
	for _, image := range []string{"a.raw.zst", "stamped.raw", "disk"} {
		c.run(0, "verify", image, "--key", "office.pub")
		c.want(c.out, image+": verified, signed by key ")
		c.run(0, "verify", image, "--key", "stranger.pub", "--key", publicKey, "--signature-only")
		c.want(c.out, "not read, signed by key ")
		c.run(1, "verify", image, "--key", "stranger.pub")
		c.want(c.err, "is signed by key", "expected")
		c.run(0, "inspect", image)
		c.want(c.out, "(signed)")
	}
	c.run(0, "verify", "plain.raw")
	c.want(c.out, "plain.raw: verified\n")
	c.run(1, "verify", "plain.raw", "--key", "office.pub")
	c.want(c.err, "has no signature: build it with --sign KEY")
	c.disk("disk", 8<<30)
	c.run(1, "flash", "plain.raw", "disk", "--yes", "--key", "office.pub")
	c.want(c.err, "has no signature")
	c.run(1, "flash", "a.raw.zst", "disk", "--yes", "--key", "stranger.pub")
	c.want(c.err, "somebody else's")
	c.run(1, "inspect", "disk")
	c.want(c.err, "no GUID partition table") // nothing was written

	// A signed image that was changed.
	f, err := os.OpenFile("stamped.raw", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("x"), 600<<20); err != nil {
		t.Fatal(err)
	}
	f.Close()
	c.run(1, "verify", "stamped.raw", "--key", "office.pub")
	c.want(c.err, "partition ROOT-A is not as it was built: its golden digest is", "the image is damaged, or has booted: copy or build it again")
	c.run(1, "inspect", "stamped.raw", "--verify")
	c.want(c.err, "partition ROOT-A is not as it was built")
	for _, tc := range []struct {
		code int
		args []string
		want string
	}{
		{2, []string{"plain.raw", "--signature-only"}, "--key PUB"},
		{1, []string{"plain.raw", "--key", "office.key"}, "secret key"},
		{1, []string{"plain.raw", "--key", "locked.key"}, "secret key"},
		{1, []string{"plain.raw", "--key", "none.pub"}, "neither a file nor"},
		{1, []string{"plain.raw", "--key", "site.yaml"}, "not a minisign public key"},
	} {
		c.run(tc.code, append([]string{"verify"}, tc.args...)...)
		if !strings.Contains(c.err, tc.want) {
			t.Errorf("%v: %s", tc.args, c.err)
		}
	}
}

// TestPasswordIsAskedForLast: all that is wrong with a command is said at once, and
// before the password of the key that signs is asked for.
func TestPasswordIsAskedForLast(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.file("tiny.raw", "mine")
	c.file("locked.key", encryptedKey)
	c.file("office.pub", publicKey)
	c.file("bad.yaml", strings.Replace(site, "berlin-7", "Berlin_7!", 1))
	const there = "edgebake: output tiny.raw exists; --force replaces it\n"
	for _, tc := range []struct{ args, want string }{
		{"--sign locked.key", there},
		{"--sign locked.key --export-base no/base.tar", there + "edgebake: --export-base: no/base.tar: no such file or directory: make directory no first\n"},
		{"--sign none.key", there + "edgebake: reading the key: open none.key: no such file or directory\n"},
		{"--sign office.pub", there + "edgebake: reading the key office.pub: it is a public key: name the secret key (minisign -G -s FILE)\n"},
		{"--sign locked.key --output x", "edgebake: output x: its name must end in .raw or .raw.zst (compressed)\n"},
	} {
		c.run(1, append([]string{"build", "image.yaml"}, strings.Fields(tc.args)...)...)
		if c.err != tc.want {
			t.Errorf("%s: %s\nwant %s", tc.args, c.err, tc.want)
		}
	}
	c.run(1, "site", "sign", "bad.yaml", "--key", "none.key")
	c.want(c.err, "bad.yaml:7:11: nodeName: ", "edgebake: reading the key: open none.key: no such file or directory\n")
}

// TestBuildFilesAreDistinct: no file of a build takes the place of another one of it,
// under whatever name, and none that is there is replaced without --force.
func TestBuildFilesAreDistinct(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.file("office.key", plainKey)
	if err := errors.Join(os.Mkdir("out", 0o755), os.Symlink("out", "link")); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"--output out/x.raw --lock out/x.raw":                                  "--lock out/x.raw: it is the image: name another file",
		"--output out/x.raw --lock link/x.raw":                                 "--lock link/x.raw: it is the image: name another file",
		"--output out/x.raw --lock ./out/../out/x.report.json":                 "--lock ./out/../out/x.report.json: it is the report of the image: name another file",
		"--output out/x.raw --lock out/x.sbom.spdx.json":                       "--lock out/x.sbom.spdx.json: it is the SBOM of the image: name another file",
		"--output out/x.raw --export-base link/x.report.json":                  "--export-base link/x.report.json: it is the report of the image: name another file",
		"--output out/x.raw --lock out/l --export-base link/l":                 "--export-base link/l: it is the lock: name another file",
		"--output out/x.raw --lock office.key --sign office.key":               "office.key: reading the lock: ",
		"--arch amd64,arm64 --output out/x.raw --export-base out/x.raw":        "--export-base out/x-arm64.raw: it is the image for arm64: name another file",
		"--output out/x.raw --base out/x.raw":                                  "--output out/x.raw: it is the base of --base: name another file",
		"--output out/x.raw --locked --lock out/x.report.json --base base.tar": "--locked: there is no lock out/x.report.json: ",
	} {
		c.run(1, append([]string{"build", "image.yaml", "--force"}, strings.Fields(args)...)...)
		c.want(c.err, want)
		if left, err := os.ReadDir("out"); err != nil || len(left) > 0 {
			t.Errorf("%s: left %v, %v", args, left, err)
		}
	}
	// The document, under the name of an image.
	if err := os.Rename("image.yaml", "image.raw"); err != nil {
		t.Fatal(err)
	}
	c.run(1, "build", "image.raw", "--force", "--output", "image.raw", "--lock", "l")
	c.want(c.err, "--output image.raw: it is the document: name another file")
	if err := os.Rename("image.raw", "image.yaml"); err != nil {
		t.Fatal(err)
	}

	c.run(0, "build", "image.yaml", "--output", "out/x.raw.zst")
	report, err := os.ReadFile("out/x.report.json")
	if err != nil {
		t.Fatal(err)
	}
	c.run(1, "build", "image.yaml", "--output", "out/x.raw")
	c.want(c.err, "report of out/x.raw.zst, out/x.report.json exists; --force replaces it", "SBOM of out/x.raw.zst, out/x.sbom.spdx.json exists; --force replaces it")
	if now, err := os.ReadFile("out/x.report.json"); err != nil || string(now) != string(report) {
		t.Errorf("the report of the other image is replaced (%v)", err)
	}
	c.run(0, "build", "image.yaml", "--output", "out/x.raw", "--force")
}

// TestOutputsThatAreInputs: no output takes the place of what the command reads or
// writes besides, also with --force.
func TestOutputsThatAreInputs(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.file("office.key", plainKey)
	c.file("stores.csv", "name,serial\nparis,SN1\n")
	c.file("site.yaml", site)
	c.file("boot.json", "{}")
	c.file("token", "abcdef.0123456789abcdef\n")
	c.file("site.ign", `{"ignition":{"version":"3.5.0"}}`)
	c.file("kubeconfig", "{}")
	c.run(0, "build", "image.yaml", "--output", "g.raw")
	c.file("stores.yaml", inventory)
	c.run(0, "stamp", "g.raw", "stores.yaml", "--slots", "--output", "slots")
	slots, err := filepath.Glob("slots/*.slot")
	if err != nil || len(slots) == 0 {
		t.Fatal(slots, err)
	}
	if err := errors.Join(os.Symlink("site.yaml", "link.yaml"), os.Symlink("notes.txt", "link.txt")); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"build image.yaml --output g.raw --export-base ./g.raw":            "--export-base ./g.raw: it is the image: name another file",
		"build image.yaml --output new.raw --export-base new.raw":          "--export-base new.raw: it is the image: name another file",
		"build image.yaml --export-base image.lock":                        "--export-base image.lock: it is the lock: name another file",
		"build image.yaml --export-base image.yaml":                        "--export-base image.yaml: it is the document: name another file",
		"build image.yaml --export-base office.key --sign office.key":      "--export-base office.key: it is the key of --sign: name another file",
		"build image.yaml --export-base base.tar":                          "--export-base base.tar: the Image reads it (base.tar): name another file",
		"build image.yaml --export-base link.txt":                          "--export-base link.txt: the Image reads it (files[1].source): name another file",
		"build image.yaml --export-base programs/kubelet":                  "--export-base programs/kubelet: the Image reads it (kubernetes.source): name another file",
		"build image.yaml --export-base programs/firstboot":                "--export-base programs/firstboot: the Image reads it (agents.firstboot): name another file",
		"build image.yaml --output overlay/x.raw":                          "--output overlay/x.raw: it lies in a directory that the Image reads (overlays[0].dir): write elsewhere",
		"build image.yaml --export-base images/index.json":                 "--export-base images/index.json: it lies in a directory that the Image reads (images[0].layout): write elsewhere",
		"inventory import stores.csv --template site.yaml -o ./stores.csv": "--output ./stores.csv: it is the table: name another file",
		"inventory import stores.csv --template site.yaml -o link.yaml":    "--output link.yaml: it is the template: name another file",
		"stamp g.raw site.yaml --output site.yaml":                         "--output site.yaml: it is the document: name another file",
		"stamp g.raw site.yaml --output link.yaml":                         "--output link.yaml: it is the document: name another file",
		"stamp g.raw site.yaml --ignition site.ign --output site.ign":      "--output site.ign: it is the Ignition config: name another file",
		"stamp g.raw site.yaml --token-file token --output ./token":        "--output ./token: it is the file of --token-file: name another file",
		"stamp g.raw --slot " + slots[0] + " --output " + slots[0]:         "it is the slot: name another file",
		"installer g.raw --iso site.yaml --site site.yaml":                 "--iso site.yaml: it is the document: name another file",
		"cluster token mint --kubeconfig kubeconfig --output kubeconfig":   "--output kubeconfig: it is the kubeconfig: name another file",
		"report g.raw --boot boot.json --output boot.json":                 "--output boot.json: it is the report of --boot: name another file",
		"report g.raw --output g.report.json":                              "--output g.report.json: it is the report of the build: name another file",
	} {
		before, errBefore := os.ReadFile("site.yaml")
		c.run(1, append(strings.Fields(args), "--force")...)
		c.want(c.err, want)
		if after, err := os.ReadFile("site.yaml"); err != nil || errBefore != nil || string(after) != string(before) {
			t.Errorf("%s: %v, %v", args, errBefore, err)
		}
	}
}
