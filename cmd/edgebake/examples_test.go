package main

import (
	"archive/tar"
	"bytes"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	agekeys "filippo.io/age"

	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/spf13/cobra"
)

// examples calls do with each line of each command's examples, in words.
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

// debianOf has mmdebstrap make this base, and count how often in base.made.
func debianOf(t *testing.T, base string) {
	t.Helper()
	bin := t.TempDir()
	for tool, script := range map[string]string{"mmdebstrap": "#!/bin/sh\necho >>'" + base + ".made'\nexec cat '" + base + "'\n", "newuidmap": "#!/bin/sh\n", "apt-get": "#!/bin/sh\n"} {
		if err := os.WriteFile(filepath.Join(bin, tool), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+string(os.PathListSeparator)+os.Getenv("PATH"))
}

// TestInitBuilds is a newcomer's first build: what init writes, as it is, on a
// base that has what Debian's has. Only the compiler is left out.
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
	c.want(c.err, "images: WARNING: containerd.sandbox names no pause image", "and name it there")
	c.run(0, "stamp", "my-edge.raw", "site.yaml")
	c.run(0, "inspect", "my-edge.raw")
	c.want(c.out, "slot        site")
	// What is exported is the base in the image, not one more.
	c.run(0, "build", "image.yaml", "--update", "--force", "--export-base", "kept.tar")
	if made, err := os.ReadFile("base.tar.made"); err != nil || len(made) != 2 {
		t.Errorf("two builds made %d bases, %v", len(made), err)
	}
	c.run(0, "build", "image.yaml", "--locked", "--base", "kept.tar", "--output", "again.raw")
}

// TestExamples carries every example out, each in a directory that has what it
// names: an example that does not work is worse than none. Only machines
// are not booted here and living clusters not asked; test/e2e and test/cluster
// do that.
func TestExamples(t *testing.T) {
	cluster, err := os.ReadFile("../../configs/examples/cluster.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c := newCLI(t)
	const name = "my-edge"
	err = buildtest.Write(c.dir, buildtest.InstallableBase(), func(s string) string {
		s = strings.Replace(s, "name: tiny", "name: "+name, 1)
		return strings.Replace(s, "  tar:\n    file: base.tar\n", "  debian: {suite: trixie}\n", 1)
	})
	if err != nil {
		t.Fatal(err)
	}
	c.file("site.yaml", site)
	c.program("installer")
	c.file("office.key", plainKey)
	c.file("office.pub", publicKey+"\n")
	server := httptest.NewTLSServer(nil)
	c.file("ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	server.Close()
	c.file("cluster.yaml", string(cluster))
	id, err := agekeys.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	c.file("key.txt", id.String()+"\n")
	c.file("team.pub", id.Recipient().String()+"\n")
	c.run(0, "cluster", "new", "cluster.yaml", "--output", "shops")
	debianOf(t, filepath.Join(c.dir, "base.tar"))
	c.run(0, "build", "image.yaml")
	c.run(0, "build", "image.yaml", "--locked", "--output", name+".raw.zst", "--sign", "office.key", "--force")
	c.run(0, "stamp", name+".raw", "site.yaml", "--output", "other.raw")
	c.file("report.json", `{"version": 1, "node": "berlin-7", "result": "done"}`)
	for _, file := range []string{"inventory.yaml", "stores.yaml"} {
		c.file(file, strings.Replace(inventory, "name: berlin,", "name: berlin-7,", 1))
	}
	c.run(0, "stamp", name+".raw", "inventory.yaml", "--slots", "--output", "out/")

	// The examples' registry.
	registry := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer registry.Close()
	const example = "registry.example.com"
	c.file("ci.json", `{"auths":{}}`)
	c.run(0, "push", name+".raw.zst", registry.Listener.Addr().String()+"/edge/my-edge:2026.11", "--insecure")

	done := 0
	examples(t, func(path string, words []string) {
		if slices.Contains([]string{"push", "pull"}, words[0]) {
			words = append(words, "--insecure")
			for i := range words {
				words[i] = strings.Replace(words[i], example, registry.Listener.Addr().String(), 1)
			}
		}
		target, rest, err := newRoot(streams{}).Find(words)
		if err != nil || !strings.HasPrefix(target.CommandPath(), path) {
			t.Errorf("%s: example %q: %v", path, words, err)
			return
		}
		// What listens does so until it is stopped.
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
		line := strings.Join(words, " ")
		here := t.TempDir()
		if words[0] != "init" {
			if said, err := exec.Command("cp", "-a", "--sparse=always", c.dir+"/.", here).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, said)
			}
		}
		if strings.Contains(line, "--arch") {
			writeSeveral(t, here, nil)
		}
		// What an example makes is not there before.
		gone := []string{}
		if words[0] == "build" {
			gone = append(gone, name+".raw", name+".raw.zst")
		}
		if strings.Contains(line, "--export-base base.tar") {
			gone = append(gone, "base.tar")
		}
		if strings.HasPrefix(line, "cluster sites") || strings.HasPrefix(line, "inventory import") {
			gone = append(gone, "inventory.yaml")
		}
		if words[0] == "pull" {
			gone = append(gone, name+".raw", name+".raw.zst")
		}
		if strings.Contains(line, "--output out/") {
			gone = append(gone, "out")
		}
		table := "name,serial\nberlin-7,SN1\n"
		if strings.Contains(line, "S/N=") {
			table = "name,S/N,Manager\nberlin-7,SN1,Anna\n"
		}
		if err := os.WriteFile(filepath.Join(here, "stores.csv"), []byte(table), 0o600); err != nil {
			t.Fatal(err)
		}
		words = onFile(t, words, filepath.Join(here, "disk"), filepath.Join(here, name+".raw"))
		for _, f := range gone {
			if err := os.RemoveAll(filepath.Join(here, f)); err != nil {
				t.Fatal(err)
			}
		}
		t.Chdir(here)
		var out, said bytes.Buffer
		in := ""
		if strings.HasPrefix(line, "init --join -") {
			in = joinLine
		}
		if code := run(t.Context(), words, streams{In: strings.NewReader(in), Out: &out, Err: &said}); code != 0 {
			t.Errorf("%s: example %q ends with %d\n%s%s", path, line, code, out.String(), said.String())
		}
		t.Chdir(c.dir)
		if err := os.RemoveAll(here); err != nil {
			t.Fatal(err)
		}
		done++
	})
	if done < 20 {
		t.Errorf("only %d examples", done)
	}
}

// onFile has an example work on a file instead of a disk: one that was flashed,
// for stamp. Nobody is there to ask.
func onFile(t *testing.T, words []string, disk, image string) []string {
	t.Helper()
	i := slices.IndexFunc(words, func(w string) bool { return strings.HasPrefix(w, "/dev/") })
	if i < 0 {
		return words
	}
	words = slices.Clone(words)
	words[i] = disk
	if words[0] == "stamp" {
		if err := os.Link(image, disk); err != nil {
			t.Fatal(err)
		}
		return words
	}
	words = append(words, "--yes")
	if err := errors.Join(os.WriteFile(disk, nil, 0o600), os.Truncate(disk, 8<<30)); err != nil {
		t.Fatal(err)
	}
	return words
}

// TestMigrationNamesOurCommands: what docs/migrate.md says of edgebake exists.
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
		t.Errorf("the table names %d commands of edgebake", found)
	}
}
