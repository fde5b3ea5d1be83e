package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/configs/ondisk"
	"github.com/edgebake/edgebake/firstboot"
	"github.com/edgebake/edgebake/firstboot/host"
)

func call(t *testing.T, args ...string) (code int, out, errOut string) {
	t.Helper()
	return callOn(t.Context(), machine{}, args...)
}

func callOn(ctx context.Context, m machine, args ...string) (code int, out, errOut string) {
	var o, e bytes.Buffer
	code = run(ctx, m, args, &o, &e)
	return code, o.String(), e.String()
}

// aMachine is one whose disk is below a directory, with nothing that runs.
// console gets what a person in front of it reads.
func aMachine(t *testing.T, console *[]string) (m machine, root string) {
	t.Helper()
	root = t.TempDir()
	f := host.Files{Root: root}
	env := &firstboot.Env{
		Root:   root,
		Log:    slog.New(slog.DiscardHandler),
		Clock:  firstboot.Clock{Now: time.Now, Sleep: host.Sleep},
		Chance: firstboot.Chance{Rand: func() float64 { return 0 }, Random: func(n int) []byte { return make([]byte, n) }},
		Files: firstboot.Files{
			WriteFile: f.WriteFile,
			Mkdir:     f.Mkdir,
			Remove:    f.Remove,
			RemoveAll: f.RemoveAll,
			Sync:      f.Sync,
			Lock:      f.Lock,
		},
		Programs: firstboot.Programs{
			Run:       func(context.Context, firstboot.Cmd) error { return nil },
			Unit:      func(context.Context, string, string) error { return nil },
			UnitState: func(context.Context, string) (string, error) { return "inactive", nil },
			BootClock: func(context.Context) (ondisk.BootClock, error) { return ondisk.BootClock{}, errors.New("no systemd") },
		},
		Audience: firstboot.Audience{
			Console: func(line string) { *console = append(*console, line) },
			Notify:  func(string) {},
		},
	}
	if err := os.MkdirAll(filepath.Join(root, "run"), 0o755); err != nil {
		t.Fatal(err)
	}
	return machine{
		env: func(io.Writer) *firstboot.Env { return env }, root: true,
		boot: func(context.Context) string { return "up for 1.0 s" }, insist: func() {},
	}, root
}

func put(t *testing.T, root, path, text string) {
	t.Helper()
	p := filepath.Join(root, path)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestNeedsRoot(t *testing.T) {
	for _, args := range []string{"run", "certificates", "snapshot", "convert --nodepool-name p", "revert", "reset --yes"} {
		if code, _, errOut := call(t, strings.Fields(args)...); code != exitFailed || !strings.Contains(errOut, " needs root: it ") {
			t.Errorf("%s: %d, %s", args, code, errOut)
		}
	}
}

func TestRun(t *testing.T) {
	var console []string
	m, root := aMachine(t, &console)
	if code, _, errOut := callOn(t.Context(), m, "run"); code != exitFailed || !strings.Contains(errOut, "nothing was changed") {
		t.Errorf("on a machine of another kind: %d, %s", code, errOut)
	}
	put(t, root, ondisk.ImageInfoFile, "{")
	ctx, stop := context.WithCancel(t.Context())
	env := m.env(nil)
	say := env.Console
	env.Console = func(line string) {
		say(line)
		if strings.HasPrefix(line, "    to fix: ") {
			stop() // from now on it only looks for another site
		}
	}
	code, _, errOut := callOn(ctx, m, "run")
	if said := strings.Join(console, "\n"); code != exitOK || !strings.Contains(said, "up for 1.0 s") || !strings.Contains(said, "FAILED image: ") || !strings.Contains(said, "flash the machine again") {
		t.Errorf("stopped by systemd: %d, %s\n%s", code, errOut, said)
	}
}

func TestChanges(t *testing.T) {
	var console []string
	m, root := aMachine(t, &console)
	for _, tc := range []struct{ args, words string }{
		{"convert --nodepool-name p", "only a node that kubeadm joined can be converted or reverted"},
		{"revert", "only a node that kubeadm joined can be converted or reverted"},
	} {
		if code, _, errOut := callOn(t.Context(), m, strings.Fields(tc.args)...); code != exitFailed || !strings.Contains(errOut, tc.words) {
			t.Errorf("%s: %d, %s", tc.args, code, errOut)
		}
	}
	code, out, errOut := callOn(t.Context(), m, "reset", "--yes")
	if code != exitOK || !strings.Contains(out, "files            done") || !strings.Contains(out, "This machine is not in a cluster.") || !strings.Contains(out, "To join again") {
		t.Errorf("reset: %d, %s, %s", code, errOut, out)
	}
	put(t, root, "/etc/kubernetes/manifests/kube-apiserver.yaml", "")
	for _, args := range []string{"convert --nodepool-name p", "revert", "reset --yes"} {
		if code, _, errOut := callOn(t.Context(), m, strings.Fields(args)...); code != exitFailed || !strings.Contains(errOut, "this machine runs a control plane") {
			t.Errorf("%s of a master: %d, %s", args, code, errOut)
		}
	}
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
		{"reset", exitUsage, "confirm with --yes"},
		{"convert", exitUsage, "--nodepool-name is required"},
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
	m, root := aMachine(t, new([]string))
	status := func(args ...string) (string, error) {
		var out bytes.Buffer
		cmd := newStatus(m, &out)
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

// TestMigrationNamesOurCommands: what docs/migrate.md says of firstboot exists.
func TestMigrationNamesOurCommands(t *testing.T) {
	page, err := os.ReadFile("../../docs/migrate.md")
	if err != nil {
		t.Fatal(err)
	}
	root := newRoot(machine{}, &bytes.Buffer{}, &bytes.Buffer{})
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

// TestStatusOfAStranger: what a stick said is not obeyed by the terminal, from wherever
// the state has it.
func TestStatusOfAStranger(t *testing.T) {
	m, root := aMachine(t, new([]string))
	const evil = "\x1b]0;owned\a\x1b[2J\u009b2Jready"
	b, err := json.Marshal(ondisk.State{Version: ondisk.StateVersion, Node: evil, Result: ondisk.ResultRunning, Notes: []string{evil},
		Phases: []ondisk.PhaseState{{Name: "join", Status: ondisk.PhaseWaiting, Error: evil, Fix: evil}}})
	if err != nil {
		t.Fatal(err)
	}
	put(t, root, ondisk.StateFile, string(b))
	for _, args := range [][]string{{"status"}, {"status", evil}, {evil}} {
		_, out, errOut := callOn(t.Context(), m, args...)
		if strings.ContainsAny(out+errOut, "\x1b\a\u009b") || !strings.Contains(out+errOut, "ready") {
			t.Errorf("%q: %q %q", args, out, errOut)
		}
	}
}
