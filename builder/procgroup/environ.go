package procgroup

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// private is the prefix of edgebake's own environment variables. Some contain secrets, which
// scripts of packages, Images and Makefiles must not see.
const private = "EDGEBAKE_"

// Environ returns the environment for external programs: this process's environment without
// edgebake's own variables.
func Environ() []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, private) })
}

// Command returns the result of exec.CommandContext with the environment Environ.
func Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = Environ()
	return cmd
}
