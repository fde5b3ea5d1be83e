package main

import (
	"bytes"
	"os"
	"regexp"
	"runtime/debug"
	"testing"
)

// TestMigrationNamesOurCommands checks that the firstboot commands in docs/migrate.md exist.
func TestMigrationNamesOurCommands(t *testing.T) {
	page, err := os.ReadFile("../../docs/migrate.md")
	if err != nil {
		t.Fatal(err)
	}
	root := newRoot(target{}, &bytes.Buffer{}, &bytes.Buffer{})
	found := regexp.MustCompile("`firstboot ([a-z]+)`").FindAllStringSubmatch(string(page), -1)
	for _, m := range found {
		if cmd, _, err := root.Find(m[1:]); err != nil || cmd == root {
			t.Errorf("unknown command firstboot %s", m[1])
		}
	}
	if len(found) == 0 {
		t.Error("the page names no command of firstboot")
	}
}

// TestMemoryOfAnUpdate checks that firstboot update collects garbage more often, unless GOGC is set.
func TestMemoryOfAnUpdate(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	for gogc, want := range map[string]int{"": 50, "200": 100} {
		t.Setenv("GOGC", gogc)
		debug.SetGCPercent(100)
		if code := execute(t.Context(), target{}, []string{"update", "x.raw.zst"}, &bytes.Buffer{}, &bytes.Buffer{}); code != 1 {
			t.Errorf("exit code %d", code)
		}
		if got := debug.SetGCPercent(100); got != want {
			t.Errorf("GOGC=%s: %d, want %d", gogc, got, want)
		}
	}
}
