package flagvalue

import (
	"testing"

	"github.com/spf13/pflag"
)

func TestExplain(t *testing.T) {
	for arg, want := range map[string]string{
		"--force=no":  "--force=no: want true or false; --force alone is true",
		"-f=perhaps":  "--force=perhaps: want true or false; --force alone is true",
		"--cpus=two":  "--cpus=two: want a whole number",
		"--disk=1e3":  "--disk=1e3: want a whole number",
		"--colour":    "unknown flag: --colour",
		"--cpus":      "flag needs an argument: --cpus",
		"--wait=soon": `invalid argument "soon" for "--wait" flag: time: invalid duration "soon"`,
	} {
		f := pflag.NewFlagSet("x", pflag.ContinueOnError)
		f.BoolP("force", "f", false, "")
		f.Int("cpus", 1, "")
		f.Int64("disk", 1, "")
		f.Duration("wait", 0, "")
		if err := Explain(f.Parse([]string{arg})); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", arg, err, want)
		}
	}
}
