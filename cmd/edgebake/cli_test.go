package main

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/documents"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/disktest"
)

// program runs edgebake in its own directory.
type program struct {
	t        *testing.T
	dir      string
	out, err string
}

func newCLI(t *testing.T) *program {
	t.Helper()
	c := &program{t: t, dir: disktest.Scratch(t)}
	t.Setenv("EDGEBAKE_CACHE", filepath.Join(disktest.Scratch(t), "cache"))
	t.Chdir(c.dir)
	return c
}

// run runs a command line and checks the exit code.
func (c *program) run(code int, args ...string) {
	c.t.Helper()
	c.runIn(c.t.Context(), "", code, args...)
}

func (c *program) runIn(ctx context.Context, stdin string, code int, args ...string) {
	c.t.Helper()
	var out, err bytes.Buffer
	got := run(ctx, args, streams{In: strings.NewReader(stdin), Out: &out, Err: &err})
	c.out, c.err = out.String(), err.String()
	if got != code {
		c.t.Fatalf("edgebake %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), got, code, c.out, c.err)
	}
}

func (c *program) want(where string, parts ...string) {
	c.t.Helper()
	for _, p := range parts {
		if !strings.Contains(where, p) {
			c.t.Errorf("output lacks %q:\n%s", p, where)
		}
	}
}

func (c *program) project(edit func(string) string) {
	c.t.Helper()
	if err := buildtest.Write(c.dir, buildtest.Base(), edit); err != nil {
		c.t.Fatal(err)
	}
}

const site = `apiVersion: edgebake.io/v1alpha1
kind: Site
masters: ["10.0.0.1:6443"]
credentials:
  token: abcdef.0123456789abcdef
caCertHashes: ["sha256:0000000000000000000000000000000000000000000000000000000000000000"]
nodeName: berlin-7
`

func (c *program) file(name, body string) {
	c.t.Helper()
	name = filepath.Join(c.dir, name)
	err := os.MkdirAll(filepath.Dir(name), 0o755)
	if err == nil {
		err = os.WriteFile(name, []byte(body), 0o644)
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

const joinLine = "sudo kubeadm join [fd00:7::11]:6443 --token abcdef.0123456789abcdef \\\n\t--discovery-token-ca-cert-hash=sha256:1123456789abcdef0123456789abcdef0123456789abcdef0123456789ABCDEF"

func TestInterrupted(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c.runIn(ctx, "", 130, "build", "image.yaml")
	c.want(c.err, "interrupted; nothing was left behind")
	for _, f := range []string{"tiny.raw", "tiny.report.json", "image.lock"} {
		if _, err := os.Stat(f); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", f, err)
		}
	}
}

// TestInterruptedPromises checks that only commands that remove their output report that nothing
// was left behind.
func TestInterruptedPromises(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.file("site.yaml", site)
	c.run(0, "build", "image.yaml", "--output", "tiny.raw")
	c.file("stores.yaml", strings.Replace(site, "kind: Site", "kind: Inventory", 1))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c.runIn(ctx, "", exitInterrupted, "stamp", "tiny.raw", "site.yaml", "--output", "new.raw")
	c.want(c.err, "interrupted; nothing was left behind")
	c.runIn(ctx, "", exitInterrupted, "cluster", "listen", "--name", "127.0.0.1", "--listen", "127.0.0.1:0", "--page", "127.0.0.1:0")
	c.want(c.err, "edgebake: interrupted\n")
	c.runIn(ctx, "", exitInterrupted, "boot", "tiny.raw", "--accel", "tcg")
	if c.err != "edgebake: interrupted\n" {
		t.Error(c.err)
	}
	c.file("kubeconfig", "none")
	for _, args := range [][]string{
		{"stamp", "tiny.raw", "stores.yaml", "--each", "--output", "many"},
		{"cluster", "prepare", "--kubeconfig", "kubeconfig"},
		{"cluster", "remove", "n1", "--kubeconfig", "kubeconfig"},
		{"cluster", "token", "revoke", "abcdef", "--kubeconfig", "kubeconfig"},
		{"verify", "tiny.raw"},
	} {
		c.runIn(ctx, "", exitInterrupted, args...)
		c.want(c.err, "interrupted before the command finished")
		if strings.Contains(c.err, "nothing was left behind") || strings.Contains(c.err, "context canceled") {
			t.Errorf("%s: %s", args, c.err)
		}
	}
}

// TestInterruptedBehindTheImage checks an interrupt after the image was written: the message does
// not claim that nothing was left behind.
func TestInterruptedBehindTheImage(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	failed := errors.New("writing image.lock: no space left on device")
	if err := withImage(ctx, "node.raw", failed); err != failed {
		t.Errorf("without an interrupt: %v", err)
	}
	cancel()
	var left unfinished
	if err := withImage(ctx, "node.raw", failed); !errors.As(err, &left) || !strings.Contains(err.Error(), "node.raw was complete: writing image.lock") {
		t.Errorf("%v", err)
	}
}

// TestWouldBeRead checks that a document that would be too large to be read is not written.
func TestWouldBeRead(t *testing.T) {
	if err := checkReadable("stores.csv", documents.MaxSize, 49_000); err != nil {
		t.Error(err)
	}
	const want = "stores.csv: an Inventory of 49000 sites would have 33Mi, but a document has at most 32Mi: split the table"
	if err := checkReadable("stores.csv", documents.MaxSize+1<<20, 49_000); err == nil || !strings.Contains(err.Error(), want) {
		t.Error(err)
	}
}
