package main

import (
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/signing"
)

// TestFleetArguments checks that the Jobs of docs/fleet.md use only commands, flags and environment
// variables that exist.
func TestFleetArguments(t *testing.T) {
	doc, err := os.ReadFile("../../docs/fleet.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`(?s)\bargs: \[(.*?)\]`).FindAllStringSubmatch(string(doc), -1)
	if len(found) != 4 {
		t.Fatalf("docs/fleet.md has %d lists of arguments, want 4", len(found))
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
		if name != signing.PasswordVariable && name != "EDGEBAKE_TOKEN" {
			t.Errorf("docs/fleet.md uses the unknown variable %s", name)
		}
	}
}
