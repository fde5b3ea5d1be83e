// Package scripttest runs script tests of a command: archives in testdata/script in testscript's
// language, whose files can be terminal sessions. For tests only.
package scripttest

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/disktest"
)

var update = flag.Bool("update", false, "write what the commands print now into the scripts")

// Dropped is a key of testscript.Env.Values. Its value is a *regexp.Regexp for text that is omitted
// from sessions.
const Dropped = "dropped"

// Command is a command that scripts can use.
type Command = func(ts *testscript.TestScript, neg bool, args []string)

// Run runs the scripts in testdata/script. The scripts have testscript's own commands, those in
// commands, and these:
//
//	session FILE            run the lines of FILE that begin with $ in a shell, and print
//	                        the terminal's content; `cmp stdout FILE` compares it
//	json FILE [PATH WANT]…  check that each document in FILE is JSON, and that the last one
//	                        has these values at these paths, such as slot.state
//	need PROGRAM PACKAGE    if PROGRAM is missing, skip the test on a developer's computer, and
//	                        fail it in CI
//	namespaces              the same, if user and mount namespaces are not available
func Run(t *testing.T, setup func(*testscript.Env) error, commands map[string]Command) {
	t.Setenv("GOTMPDIR", disktest.Scratch(t)) // testscript makes its directories there
	all := map[string]Command{
		"session": session,
		"json":    isJSON,
		"need": func(ts *testscript.TestScript, _ bool, args []string) {
			if _, err := exec.LookPath(args[0]); err != nil {
				desk.Lacks(tb(ts), "there is no %s (package %s)", args[0], args[1])
			}
		},
		"namespaces": func(ts *testscript.TestScript, _ bool, args []string) {
			if out, err := exec.Command("unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt").CombinedOutput(); err != nil {
				desk.Lacks(tb(ts), "this computer does not allow user namespaces: %v\n%s", err, out)
			}
		},
	}
	for name, c := range commands {
		all[name] = c
	}
	scripts, err := filepath.Glob(filepath.Join("testdata", "script", "*.txtar"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range scripts {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range sessions.FindAllStringSubmatch(string(text), -1) {
			if !strings.Contains(string(text), m[0]+"cmp stdout "+m[1]+"\n") {
				t.Errorf("%s: nothing compares session %s", name, m[1])
			}
		}
	}
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", "script"),
		Setup: func(e *testscript.Env) error {
			e.Values["tb"] = e.T()
			e.Setenv("LC_ALL", "C")
			if setup == nil {
				return nil
			}
			return setup(e)
		},
		Cmds:               all,
		UpdateScripts:      *update,
		RequireUniqueNames: true,
	})
}

func tb(ts *testscript.TestScript) testing.TB { return ts.Value("tb").(testing.TB) }

// session runs the commands of a session as in a terminal. It prints both streams together, and
// exit codes other than 0 in brackets.
func session(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: session FILE")
	}
	var shown strings.Builder
	for line := range strings.Lines(ts.ReadFile(args[0])) {
		typed, ok := strings.CutPrefix(line, "$ ")
		if !ok {
			continue
		}
		err := ts.Exec("sh", "-c", "exec 2>&1\n"+typed)
		said := ts.ReadFile("stdout")
		if said != "" && !strings.HasSuffix(said, "\n") {
			said += "\n"
		}
		shown.WriteString("$ " + typed + steady(ts, said))
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			fmt.Fprintf(&shown, "[exit %d]\n", exit.ExitCode())
		} else {
			ts.Check(err)
		}
	}
	fmt.Fprint(ts.Stdout(), shown.String())
}

// isJSON checks that documents are JSON, and checks values in the last one.
func isJSON(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args)%2 != 1 {
		ts.Fatalf("usage: json FILE [PATH WANT]...")
	}
	var doc any
	d := json.NewDecoder(strings.NewReader(ts.ReadFile(args[0])))
	d.UseNumber()
	err := d.Decode(&doc)
	for err == nil && d.More() {
		doc = nil
		err = d.Decode(&doc)
	}
	ts.Check(err)
	for check := range slices.Chunk(args[1:], 2) {
		if got := fmt.Sprint(at(doc, check[0])); got != check[1] {
			ts.Fatalf("%s is %q, want %q", check[0], got, check[1])
		}
	}
}

// at returns the value at a path, which consists of names, indices and "length".
func at(v any, path string) any {
	for part := range strings.SplitSeq(path, ".") {
		switch x := v.(type) {
		case map[string]any:
			v = x[part]
		case []any:
			i, err := strconv.Atoi(part)
			switch {
			case part == "length":
				v = len(x)
			case err == nil && i < len(x):
				v = x[i]
			default:
				v = nil
			}
		default:
			v = nil
		}
	}
	return v
}

var (
	sessions = regexp.MustCompile(`(?m)^session (\S+)\n`)

	digests = regexp.MustCompile(`\b[0-9a-f]{64}\b`)
	plans   = regexp.MustCompile(`\b(plan|golden|the image's is) [0-9a-f]{12}(?:[0-9a-f]{4})?\b`)
	guids   = regexp.MustCompile(`(?i)\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b`)
	ports   = regexp.MustCompile(`\b127\.0\.0\.1:[1-9]\d{4}\b`)
	moments = regexp.MustCompile(`\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`)
)

// steady replaces text that differs between runs, such as paths, by names.
func steady(ts *testscript.TestScript, said string) string {
	bin, _, _ := strings.Cut(os.Getenv("PATH"), string(os.PathListSeparator)) // testscript's directory with the commands
	said = strings.NewReplacer(ts.Getenv("WORK"), "$WORK", bin, "$BIN").Replace(said)
	if drop, ok := ts.Value(Dropped).(*regexp.Regexp); ok {
		said = drop.ReplaceAllString(said, "")
	}
	said = digests.ReplaceAllString(said, "DIGEST")
	said = plans.ReplaceAllString(said, "$1 ID")
	said = guids.ReplaceAllString(said, "GUID")
	said = ports.ReplaceAllString(said, "127.0.0.1:PORT")
	return moments.ReplaceAllStringFunc(said, func(s string) string {
		if at, err := time.Parse(time.RFC3339, s); err == nil && time.Since(at).Abs() < 60*24*time.Hour {
			return "TIME"
		}
		return s
	})
}
