package main

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/buildtest"
)

// several makes the project of a document for two architectures.
func (c *cli) several(edit func(string) string) {
	c.t.Helper()
	writeSeveral(c.t, c.dir, edit)
}

func writeSeveral(t *testing.T, dir string, edit func(string) string) {
	t.Helper()
	err := buildtest.Write(dir, buildtest.Base(), func(doc string) string {
		doc = buildtest.Several(doc)
		if edit != nil {
			doc = edit(doc)
		}
		return doc
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, arch := range []string{"amd64", "arm64"} {
		if err := buildtest.WriteFor(dir, arch); err != nil {
			t.Fatal(err)
		}
	}
}

func (c *cli) there(names ...string) {
	c.t.Helper()
	for _, n := range names {
		if _, err := os.Stat(n); err != nil {
			c.t.Error(err)
		}
	}
}

func (c *cli) notThere(names ...string) {
	c.t.Helper()
	for _, n := range names {
		if _, err := os.Stat(n); err == nil {
			c.t.Errorf("%s is there", n)
		}
	}
}

// TestBuildForSeveralArchitectures: one document, one command, an image for
// each, with names and locks of their own.
func TestBuildForSeveralArchitectures(t *testing.T) {
	c := newCLI(t)
	c.several(nil)
	c.run(0, "validate", "image.yaml")
	c.run(0, "build", "image.yaml")
	c.want(c.out, "tiny-amd64.raw: amd64, Kubernetes", "tiny-arm64.raw: arm64, Kubernetes", "Next: edgebake stamp tiny-arm64.raw")
	c.want(c.err, "arm64 write: tiny-arm64.raw", "amd64 write: done")
	c.there("tiny-amd64.report.json", "tiny-arm64.sbom.spdx.json", "image-amd64.lock", "image-arm64.lock")
	c.notThere("image.lock", "tiny.raw")
	c.run(0, "inspect", "tiny-arm64.raw", "--verify")
	c.want(c.out, "arch        arm64")

	// One of them has the same names, whether or not the other is built too.
	first, err := os.ReadFile("tiny-arm64.raw")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove("tiny-arm64.raw"); err != nil {
		t.Fatal(err)
	}
	c.run(0, "build", "image.yaml", "--arch", "arm64", "--locked")
	again, err := os.ReadFile("tiny-arm64.raw")
	if err != nil || string(again) != string(first) {
		t.Errorf("another image: %v", err)
	}
	// With --output the name given, where it is one image.
	c.run(0, "build", "image.yaml", "--arch", "arm64", "--output", "one.raw")
	c.run(0, "build", "image.yaml", "--output", "both.raw.zst", "--lock", "kept.lock", "--json")
	c.there("one.raw", "both-amd64.raw.zst", "both-arm64.raw.zst", "both-arm64.report.json", "kept-amd64.lock", "kept-arm64.lock")
	c.want(c.out, `"output":"both-amd64.raw.zst"`, `"arch":"arm64","step":"write"`)

	// Commands about one image ask which.
	c.run(2, "plan", "image.yaml")
	c.want(c.err, "image.yaml is for amd64 and arm64: choose one with --arch")
	c.run(0, "plan", "image.yaml", "--arch", "arm64")
	c.want(c.out, "image  tiny, arm64, date ")
	c.run(2, "images", "image.yaml")
	c.run(0, "images", "image.yaml", "--arch", "amd64")

	// What stands in the way of any of them is told before the first is built.
	c.run(1, "build", "image.yaml", "--output", "one.raw", "--arch", "arm64")
	c.want(c.err, "one.raw exists; --force replaces it")
	c.file("new-arm64.raw", "")
	c.run(1, "build", "image.yaml", "--output", "new.raw")
	c.want(c.err, "new-arm64.raw exists; --force replaces it")
	c.notThere("new-amd64.raw")
}

// TestArchFlag builds for another architecture than the document's, beside the
// document's own image.
func TestArchFlag(t *testing.T) {
	c := newCLI(t)
	c.several(func(doc string) string { return strings.Replace(doc, "arch: [amd64, arm64]\n", "", 1) })
	c.run(0, "build", "image.yaml")
	c.run(0, "build", "image.yaml", "--arch", "arm64")
	c.there("tiny.raw", "image.lock", "tiny-arm64.raw", "image-arm64.lock")
	c.run(1, "build", "image.yaml", "--arch", "arm64", "--lock", "image.lock", "--force")
	c.want(c.err, "image.lock: the lock is of an image for another architecture than arm64: name another lock with --lock")
	c.run(2, "build", "image.yaml", "--arch", "arm46")
	c.want(c.err, `--arch arm46: want amd64 or arm64; did you mean "arm64"?`)
	c.run(2, "build", "image.yaml", "--arch", "aarch64,x86_64")
	c.want(c.err, `--arch aarch64: want amd64 or arm64; did you mean "arm64"?`, `--arch x86_64: want amd64 or arm64; did you mean "amd64"?`)
	for _, arch := range []string{"x86_64", "[arm64, x86_64]"} {
		c.file("other.yaml", "apiVersion: edgebake.io/v1alpha1\nkind: Image\narch: "+arch+"\n")
		c.run(1, "validate", "other.yaml")
		c.want(c.err, `"x86_64" is not one of amd64, arm64; did you mean "amd64"?`)
	}
	c.run(2, "build", "image.yaml", "--arch", "arm64,arm64")
	c.want(c.err, "--arch arm64 is given twice")
	// The document grows: what was locked stays.
	lock, err := os.ReadFile("image.lock")
	if err != nil {
		t.Fatal(err)
	}
	c.file("image.lock", regexp.MustCompile(`"rootRoom": \d+`).ReplaceAllString(string(lock), `"rootRoom": 4096`))
	c.several(nil)
	c.run(0, "build", "image.yaml", "--force", "--arch", "amd64")
	grown, err := os.ReadFile("image-amd64.lock")
	if err != nil || !strings.Contains(string(grown), `"rootRoom": 4096`) {
		t.Errorf("%v\n%s", err, grown)
	}
	// As it does under a name given with --lock.
	c.file("ci.lock", string(grown))
	c.run(0, "build", "image.yaml", "--force", "--lock", "ci.lock")
	if grown, err = os.ReadFile("ci-amd64.lock"); err != nil || !strings.Contains(string(grown), `"rootRoom": 4096`) {
		t.Errorf("%v\n%s", err, grown)
	}
	// The document is for one architecture again, and this for another: its own
	// lock is found behind the other's.
	c.file("image.lock", string(grown))
	one, err := os.ReadFile("image.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c.file("image.yaml", regexp.MustCompile(`(?m)^arch: .*$`).ReplaceAllString(string(one), "arch: arm64"))
	c.run(0, "plan", "image.yaml", "--locked")
	c.run(0, "build", "image.yaml", "--force")
	if kept, err := os.ReadFile("image.lock"); err != nil || !bytes.Equal(kept, grown) {
		t.Errorf("the lock of the other architecture was replaced: %v", err)
	}
	for path, want := range map[string]string{"a/base.tar.zst": "a/base-arm64.tar.zst", "base.tar": "base-arm64.tar", "n.raw.zst": "n-arm64.raw.zst", "base": "base-arm64"} {
		if got := forArch(path, "arm64"); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}
