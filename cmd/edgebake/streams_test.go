package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/media"
	"github.com/edgebake/edgebake/cmd/internal/console"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestInterruptedWhileWaiting checks that Ctrl-C ends a command that waits for standard input.
func TestInterruptedWhileWaiting(t *testing.T) {
	newCLI(t)
	for _, args := range [][]string{{"validate", "-"}, {"init", "--join", "-"}, {"inventory", "import", "-", "--template", "site.yaml"}} {
		ctx, cancel := context.WithCancel(t.Context())
		silent, writer := io.Pipe()
		time.AfterFunc(50*time.Millisecond, cancel)
		var said bytes.Buffer
		if code := run(ctx, args, streams{In: silent, Out: io.Discard, Err: &said}); code != exitInterrupted {
			t.Errorf("%s: exit code %d: %s", args, code, &said)
		}
		writer.Close()
	}
}

// TestOneMeaningOfOutput checks that -o is either a path, for which completion offers files with
// the right extension or directories, or a format, for which it offers text, json and yaml.
func TestOneMeaningOfOutput(t *testing.T) {
	var visit func(c *cobra.Command)
	seen := map[string][]string{}
	visit = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			visit(sub)
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if (f.Shorthand == "o") != (f.Name == "output") {
				t.Errorf("%s: -o is --%s, --%s is -%s", c.CommandPath(), f.Name, f.Name, f.Shorthand)
			}
		})
		f := c.Flags().Lookup("output")
		if f == nil {
			return
		}
		if complete, ok := c.GetFlagCompletionFunc("output"); ok && strings.HasPrefix(f.Usage, "format of the output") {
			offered, directive := complete(c, nil, "")
			if !slices.Equal(offered, []string{"text", "json", "yaml"}) || directive != cobra.ShellCompDirectiveNoFileComp {
				t.Errorf("%s: -o offers %q", c.CommandPath(), offered)
			}
			seen["form"] = append(seen["form"], c.Name())
			return
		}
		_, files := f.Annotations[cobra.BashCompFilenameExt]
		_, dirs := f.Annotations[cobra.BashCompSubdirsInDir]
		if !files && !dirs {
			t.Errorf("%s: -o completes to nothing", c.CommandPath())
		}
		seen["place"] = append(seen["place"], c.Name())
	}
	visit(newRoot(streams{In: strings.NewReader(""), Out: io.Discard, Err: io.Discard}))
	if len(seen["form"]) < 8 || len(seen["place"]) < 6 {
		t.Errorf("too few commands were seen: %q", seen)
	}
}

// TestUntrustedText checks that control characters in the report next to an image, which is not
// trusted, are not printed.
func TestUntrustedText(t *testing.T) {
	image := filepath.Join(t.TempDir(), "a.raw")
	if err := os.WriteFile(strings.TrimSuffix(image, ".raw")+".report.json", []byte(`{"plan":"\u001b]0;x\u0007\u009b2J"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	s := streams{Out: &out, Err: &errOut}.Printable(&console.Results{Writer: &out})
	info := &media.Info{}
	info.Image.Plan = "sha256:0"
	warnOfReport(s, image, info)
	fmt.Fprintf(s.Out, "Linux %s\n", "\x1b[2J6.12")
	if text := out.String() + errOut.String(); strings.ContainsAny(text, "\x1b\a\u009b") || !strings.Contains(text, "6.12") || !strings.Contains(text, "WARNING") {
		t.Errorf("%q", text)
	}
	if _, err := s.Bytes().Write([]byte("\x1b")); err != nil || !strings.HasSuffix(out.String(), "\x1b") {
		t.Errorf("a file's contents are changed: %q %v", out.String(), err)
	}
}
