package apply_test

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"testing"
)

const fuzzConfig = `{"ignition":{"version":"3.5.0"},
 "passwd":{"groups":[{"name":"wheel"}],"users":[{"name":"ops","groups":["sudo"],"sshAuthorizedKeys":["ssh-ed25519 AAAA ops"]}]},
 "storage":{"directories":[{"path":"/etc/site"}],
  "files":[{"path":"/etc/site/a","contents":{"source":"data:,a"}},{"path":"/etc/append.conf","append":[{"source":"data:,more"}]}],
  "links":[{"path":"/etc/site/l","target":"a"}]}}`

// FuzzAccounts applies a config twice to account files of any content. The config is either
// rejected, or applied, and then the second time changes nothing.
func FuzzAccounts(f *testing.F) {
	f.Add([]byte(base["etc/passwd"]), []byte(base["etc/shadow"]), []byte(base["etc/group"]), []byte(base["etc/gshadow"]))
	f.Add([]byte("ops:x:99999999999999999999::\n:::\nops\n"), []byte("ops\n"), []byte("sudo:x:-1:ops,,ops\n"), []byte("::::::::\n"))
	f.Fuzz(func(t *testing.T, passwd, shadow, group, gshadow []byte) {
		files := maps.Clone(base)
		files["etc/passwd"], files["etc/shadow"], files["etc/group"], files["etc/gshadow"] = string(passwd), string(shadow), string(group), string(gshadow)
		s := newSystem(t, files)
		if _, err := s.apply(fuzzConfig); err != nil {
			return
		}
		if _, err := s.apply(fuzzConfig); err != nil {
			t.Errorf("the second time: %v", err)
		}
	})
}

// FuzzHostileRoot applies a config to a system in which some paths are links to
// anywhere. Nothing outside of the root may change.
func FuzzHostileRoot(f *testing.F) {
	for n := range byte(len(hostilePaths)) {
		f.Add(n, "../../../outside", n+1, "/outside")
		f.Add(n, "OUTSIDE", n+1, "OUTSIDE/new")
		f.Add(n, ".", n+1, "..")
	}
	f.Fuzz(func(t *testing.T, first byte, to string, second byte, then string) {
		outside := t.TempDir()
		s := newSystem(t, base)
		for _, l := range []struct {
			at byte
			to string
		}{{first, to}, {second, then}} {
			p := filepath.Join(s.root, hostilePaths[int(l.at)%len(hostilePaths)])
			if len(l.to) >= len("OUTSIDE") && l.to[:len("OUTSIDE")] == "OUTSIDE" {
				l.to = outside + l.to[len("OUTSIDE"):]
			}
			if filepath.Clean(p) == s.root || os.RemoveAll(p) != nil || os.MkdirAll(filepath.Dir(p), 0o755) != nil {
				continue
			}
			os.Symlink(l.to, p) // where that is possible
		}
		// Remove the files only now: the second link may have been made through the first.
		for _, name := range []string{"passwd", "manifest.json", "append.conf"} {
			os.Remove(filepath.Join(outside, name))
			if err := os.WriteFile(filepath.Join(outside, name), []byte("theirs"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		before := contents(t, outside)
		s.apply(fuzzConfig)
		if after := contents(t, outside); !maps.Equal(before, after) {
			t.Errorf("outside of the root there was %v, now there is %v", before, after)
		}
	})
}

// contents returns the files below a directory; for a link, its target.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		switch d.Type() {
		case 0:
			b, err := os.ReadFile(p)
			out[p] = string(b)
			return err
		case fs.ModeSymlink:
			to, err := os.Readlink(p)
			out[p] = "-> " + to
			return err
		}
		out[p] = d.Type().String()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

var hostilePaths = []string{
	"etc", "etc/passwd", "etc/shadow", "etc/group", "etc/site", "etc/append.conf", "home", "home/ops", "home/ops/.ssh",
	"var", "var/lib", "var/lib/edgebake", "var/lib/edgebake/manifest.json", "etc/skel", "etc/login.defs",
}
