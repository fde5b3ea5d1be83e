package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs"
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
	for _, f := range configs.Flags() {
		if !strings.Contains(out, "  "+f.Flag+" ") || !strings.Contains(out, f.Note) {
			t.Errorf("help migrate does not show %s %s", f.Tool, f.Flag)
		}
	}
}

// TestMigrationNamesOurCommands: what the table says of firstboot exists.
func TestMigrationNamesOurCommands(t *testing.T) {
	root := newRoot(&bytes.Buffer{}, &bytes.Buffer{})
	found := 0
	for _, f := range configs.Flags() {
		_, rest, ok := strings.Cut(f.Note, "`firstboot ")
		if !ok {
			continue
		}
		name, _, _ := strings.Cut(rest, "`")
		if cmd, _, err := root.Find([]string{name}); err != nil || cmd == root {
			t.Errorf("%s %s: there is no command firstboot %s", f.Tool, f.Flag, name)
		}
		found++
	}
	if found == 0 {
		t.Error("the table names no command of firstboot")
	}
}
