package apply_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// ignitionVersion is the release the result is held against.
const ignitionVersion = "v2.26.0"

// realIgnition builds Ignition from its module, once; the program is kept
// beside the other build results. It needs cgo and libblkid.
func realIgnition(t *testing.T) string {
	t.Helper()
	skip := func(why string) {
		if os.Getenv("CI") != "" {
			t.Fatal(why)
		}
		t.Skip("NOT TESTED against the real Ignition: " + why)
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

// TestLikeTheRealIgnition applies the same config with both, to the same
// system, and compares what is on the disk.
func TestLikeTheRealIgnition(t *testing.T) {
	program := realIgnition(t)
	ours, theirs := newSystem(t, base), newSystem(t, base)
	// The real one applies to a system that has the accounts' tools' files.
	for _, s := range []*system{ours, theirs} {
		// It writes a user's keys as that user, who must get there.
		for _, dir := range []string{s.root, filepath.Dir(s.root)} {
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		for p, text := range map[string]string{"etc/login.defs": "UID_MIN 1000\nGID_MIN 1000\nHOME_MODE 0700\nUSERGROUPS_ENAB yes\nPASS_MAX_DAYS 99999\nPASS_MIN_DAYS 0\nPASS_WARN_AGE 7\n", "etc/default/useradd": "SHELL=/bin/bash\n"} {
			full := filepath.Join(s.root, p)
			if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	ours.must(first)

	scratch := t.TempDir()
	config, cache := filepath.Join(scratch, "config.ign"), filepath.Join(scratch, "cache.json")
	if err := os.WriteFile(config, []byte(first), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, stage := range []string{"fetch", "files"} {
		cmd := exec.Command(program, "--platform=file", "--stage="+stage, "--root="+theirs.root, "--config-cache="+cache,
			"--neednet="+filepath.Join(scratch, "neednet"), "--log-to-stdout")
		cmd.Env = append(os.Environ(), "IGNITION_CONFIG_FILE="+config)
		cmd.Dir = scratch
		if out, err := cmd.CombinedOutput(); err != nil {
			lines := strings.Split(strings.TrimSpace(string(out)), "\n")
			t.Fatalf("ignition --stage=%s: %v\n%s", stage, err, lines[len(lines)-1])
		}
	}
	got, want := ours.tree(), theirs.tree()
	const preset = "etc/systemd/system-preset/20-ignition.preset"
	if !strings.Contains(want[preset], "enable hello.service") || !ours.enabled["hello.service"] {
		t.Errorf("enabling: theirs %q, ours %v", want[preset], ours.verbs)
	}
	for p, text := range want {
		switch {
		case p == preset, p == "etc/.pwd.lock", strings.HasPrefix(p, "etc/.ignition"), strings.HasSuffix(p, "-"), strings.HasPrefix(p, "etc/subuid"), strings.HasPrefix(p, "etc/subgid"):
			continue // how they enable units, and backups that shadow's tools leave
		case strings.HasPrefix(text, "d") && !strings.HasPrefix(p, "home") && !strings.HasPrefix(p, "srv"):
			continue // parents
		case p == "etc/shadow":
			got[p], text = withoutDates(got[p]), withoutDates(text)
		case p == "etc/group" || p == "etc/gshadow":
			got[p], text = sortedMembers(got[p]), sortedMembers(text)
		}
		if strings.HasPrefix(p, "var/") {
			continue
		}
		if got[p] != text {
			t.Errorf("%s: ours is\n%s\ntheirs is\n%s", p, got[p], text)
		}
	}
	for p := range got {
		if _, ok := want[p]; !ok {
			t.Errorf("%s: we make it, Ignition does not", p)
		}
	}
}

// withoutDates takes the date of the last change out of /etc/shadow: ours has
// none, since the clock may be wrong when it is written.
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
