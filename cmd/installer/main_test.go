package main

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
)

// TestOffAStick checks that outside an installer's initrd, the program explains its purpose and
// changes nothing.
func TestOffAStick(t *testing.T) {
	config := filepath.Join(t.TempDir(), "install.json")
	for _, c := range []struct {
		args []string
		code int
		want string // expected standard output if it succeeds
	}{
		{[]string{"version"}, 0, "installer "},
		{[]string{"--version"}, 0, "installer "},
		{[]string{"--help"}, 0, "overwrites disks"},
		{[]string{"/dev/sda"}, 2, "takes no arguments"},
		{nil, 1, "runs only in the initrd of an installer"},
	} {
		var out, errs bytes.Buffer
		var consoles []string
		code := run(t.Context(), config, c.args, func(line string) { consoles = append(consoles, line) }, &out, &errs)
		said, other := &out, &errs
		if c.code != 0 {
			said, other = &errs, &out
		}
		if code != c.code || !strings.Contains(said.String(), c.want) || other.Len() > 0 {
			t.Errorf("installer %q: code %d, %q, %q", c.args, code, &out, &errs)
		}
		if failed := c.args == nil; failed != (len(consoles) == 1) {
			t.Errorf("installer %q printed on the consoles: %q", c.args, consoles)
		}
	}
}
