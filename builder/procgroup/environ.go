package procgroup

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// private is the prefix of edgebake's own variables. Some contain passwords and tokens, which
// scripts of packages, Images and Makefiles must not see.
const private = "EDGEBAKE_"

// Environ returns the environment for external programs: that of this process
// without edgebake's own variables.
func Environ() []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, private) })
}

// Command is like exec.CommandContext, but uses Environ.
func Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = Environ()
	return cmd
}
