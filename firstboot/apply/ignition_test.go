package apply_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/ignition"
	"github.com/edgebake/edgebake/firstboot/apply"
	"github.com/edgebake/edgebake/test/desk"
	"golang.org/x/tools/txtar"
)

// ignitionVersion is the release of Ignition with which package apply is compared.
const ignitionVersion = "v2.26.0"

// realIgnition builds Ignition from its module, once; the program is
// cached with other build results. It needs cgo and libblkid.
func realIgnition(t *testing.T) string {
	t.Helper()
	skip := func(why string) {
		t.Helper()
		desk.Lacks(t, "against the real Ignition: %s", why)
	}
	if testing.Short() {
		t.Skip("NOT TESTED against the real Ignition: -short")
	}
	if os.Geteuid() != 0 {
		skip("it needs root, for useradd --root")
	}
	if _, err := os.Stat("/usr/include/blkid/blkid.h"); err != nil {
		skip("libblkid-dev is not installed")
	}
	for _, tool := range []string{"gcc", "useradd"} {
		if _, err := exec.LookPath(tool); err != nil {
			skip(tool + " is not installed")
		}
	}
	dir, err := filepath.Abs("../../build/ignition-" + ignitionVersion)
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "ignition")
	if _, err := os.Stat(program); err == nil {
		return program
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	const module = "github.com/coreos/ignition/v2"
	files := map[string]string{
		"go.mod": "module ignitiontest\n\ngo 1.26\n",
		"x.go":   "package x\n\nimport _ \"" + module + "/config/v3_6\"\n",
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	distro := "-X " + module + "/internal/distro."
	for _, args := range [][]string{
		{"get", module + "@" + ignitionVersion},
		{"build", "-mod=mod", "-o", program + ".new", "-ldflags", distro + "selinuxRelabel=false " + distro + "writeAuthorizedKeysFragment=false", module + "/internal"},
	} {
		cmd := exec.Command("go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off", "CGO_ENABLED=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	if err := os.Rename(program+".new", program); err != nil {
		t.Fatal(err)
	}
	return program
}

// debian is a small system with the files that the account tools and common configs need.
var debian = map[string]string{
	"etc/login.defs":                       "UID_MIN 1000\nGID_MIN 1000\nHOME_MODE 0700\nUSERGROUPS_ENAB yes\nPASS_MAX_DAYS 99999\nPASS_MIN_DAYS 0\nPASS_WARN_AGE 7\n",
	"etc/default/useradd":                  "SHELL=/bin/bash\n",
	"etc/skel/.profile":                    "# profile\n",
	"etc/hostname":                         "localhost\n",
	"opt/tree/a":                           "a\n",
	"opt/tree/b/c":                         "c\n",
	"opt/file":                             "file\n",
	"usr/lib/systemd/system/ssh.service":   "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n",
	"usr/lib/systemd/system/plain.service": "[Service]\nExecStart=/bin/true\n",
}

func newDebian(t *testing.T) *system {
	t.Helper()
	s := newSystem(t, base)
	// Ignition writes a user's keys as that user, who needs access.
	for _, dir := range []string{s.root, filepath.Dir(s.root)} {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for p, text := range debian {
		full := filepath.Join(s.root, p)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{"etc/localtime": "/usr/share/zoneinfo/Etc/UTC", "etc/systemd/system/masked.service": "/dev/null"} {
		full := filepath.Join(s.root, link)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, full); err != nil {
			t.Fatal(err)
		}
	}
	for p, mode := range map[string]os.FileMode{"opt/tree": 0o750, "opt/file": 0o640, "home/old": 0o755, "home/old/.profile": 0o600} {
		full := filepath.Join(s.root, p)
		if err := errors.Join(os.Chown(full, 1000, 1000), os.Chmod(full, mode)); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// runIgnition runs the real Ignition on a root directory.
func runIgnition(t *testing.T, program, root, config string) error {
	t.Helper()
	scratch := t.TempDir()
	file, cache := filepath.Join(scratch, "config.ign"), filepath.Join(scratch, "cache.json")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, stage := range []string{"fetch", "files"} {
		cmd := exec.Command(program, "--platform=file", "--stage="+stage, "--root="+root, "--config-cache="+cache,
			"--neednet="+filepath.Join(scratch, "neednet"), "--log-to-stdout")
		cmd.Env = append(os.Environ(), "IGNITION_CONFIG_FILE="+file)
		cmd.Dir = scratch
		if out, err := cmd.CombinedOutput(); err != nil {
			lines := strings.Split(strings.TrimSpace(string(out)), "\n")
			return fmt.Errorf("ignition --stage=%s: %w: %s", stage, err, lines[len(lines)-1])
		}
	}
	return nil
}

// TestLikeTheRealIgnition applies each config with both programs to equal systems, and compares the
// files. Package apply must reject unsupported configs before it changes anything.
func TestLikeTheRealIgnition(t *testing.T) {
	program := realIgnition(t)
	ar, err := txtar.ParseFile("testdata/corpus.txtar")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range append(ar.Files, txtar.File{Name: "all at once", Data: []byte(first)}) {
		t.Run(f.Name, func(t *testing.T) {
			ours, theirs := newDebian(t), newDebian(t)
			before := ours.whole()
			name, words, refused := strings.Cut(f.Name, ": refused: ")
			var err error
			if _, _, probs := ignition.Parse(name, f.Data); probs != nil {
				err = probs
			}
			if err == nil || refused && !strings.Contains(err.Error(), words) {
				_, err = ours.apply(string(f.Data))
			}
			if refused {
				var r *apply.Refused
				var p configs.Problems
				if !errors.As(err, &r) && !errors.As(err, &p) || !strings.Contains(err.Error(), words) {
					t.Errorf("want it refused with %q: %v", words, err)
				}
				same(t, "refused", ours.whole(), before, false)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := runIgnition(t, program, theirs.root, string(f.Data)); err != nil {
				t.Fatal(err)
			}
			compareTrees(t, ours.whole(), theirs.whole())
			if again, err := ours.apply(string(f.Data)); err != nil || len(again.Paths) != 0 {
				t.Errorf("a second run changed %v: %v", again.Paths, err)
			}
			if _, err := ours.apply(empty); err != nil {
				t.Fatal(err)
			}
			after := ours.whole()
			for _, p := range []string{"etc/group", "etc/gshadow", "etc/passwd", "etc/shadow"} {
				before[p], after[p] = sortedLines(before[p]), sortedLines(after[p])
			}
			for p, text := range after {
				if _, was := before[p]; !was && (strings.HasPrefix(p, "home/") || strings.HasPrefix(text, "d") || strings.HasPrefix(p, "var/home/")) {
					delete(after, p) // home directories have users' files; parents stay
				}
			}
			same(t, "taken back", after, before, false)
		})
	}
}

// whole is tree with the owners of the files.
func (s *system) whole() map[string]string {
	out := s.tree()
	for p, text := range out {
		st, err := os.Lstat(filepath.Join(s.root, p))
		if err != nil {
			s.t.Fatal(err)
		}
		sys := st.Sys().(*syscall.Stat_t)
		out[p] = fmt.Sprintf("%s (%d:%d)", text, sys.Uid, sys.Gid)
	}
	return out
}

func compareTrees(t *testing.T, got, want map[string]string) {
	t.Helper()
	ignored := func(p string) bool {
		// The two programs differ in how they enable units, in their own
		// records, and in backups of shadow's tools.
		return p == "etc/systemd/system-preset/20-ignition.preset" || p == "etc/systemd/system-preset" || p == "etc/.pwd.lock" || p == "etc" || p == "home" ||
			strings.HasPrefix(p, "etc/.ignition") || strings.HasSuffix(p, "-") || strings.HasPrefix(p, "etc/subuid") || strings.HasPrefix(p, "etc/subgid") || strings.HasPrefix(p, "var/")
	}
	for p, text := range want {
		switch {
		case ignored(p):
			continue
		case p == "etc/shadow":
			got[p], text = withoutDates(got[p]), withoutDates(text)
		case p == "etc/group" || p == "etc/gshadow":
			got[p], text = sortedMembers(got[p]), sortedMembers(text)
		}
		if got[p] != text {
			t.Errorf("%s: ours is\n%s\ntheirs is\n%s", p, got[p], text)
		}
	}
	for p := range got {
		if _, ok := want[p]; !ok && !ignored(p) {
			t.Errorf("%s: we make it, Ignition does not", p)
		}
	}
}

// withoutDates removes the dates of the last password change from /etc/shadow. Package apply writes
// none, because the clock may be wrong.
func withoutDates(s string) string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		if f := strings.Split(l, ":"); len(f) == 9 {
			f[2] = ""
			lines[i] = strings.Join(f, ":")
		}
	}
	return strings.Join(lines, "\n")
}

func sortedLines(s string) string {
	lines := strings.Split(s, "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func sortedMembers(s string) string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		if f := strings.Split(l, ":"); len(f) == 4 && strings.Contains(f[3], ",") {
			m := strings.Split(f[3], ",")
			slices.Sort(m)
			f[3] = strings.Join(m, ",")
			lines[i] = strings.Join(f, ":")
		}
	}
	return strings.Join(lines, "\n")
}
