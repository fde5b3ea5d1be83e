package installer

import (
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
)

// FuzzOptions takes the kernel's options from a boot entry of any content: the installer
// boots no root of its own, once or twice.
func FuzzOptions(f *testing.F) {
	f.Add(`root=PARTUUID=1 rw console=ttyS0 systemd.mount-extra=a:/var quiet dyndbg="file a.c +p; root=x"`)
	f.Add(`boot=other  root root="a b" "root=x" init=/bin/sh "`)
	f.Add("")
	f.Fuzz(func(t *testing.T, of string) {
		got := options(of)
		if !strings.HasPrefix(got+" ", "boot="+ondisk.InstallBoot+" ") {
			t.Errorf("%q becomes %q", of, got)
		}
		for _, w := range words(got)[1:] {
			if key, _, _ := strings.Cut(w, "="); slices.Contains([]string{"root", "boot", "init", "resume"}, key) {
				t.Errorf("%q becomes %q", of, got)
			}
		}
		if again := options(got); again != got {
			t.Errorf("%q becomes %q, then %q", of, got, again)
		}
	})
}
