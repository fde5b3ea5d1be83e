package installer

import (
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/ondisk"
)

// FuzzOptions reads the kernel options of any boot entry. The result must not contain a root, and
// applying options to it again must not change it.
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

// FuzzEntry reads any boot entry. The installer's entry must have a kernel, an initrd and the
// image's options, and must stay the same when it is read.
func FuzzEntry(f *testing.F) {
	f.Add("title Edgebake\nlinux /a/vmlinuz\ninitrd /a/initrd.img\noptions root=PARTUUID=1 rw console=ttyS0\n")
	f.Add("linux //x\r\ninitrd /y\ninitrd z\noptions\noptions quiet \"a b\"")
	f.Add("linux /\ninitrd ")
	f.Fuzz(func(t *testing.T, text string) {
		e, err := parseEntry(text)
		if err != nil {
			return
		}
		again := "linux /" + e.kernel + "\noptions " + e.options + "\n"
		for _, i := range e.initrds {
			again += "initrd /" + i + "\n"
		}
		got, err := parseEntry(again)
		if err != nil || got.kernel != e.kernel || !slices.Equal(got.initrds, e.initrds) || got.options != e.options {
			t.Errorf("%q becomes %+v, then %+v (%v)", text, e, got, err)
		}
		if e.kernel == "" || slices.Contains(e.initrds, "") {
			t.Errorf("%q becomes %+v", text, e)
		}
	})
}
