package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/firstboot"
)

func call(t *testing.T, args ...string) (code int, out, errOut string) {
	t.Helper()
	var o, e bytes.Buffer
	code = run(t.Context(), args, &o, &e)
	return code, o.String(), e.String()
}

func TestUsage(t *testing.T) {
	for _, tc := range []struct {
		args  string
		code  int
		words string
	}{
		{"nonsense", exitUsage, "unknown command"},
		{"run extra", exitUsage, "unexpected argument"},
		{"status --nonsense", exitUsage, "unknown flag"},
		{"reset", exitUsage, "say --yes"},
		{"convert", exitUsage, "--nodepool-name is needed"},
		{"convert --nodepool-name p --node-type local", exitUsage, "unknown node type"},
	} {
		code, _, errOut := call(t, strings.Fields(tc.args)...)
		if code != tc.code || !strings.Contains(errOut, tc.words) {
			t.Errorf("firstboot %s: %d, %s", tc.args, code, errOut)
		}
	}
	if code, out, _ := call(t, "version"); code != exitOK || !strings.HasPrefix(out, "firstboot ") {
		t.Errorf("version: %d, %s", code, out)
	}
}

func TestHelpMigrate(t *testing.T) {
	_, out, _ := call(t, "help", "migrate")
	if !strings.Contains(out, strings.TrimSpace(firstboot.MigrationText())) {
		t.Errorf("help migrate says:\n%s", out)
	}
}

// TestMigrationNamesOurFlags: what the table says of firstboot exists.
func TestMigrationNamesOurFlags(t *testing.T) {
	root := newRoot(&bytes.Buffer{}, &bytes.Buffer{})
	found := 0
	for line := range strings.Lines(firstboot.MigrationText()) {
		_, rest, ok := strings.Cut(line, " firstboot ")
		if !ok || !strings.HasPrefix(strings.TrimSpace(line), "--") {
			continue
		}
		words := strings.Fields(rest)
		cmd, _, err := root.Find(words[:1])
		if err != nil || cmd == root {
			t.Errorf("there is no command %q", words[0])
			continue
		}
		if cmd.Flags().Lookup(strings.TrimPrefix(words[1], "--")) == nil {
			t.Errorf("firstboot %s has no flag %s", words[0], words[1])
		}
		found++
	}
	if found == 0 {
		t.Error("the table names no flag of firstboot")
	}
}
