package fetch

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/desk"
)

// TestForeignCache checks that a cache that another user could write to is rejected.
func TestForeignCache(t *testing.T) {
	mode := func(t *testing.T, dir string, m os.FileMode) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(dir, 0o700), os.Chmod(dir, m)); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name string
		do   func(t *testing.T, dir string)
		want string
	}{
		{"new", func(*testing.T, string) {}, ""},
		{"one that an earlier edgebake made", func(t *testing.T, d string) { mode(t, filepath.Join(d, "blobs"), 0o755); mode(t, d, 0o755) }, ""},
		{"a new volume", func(t *testing.T, d string) { mode(t, filepath.Join(d, "lost+found"), 0o700); mode(t, d, 0o777) }, ""},
		{"in use by others", func(t *testing.T, d string) { mode(t, filepath.Join(d, "blobs"), 0o755); mode(t, d, 0o777) }, "chmod -R go-w"},
		{"for everybody's files", func(t *testing.T, d string) { mode(t, d, 0o777|os.ModeSticky) }, "chmod -R go-w"},
		{"prepared programs", func(t *testing.T, d string) { mode(t, filepath.Join(d, "programs"), 0o777) }, "programs, and so could"},
		{"a group's notes", func(t *testing.T, d string) { mode(t, filepath.Join(d, "sound"), 0o775) }, "sound, and so could"},
		{"another user's", func(t *testing.T, d string) { mode(t, d, 0o755); give(t, d) }, "belongs to user 12345"},
		{"below a directory for everybody", func(t *testing.T, d string) { mode(t, filepath.Dir(d), 0o777) }, "and so could replace the cache"},
		{"further below one", func(t *testing.T, d string) { mode(t, d, 0o700); mode(t, filepath.Dir(filepath.Dir(d)), 0o777) }, "and so could replace the cache"},
		{"below one where only owners remove", func(t *testing.T, d string) { mode(t, filepath.Dir(d), 0o777|os.ModeSticky) }, ""},
		{"below one of this user's group", func(t *testing.T, d string) { mode(t, filepath.Dir(d), 0o775) }, ""},
		{"below one of another group", func(t *testing.T, d string) {
			mode(t, d+"-shared", 0o775)
			give(t, d+"-shared")
			if err := errors.Join(os.Chown(d+"-shared", os.Geteuid(), 12345), os.Symlink("cache-shared/cache", d), os.Mkdir(d+"-shared/cache", 0o700)); err != nil {
				t.Fatal(err)
			}
		}, "and so could replace the cache"},
		{"below another user's", func(t *testing.T, d string) { mode(t, d, 0o700); give(t, filepath.Dir(d)) }, "belongs to user 12345"},
		{"another user's link", func(t *testing.T, d string) {
			mode(t, d+"-own", 0o700)
			if err := os.Symlink(filepath.Base(d)+"-own", d); err != nil {
				t.Fatal(err)
			}
			give(t, d)
		}, "belongs to user 12345"},
		{"another user's programs", func(t *testing.T, d string) { p := filepath.Join(d, "programs"); mode(t, p, 0o755); give(t, p) }, "belongs to user 12345"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "parent", "cache")
			mode(t, filepath.Dir(dir), 0o755)
			tc.do(t, dir)
			c, err := Open(dir)
			if (err == nil) != (tc.want == "") || err != nil && (!strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "--cache")) {
				t.Errorf("%v", err)
			}
			if err != nil {
				return
			}
			c.Close()
			for _, d := range append(subdirs, ".") {
				if fi, err := os.Stat(filepath.Join(dir, d)); err != nil || fi.Mode()&0o022 != 0 {
					t.Errorf("%s: %v %v", d, fi.Mode(), err)
				}
			}
		})
	}
}

// give changes the owner of a directory to another user.
func give(t *testing.T, dir string) {
	t.Helper()
	if os.Geteuid() != 0 {
		desk.Lacks(t, "only root gives files away")
	}
	if err := os.Lchown(dir, 12345, 12345); err != nil {
		t.Fatal(err)
	}
}
