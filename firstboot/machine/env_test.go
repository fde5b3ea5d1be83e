package machine

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestContentsReportsErrors checks that a file that cannot be read is reported, unlike a missing
// one and attributes of the kernel.
func TestContentsReportsErrors(t *testing.T) {
	root := t.TempDir()
	for _, p := range []string{"/var/state", "/sys/state"} { // a directory cannot be read
		if err := os.MkdirAll(filepath.Join(root, p), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for path, reported := range map[string]bool{"/var/state": true, "/sys/state": false, "/var/missing": false} {
		var log bytes.Buffer
		var notes []string
		e := &Env{Root: root, Log: slog.New(slog.NewTextHandler(&log, nil))}
		if b := e.Contents(path); b != nil || strings.Contains(log.String(), path) != reported {
			t.Errorf("%s: %q, log: %s", path, b, log.String())
		}
		log.Reset()
		e.OnNote = func(what string) { notes = append(notes, what) }
		if e.Contents(path); strings.Contains(strings.Join(notes, "\n"), path) != reported || log.Len() > 0 {
			t.Errorf("%s: notes %q, log: %s", path, notes, log.String())
		}
	}
}
