package main

import (
	"os"
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

func TestNameForArch(t *testing.T) {
	for path, want := range map[string]string{"a/base.tar.zst": "a/base-arm64.tar.zst", "base.tar": "base-arm64.tar", "n.raw.zst": "n-arm64.raw.zst", "base": "base-arm64"} {
		if got := forArch(path, "arm64"); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}
