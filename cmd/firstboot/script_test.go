package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/edgebake/edgebake/firstboot/host"
	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
	"github.com/edgebake/edgebake/test/scripttest"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"firstboot": func() {
		ctx, stop := context.WithCancel(context.Background())
		os.Exit(execute(ctx, aMachine(os.Getenv("MACHINE"), os.Getenv("MACHINE_USER") != "nobody", stop), os.Args[1:], os.Stdout, os.Stderr))
	}})
}

// TestScript runs the scripts in testdata/script on a machine whose disk is the directory machine.
// With -update it writes the current output of firstboot into the scripts.
func TestScript(t *testing.T) {
	scripttest.Run(t, func(e *testscript.Env) error {
		e.Setenv("MACHINE", filepath.Join(e.WorkDir, "machine"))
		e.Setenv("IMAGE_INFO", ondisk.ImageInfoFile)
		e.Setenv("STATE", ondisk.StateFile)
		return os.MkdirAll(filepath.Join(e.WorkDir, "machine", "run"), 0o755)
	}, nil)
}

// aMachine returns a machine whose disk is dir, without running programs. Its console is standard
// output. stop ends the run once first boot has printed a fix, after which it would only wait.
func aMachine(dir string, root bool, stop func()) target {
	f := host.Files{Root: dir}
	env := &machine.Env{
		Root:       dir,
		Log:        slog.New(slog.DiscardHandler),
		Clock:      machine.Clock{Now: time.Now, Sleep: host.Sleep},
		Randomness: machine.Randomness{Rand: func() float64 { return 0 }, Random: func(n int) []byte { return make([]byte, n) }},
		Files: machine.Files{
			WriteFile: f.WriteFile,
			Mkdir:     f.Mkdir,
			Remove:    f.Remove,
			RemoveAll: f.RemoveAll,
			Sync:      f.Sync,
			Lock:      f.Lock,
		},
		Programs: machine.Programs{
			Run:       func(context.Context, machine.Cmd) error { return nil },
			Unit:      func(context.Context, string, string) error { return nil },
			UnitState: func(context.Context, string) (string, error) { return "inactive", nil },
			BootClock: func(context.Context) (ondisk.BootClock, error) { return ondisk.BootClock{}, errors.New("no systemd") },
		},
		Output: machine.Output{
			Console: func(line string) {
				fmt.Println("console:", line)
				if strings.HasPrefix(line, "    to fix: ") {
					stop()
				}
			},
			Notify: func(string) {},
		},
	}
	return target{
		env: func(io.Writer) *machine.Env { return env }, root: root,
		boot: func(context.Context) string { return "up for 1.0 s" }, insist: func() {},
	}
}
