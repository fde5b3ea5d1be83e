package main

import (
	"archive/tar"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/spf13/cobra"
)

// examples calls do for each line of each command's examples, split into words.
func examples(t *testing.T, do func(path string, words []string)) {
	var visit func(*cobra.Command)
	visit = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			visit(sub)
		}
		if c.Name() == "help" || c.Name() == "completion" || c.Parent() != nil && c.Parent().Name() == "completion" {
			return
		}
		if strings.TrimSpace(c.Example) == "" {
			t.Errorf("%s has no example", c.CommandPath())
		}
		for line := range strings.Lines(c.Example) {
			line, _, _ = strings.Cut(line, "#")
			words := strings.Fields(strings.ReplaceAll(line, `"`, ""))
			if len(words) == 0 {
				continue
			}
			if words[0] != "edgebake" {
				t.Errorf("%s: example %q", c.CommandPath(), line)
				continue
			}
			do(c.CommandPath(), words[1:])
		}
	}
	visit(newRoot(streams{In: strings.NewReader(""), Out: io.Discard, Err: io.Discard}))
}

// debianOf installs a fake mmdebstrap that makes this base. It counts its runs in base.made.
func debianOf(t *testing.T, base string) {
	t.Helper()
	bin := t.TempDir()
	for tool, script := range map[string]string{"mmdebstrap": "#!/bin/sh\necho >>'" + base + ".made'\nexec cat '" + base + "'\n", "newuidmap": "#!/bin/sh\n", "apt-get": "#!/bin/sh\n"} {
		desk.WriteProgram(t, filepath.Join(bin, tool), script)
	}
	t.Setenv("PATH", bin+string(os.PathListSeparator)+os.Getenv("PATH"))
}

// TestInitBuilds builds the documents of init on a base from a fake mmdebstrap. Their only edit:
// programs are files, so that nothing is compiled.
func TestInitBuilds(t *testing.T) {
	c := newCLI(t)
	base := append(buildtest.Base(), buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "./etc/motd", Mode: 0o644}, Body: "Debian\n"})
	if err := buildtest.Write(c.dir, base, nil); err != nil {
		t.Fatal(err)
	}
	debianOf(t, filepath.Join(c.dir, "base.tar"))
	c.file("id.pub", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE0Y2vFLE7fQ2HHmGEUQGTqWn4Ri9GJMn1T9AeeQkMi+ me\n")
	c.run(0, "init", "--force", "--ssh-key", "id.pub", "--join", joinLine)
	doc, err := os.ReadFile("image.yaml")
	if err != nil {
		t.Fatal(err)
	}
	const compiled = "goModule: {}"
	if !strings.Contains(string(doc), compiled) {
		t.Fatalf("nothing is compiled:\n%s", doc)
	}
	c.file("image.yaml", strings.ReplaceAll(string(doc), compiled, "file: {dir: programs}")+
		"agents: {firstboot: programs/firstboot, ipvscare: programs/ipvscare}\n")
	c.run(0, "validate", "image.yaml", "site.yaml")
	c.run(0, "build", "image.yaml")
	c.want(c.err, "images: WARNING: the image contains no container images", "name the pause image in containerd.sandbox")
	c.run(0, "stamp", "my-edge.raw", "site.yaml", "--in-place")
	c.run(0, "inspect", "my-edge.raw")
	c.want(c.out, "slot        site")
	// --export-base exports the base that this build made; it does not make another one.
	c.run(0, "build", "image.yaml", "--update", "--force", "--export-base", "kept.tar")
	if made, err := os.ReadFile("base.tar.made"); err != nil || len(made) != 2 {
		t.Errorf("two builds made %d bases, %v", len(made), err)
	}
	c.run(0, "build", "image.yaml", "--locked", "--base", "kept.tar", "--output", "again.raw")
}

// TestExamples checks that every example of --help is a line of testdata/script/examples.txtar,
// which runs it. Examples that boot a machine, listen or use a running cluster are only parsed.
func TestExamples(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "script", "examples.txtar"))
	if err != nil {
		t.Fatal(err)
	}
	there := strings.NewReplacer("registry.example.com", "$REGISTRY", "/dev/sdX", "disk", "/dev/disk/by-id/usb-SanDisk_Ultra-0:0", "disk")
	var lines []string
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		lines = append(lines, strings.Join(strings.Fields(strings.ReplaceAll(line, "'", "")), " "))
	}
	examples(t, func(path string, words []string) {
		target, rest, err := newRoot(streams{}).Find(words)
		if err != nil || !strings.HasPrefix(target.CommandPath(), path) {
			t.Errorf("%s: example %q: %v", path, words, err)
			return
		}
		if target.Name() == "boot" || target.Name() == "listen" || target.Flag("kubeconfig") != nil {
			if i := slices.Index(rest, ">"); i >= 0 {
				rest = rest[:i]
			}
			if err := target.ParseFlags(rest); err != nil {
				t.Errorf("%s: example %q: %v", path, words, err)
			} else if err := target.ValidateArgs(target.Flags().Args()); err != nil {
				t.Errorf("%s: example %q: %v", path, words, err)
			}
			return
		}
		// In the script there is no terminal, a file replaces the disk, and the registry has no
		// certificate.
		want := there.Replace("edgebake " + strings.Join(words, " "))
		if !slices.ContainsFunc(lines, func(line string) bool {
			return line == want || slices.Contains([]string{" --yes", " --insecure", " --in-place"}, strings.TrimPrefix(line, want))
		}) {
			t.Errorf("%s: the example is not in examples.txtar:\n%s", path, want)
		}
	})
}

// TestMigrationNamesOurCommands checks that the edgebake commands in docs/migrate.md exist.
func TestMigrationNamesOurCommands(t *testing.T) {
	page, err := os.ReadFile("../../docs/migrate.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, m := range regexp.MustCompile("`edgebake ([a-z -]+)`").FindAllStringSubmatch(string(page), -1) {
		found++
		words := strings.Fields(m[1])
		c, rest, err := newRoot(streams{}).Find(words)
		if err != nil || strings.Join(append(strings.Fields(c.CommandPath())[1:], rest...), " ") != strings.Join(words, " ") {
			t.Errorf("there is no `edgebake %s` (%v)", m[1], err)
			continue
		}
		for _, flag := range rest {
			if name := strings.TrimPrefix(flag, "--"); name == flag || c.Flags().Lookup(name) == nil {
				t.Errorf("`edgebake %s` has no %s", m[1], flag)
			}
		}
	}
	if found < 5 {
		t.Errorf("docs/migrate.md names only %d commands of edgebake", found)
	}
}
