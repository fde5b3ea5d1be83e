package join

import (
	"testing"

	"github.com/edgebake/edgebake/openyurt"
)

func TestWithArgs(t *testing.T) {
	env := func(args string) string { return "# comment\nKUBELET_KUBEADM_ARGS=\"" + args + "\"\nOTHER=1\n" }
	for _, c := range []struct {
		have, want    string
		before, after map[string]string
	}{
		{"--a=1 --b=2", "--a=1 --b=3", map[string]string{"b": "2"}, map[string]string{"b": "3"}},
		{"--a=1 --b=2", "--a=1", map[string]string{"b": "2"}, nil},
		{"--a=1", "--a=1 --c=", nil, map[string]string{"c": ""}},
		{"", "--c=x", nil, map[string]string{"c": "x"}},
		{"--a=1" + openyurt.ListPlainly + openyurt.RedirectFlags, "--a=1 --feature-gates=X=true" + openyurt.ListPlainly + openyurt.RedirectFlags, nil, map[string]string{"feature-gates": "X=true"}},
		{"--a=1 --feature-gates=X=true" + openyurt.ListPlainly + openyurt.RedirectFlags, "--a=1" + openyurt.ListPlainly + openyurt.RedirectFlags, map[string]string{"feature-gates": "X=true"}, nil},
		{"--a=1" + openyurt.RedirectFlags, "--a=1 --v=4" + openyurt.RedirectFlags, nil, map[string]string{"v": "4"}},
	} {
		got := string(withArgs([]byte(env(c.have)), c.before, c.after))
		if got != env(c.want) {
			t.Errorf("%q: %v to %v: %q, want %q", c.have, c.before, c.after, got, env(c.want))
		}
		if again := string(withArgs([]byte(got), c.before, c.after)); again != got {
			t.Errorf("once more: %q, was %q", again, got)
		}
	}
}
