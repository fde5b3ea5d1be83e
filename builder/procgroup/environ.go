package procgroup

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// private begins the names of variables that are edgebake's alone. Passwords and
// tokens are among them, and what edgebake starts runs scripts of others: those of
// packages, an Image's own, a Makefile's.
const private = "EDGEBAKE_"

// Environ is the environment for external programs: this process's own, without
// the variables that are edgebake's.
func Environ() []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, private) })
}

// Command is exec.CommandContext with Environ.
func Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = Environ()
	return cmd
}
