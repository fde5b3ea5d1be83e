package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/edgebake/edgebake/test/buildtest"
)

// program makes a source tree in which one of our programs is a small one.
func (c *cli) program(name string) {
	c.t.Helper()
	if err := os.MkdirAll(filepath.Join(c.dir, "cmd", name), 0o755); err != nil {
		c.t.Fatal(err)
	}
	c.file("go.mod", "module github.com/edgebake/edgebake\n\ngo 1.24\n")
	c.file("cmd/"+name+"/main.go", "package main\n\nfunc main() {}\n")
}

// installable is a directory of which an installer can be made.
func installable(t *testing.T) *cli {
	t.Helper()
	c := newCLI(t)
	if err := buildtest.Write(c.dir, buildtest.InstallableBase(), nil); err != nil {
		t.Fatal(err)
	}
	c.program("installer")
	c.file("site.yaml", site)
	c.run(0, "build", "image.yaml", "--output", "tiny.raw.zst")
	c.disk("stick", 1<<30)
	return c
}
