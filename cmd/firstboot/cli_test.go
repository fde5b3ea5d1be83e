package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ondisk"
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
		{"help nonsense", exitUsage, "unknown command \"nonsense\""},
		{"run extra", exitUsage, "unexpected argument"},
		{"status --nonsense", exitUsage, "unknown flag"},
		{"reset", exitUsage, "say --yes"},
		{"convert", exitUsage, "--nodepool-name is needed"},
		{"convert --nodepool-name p --node-type local", exitUsage, "unknown node type"},
		{"convert --nodepool-name P_ --lb-mode round-robin", exitUsage, `--nodepool-name: "P_" is not the name of a node pool`},
		{"convert --nodepool-name P_ --lb-mode round-robin", exitUsage, `--lb-mode: "round-robin" is not one of priority, rr`},
		{"convert --nodepool-name p --server-addr http://192.0.2.1:6443,https://192.0.2.2:6443", exitUsage, `server "http://192.0.2.1:6443" is not of the form https://host:port`},
		{"convert --nodepool-name p --yurthub-arg --gc-frequencies=1", exitUsage, "--yurthub-arg[0]: --gc-frequencies is unknown to yurthub"},
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

// TestStatus shows a state as a person and as a program asks for it.
func TestStatus(t *testing.T) {
	root := t.TempDir()
	status := func(args ...string) (string, error) {
		var out bytes.Buffer
		cmd := newStatus(root)
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
		cmd.SetArgs(args)
		err := cmd.Execute()
		return out.String(), err
	}
	if _, err := status(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("before first boot: %v", err)
	}
	want := ondisk.State{
		Version: ondisk.StateVersion, Node: "edge1", NodeType: "native", Result: ondisk.ResultFailed,
		Started: time.Unix(1767225600, 0).UTC(), Updated: time.Unix(1767225700, 0).UTC(),
		Phases: []ondisk.PhaseState{
			{Name: "network", Status: ondisk.PhaseDone, Attempts: 3, Seconds: 4.25},
			{Name: "discovery", Status: ondisk.PhaseFailed, Attempts: 1, Error: "the token is unknown", Fix: "make a new token"},
			{Name: "join", Status: ondisk.PhasePending},
		},
	}
	write := func() {
		b, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(root, ondisk.StateFile)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write()
	text, err := status()
	if err == nil || !strings.Contains(err.Error(), "first boot has failed") {
		t.Errorf("a failure is no error: %v", err)
	}
	const shown = `edgebake first boot
node:    edge1
type:    native
result:  failed
started: 2026-01-01T00:00:00Z
updated: 2026-01-01T00:01:40Z

network          done        4.2 s  3 attempts
discovery        failed  
    error: the token is unknown
    fix: make a new token
join             pending 
`
	if text != shown {
		t.Errorf("it shows\n%s\nnot\n%s", text, shown)
	}
	out, err := status("-o", "json")
	var got ondisk.State
	if jerr := json.Unmarshal([]byte(out), &got); jerr != nil || err == nil || !reflect.DeepEqual(got, want) {
		t.Errorf("as JSON, %v, %v: %s", jerr, err, out)
	}
	if _, err := status("-o", "xml"); !errors.As(err, &usageError{}) {
		t.Errorf("as XML: %v", err)
	}
	want.Result = ondisk.ResultDone
	write()
	if _, err := status(); err != nil {
		t.Errorf("done: %v", err)
	}
}

func TestHelpMigrate(t *testing.T) {
	_, out, _ := call(t, "help", "migrate")
	flat := strings.Join(strings.Fields(out), " ")
	for line := range strings.Lines(out) {
		if len(strings.TrimSpace(line)) > 0 && len(strings.TrimRight(line, "\n")) > 110 {
			t.Errorf("%d letters in a line: %s", len(line), line)
		}
	}
	for _, f := range configs.Flags() {
		if !strings.Contains(out, "  "+f.Flag+" ") || !strings.Contains(flat, strings.Join(strings.Fields(f.Note), " ")) {
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
			t.Errorf("%s %s: unknown command firstboot %s", f.Tool, f.Flag, name)
		}
		found++
	}
	if found == 0 {
		t.Error("the table names no command of firstboot")
	}
}
