package apply_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/edgebake/edgebake/firstboot/beneath"
	"github.com/edgebake/edgebake/test/desk"
)

const keysOf = `{"ignition":{"version":"3.5.0"},"passwd":{"users":[{"name":"old","sshAuthorizedKeys":[%q]}]},
	"storage":{"files":[{"path":"/home/old/.config/tool.conf","overwrite":true,"contents":{"source":"data:,%s"}}]}}`

// TestALocalUserDoesNotBecomeRoot checks a user who puts links to other users' files into their own
// home. Their settings are applied without following the links.
func TestALocalUserDoesNotBecomeRoot(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(home string) error
	}{
		{".ssh leads to the manifests", func(home string) error { return os.Symlink("../../etc/kubernetes/manifests", home+"/.ssh") }},
		{".config leads to the manifests", func(home string) error {
			return os.Symlink("../../etc/kubernetes/manifests", home+"/.config")
		}},
		{"the keys lead to the shadow file", func(home string) error {
			if err := os.Mkdir(home+"/.ssh", 0o700); err != nil {
				return err
			}
			return os.Symlink("../../../etc/shadow", home+"/.ssh/authorized_keys")
		}},
		{"the keys are a FIFO", func(home string) error {
			if err := os.Mkdir(home+"/.ssh", 0o700); err != nil {
				return err
			}
			return syscall.Mkfifo(home+"/.ssh/authorized_keys", 0o666)
		}},
		{".config is a file", func(home string) error { return os.WriteFile(home+"/.config", nil, 0o600) }},
		{"a file is a directory", func(home string) error { return os.MkdirAll(home+"/.config/tool.conf/x", 0o700) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			files := map[string]string{"etc/kubernetes/manifests/tool.conf": "root's"}
			for p, text := range base {
				files[p] = text
			}
			s := newSystem(t, files)
			home := filepath.Join(s.root, "home/old")
			if err := os.Chmod(home, 0o777); err != nil { // writable for other users
				t.Fatal(err)
			}
			if err := c.prepare(home); err != nil {
				t.Fatal(err)
			}
			check := func(wantKey, wantConf string) {
				t.Helper()
				for p, want := range map[string]string{"home/old/.ssh/authorized_keys": wantKey, "home/old/.config/tool.conf": wantConf, "etc/kubernetes/manifests/tool.conf": "root's"} {
					if b, err := os.ReadFile(filepath.Join(s.root, p)); want == "" && err == nil || want != "" && string(b) != want {
						t.Errorf("%s has %q, %v; want %q", p, b, err, want)
					}
				}
				list, err := os.ReadDir(filepath.Join(s.root, "etc/kubernetes/manifests"))
				if err != nil || len(list) != 1 {
					t.Errorf("manifests: %v, %v", list, err)
				}
				shadow, err := os.ReadFile(filepath.Join(s.root, "etc/shadow"))
				if err != nil || slices.Contains([]string{"", "key\n"}, string(shadow)) {
					t.Errorf("shadow: %s, %v", shadow, err)
				}
			}
			s.must(fmt.Sprintf(keysOf, "key", "1"))
			check("key\n", "1")

			// The user plants the links again before the settings are undone.
			for _, d := range []string{".ssh", ".config"} {
				if err := os.RemoveAll(filepath.Join(home, d)); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.prepare(home); err != nil {
				t.Fatal(err)
			}
			s.must(fmt.Sprintf(keysOf, "second", "2"))
			check("second\n", "2")
			for _, d := range []string{".ssh", ".config"} {
				if err := os.RemoveAll(filepath.Join(home, d)); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.Symlink("../../etc/kubernetes/manifests", home+"/.config"); err != nil {
				t.Fatal(err)
			}
			s.must(`{"ignition":{"version":"3.5.0"}}`)
			if b, err := os.ReadFile(filepath.Join(s.root, "etc/kubernetes/manifests/tool.conf")); err != nil || string(b) != "root's" {
				t.Errorf("taken back: %q, %v", b, err)
			}
		})
	}
}

// TestALinksOwnerStaysInPlace replaces the directory of a link with another link between the
// moments when root makes the link and sets its owner. The user must not get any of root's files.
func TestALinksOwnerStaysInPlace(t *testing.T) {
	if os.Geteuid() != 0 {
		desk.Lacks(t, "only root gives files away")
	}
	files := map[string]string{"etc/kubernetes/manifests/pod.yaml": "root's"}
	maps.Copy(files, base)
	s := newSystem(t, files)
	home := filepath.Join(s.root, "home/old")
	theirs := filepath.Join(s.root, "etc/kubernetes/manifests/link")
	if err := errors.Join(os.Chown(home, 1000, 1000), os.Symlink("pod.yaml", theirs)); err != nil {
		t.Fatal(err)
	}
	target := s.target()
	make := target.Symlink
	target.Symlink = func(to, p string) error {
		return errors.Join(make(to, p), os.Rename(home+"/d", home+"/e"), os.Symlink("../../etc/kubernetes/manifests", home+"/d"))
	}
	_, err := applyTo(t.Context(), target, (`{"ignition":{"version":"3.5.0"},"storage":{"links":[
		{"path":"/home/old/d/link","target":"x","user":{"id":1000},"group":{"id":1000}}]}}`))
	if err == nil || !errors.Is(err, beneath.ErrLink) {
		t.Errorf("%v", err)
	}
	st, err := os.Lstat(theirs)
	if err != nil || st.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Errorf("a link of root's belongs to %+v, %v", st.Sys(), err)
	}
	// The next attempt replaces the user's link with a directory, and
	// sets the owner of the link in it.
	s.must(`{"ignition":{"version":"3.5.0"},"storage":{"links":[{"path":"/home/old/d/link","target":"x","user":{"id":1000},"group":{"id":1000}}]}}`)
	if st, err := os.Lstat(home + "/d/link"); err != nil || st.Sys().(*syscall.Stat_t).Uid != 1000 {
		t.Errorf("the link: %v", err)
	}
}
