package procgroup

import (
	"slices"
	"strings"
	"testing"
)

func TestSecretsStay(t *testing.T) {
	secrets := []string{"EDGEBAKE_KEY_PASSWORD", "EDGEBAKE_TOKEN", "EDGEBAKE_AGE_PASSPHRASE", "EDGEBAKE_AGE_IDENTITY", "EDGEBAKE_LATER"}
	for _, name := range secrets {
		t.Setenv(name, "secret")
	}
	t.Setenv("http_proxy", "http://proxy:3128")
	cmd := Command(t.Context(), "env")
	cmd.Env = append(cmd.Env, "EDGEBAKE_INITRD=given")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(out), "\n")
	for _, want := range []string{"http_proxy=http://proxy:3128", "EDGEBAKE_INITRD=given"} {
		if !slices.Contains(lines, want) {
			t.Errorf("the program's environment lacks %s: %s", want, out)
		}
	}
	if strings.Contains(string(out), "secret") {
		t.Errorf("the program's environment has a secret: %s", out)
	}
}
