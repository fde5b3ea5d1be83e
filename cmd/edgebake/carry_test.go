package main

import (
	"io"
	"log"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
)

// TestPushAndPullCommands carries an image through a registry, signed, and
// names what is wrong on the command line.
func TestPushAndPullCommands(t *testing.T) {
	c := newCLI(t)
	c.project(nil)
	c.file("site.yaml", site)
	c.run(0, "build", "image.yaml", "--output", "tiny.raw.zst")
	r := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer r.Close()
	ref := r.Listener.Addr().String() + "/edge/tiny:1"
	c.run(0, "push", "tiny.raw.zst", ref, "--insecure")
	c.want(c.out, "pushed tiny.raw.zst to "+ref+"@sha256:", " in 1 part, golden ")
	c.run(0, "push", "tiny.raw.zst", ref, "--insecure")
	c.want(c.out, "1 of them there already")
	if err := os.Rename("tiny.raw.zst", "built.raw.zst"); err != nil {
		t.Fatal(err)
	}
	c.run(0, "pull", ref, "--insecure")
	c.want(c.out, "pulled "+ref+"@sha256:", " to tiny.raw.zst: ", "verified, golden ")
	c.run(0, "verify", "tiny.raw.zst")
	c.run(0, "pull", ref, "--insecure", "-o", "tiny.raw")
	c.run(0, "verify", "tiny.raw")
	c.run(0, "stamp", "tiny.raw", "site.yaml", "--output", "shop.raw")
	c.run(1, "push", "shop.raw", ref, "--insecure")
	c.want(c.err, "stamped with the Site berlin-7, which has a join token")
	c.run(1, "pull", ref, "--insecure", "-o", "tiny.raw")
	c.want(c.err, "exists", "--force")
	c.run(1, "pull", ref, "-o", "other.raw")
	c.want(c.err, "add --insecure if plain HTTP is meant")
	for words, args := range map[string][]string{
		"leave \"oci://\" out":  {"pull", "oci://" + ref},
		"has no tag":            {"pull", r.Listener.Addr().String() + "/edge/tiny"},
		"ends in .raw.zst":      {"pull", ref, "-o", "disk.img"},
		"requires an image and": {"push", "tiny.raw"},
	} {
		c.run(2, args...)
		c.want(c.err, words)
	}
}

// TestFleetArguments: the Jobs of docs/fleet.md give commands and flags that
// there are.
func TestFleetArguments(t *testing.T) {
	doc, err := os.ReadFile("../../docs/fleet.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?s)\bargs: \[(.*?)\]`).FindAllStringSubmatch(string(doc), -1)
	if len(found) != 4 {
		t.Fatalf("%d lists of arguments", len(found))
	}
	for _, m := range found {
		var args []string
		for arg := range strings.SplitSeq(m[1], ",") {
			args = append(args, strings.Trim(strings.TrimSpace(arg), `"`))
		}
		c, rest, err := newRoot(streams{In: strings.NewReader(""), Out: io.Discard, Err: io.Discard}).Find(args)
		if err == nil {
			if err = c.ParseFlags(rest); err == nil {
				err = c.ValidateArgs(c.Flags().Args())
			}
		}
		if err != nil || c.Parent() == nil {
			t.Errorf("%v: %v", args, err)
		}
	}
	for _, name := range regexp.MustCompile(`EDGEBAKE_[A-Z_]+`).FindAllString(string(doc), -1) {
		if name != passwordVariable && name != "EDGEBAKE_TOKEN" {
			t.Errorf("%s is not a variable of ours", name)
		}
	}
}
