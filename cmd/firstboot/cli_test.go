package main

import (
	"bytes"
	"os"
	"regexp"
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
