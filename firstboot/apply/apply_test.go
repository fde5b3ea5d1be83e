package apply_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/configs/ignition"
	"github.com/edgebake/edgebake/firstboot/apply"
	"github.com/edgebake/edgebake/firstboot/beneath"
	"github.com/edgebake/edgebake/firstboot/host"
)

// system is a root directory with a count of the effects on it.
type system struct {
	t       *testing.T
	root    string
	effects int
	cutAt   int
	verbs   []string
	enabled map[string]bool
}

var errPower = errors.New("the power is gone")

const (
	manifestFile = "/var/lib/edgebake/manifest.json"
	originals    = "/var/lib/edgebake/originals"
)

func newSystem(t *testing.T, files map[string]string) *system {
	t.Helper()
	s := &system{t: t, root: t.TempDir(), enabled: map[string]bool{}}
	for p, text := range files {
		full := filepath.Join(s.root, p)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.WriteFile(full, []byte(text), 0o644), os.Chmod(full, 0o644)); err != nil { // independent of the umask
			t.Fatal(err)
		}
	}
	return s
}

// base is a small system with Debian's accounts.
var base = map[string]string{
	"etc/passwd":        "root:x:0:0:root:/root:/bin/bash\nold:x:1000:1000::/home/old:/bin/sh\n",
	"etc/shadow":        "root:*:20000:0:99999:7:::\nold:!:20000:0:99999:7:::\n",
	"etc/group":         "root:x:0:\nsudo:x:27:\nold:x:1000:\n",
	"etc/gshadow":       "root:*::\nsudo:*::\nold:!::\n",
	"etc/baked.conf":    "baked\n",
	"etc/append.conf":   "baked\n",
	"root/.bashrc":      "x\n",
	"home/old/.profile": "x\n",
}

func (s *system) step() error {
	s.effects++
	if s.cutAt != 0 && s.effects >= s.cutAt {
		return errPower
	}
	return nil
}

func (s *system) target() apply.Target {
	f := host.Files{Root: s.root}
	do := func(run func() error) error {
		if err := s.step(); err != nil {
			return err
		}
		return run()
	}
	return apply.Target{
		Root: s.root, Manifest: manifestFile, Originals: originals,
		WriteFile: func(p string, b []byte, m beneath.Owner) error {
			return do(func() error { return f.WriteFile(p, b, m) })
		},
		Mkdir:   func(p string, m beneath.Owner) error { return do(func() error { return f.Mkdir(p, m) }) },
		Symlink: func(t, p string) error { return do(func() error { return f.Symlink(t, p) }) },
		Link:    func(t, p string) error { return do(func() error { return f.Link(t, p) }) },
		Remove:  func(p string) error { return do(func() error { return f.Remove(p) }) },
		Unit: func(_ context.Context, verb, unit string) error {
			return do(func() error {
				s.verbs = append(s.verbs, verb+" "+unit)
				s.enabled[unit] = verb == "enable"
				return nil
			})
		},
	}
}

func (s *system) apply(config string) (apply.Changes, error) {
	return applyTo(context.Background(), s.target(), config)
}

func applyTo(ctx context.Context, t apply.Target, config string) (apply.Changes, error) {
	cfg, _, probs := ignition.Parse("config.ign", []byte(config))
	if probs != nil {
		return apply.Changes{}, probs
	}
	return apply.Apply(ctx, t, cfg)
}

func (s *system) must(config string) apply.Changes {
	s.t.Helper()
	c, err := s.apply(config)
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// tree returns all files below the root, except package apply's own records.
func (s *system) tree() map[string]string {
	s.t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(s.root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(strings.TrimPrefix(p, s.root), "/")
		if strings.HasPrefix(rel, "var/lib/edgebake") || rel == "" || rel == "var" || rel == "var/lib" {
			return nil
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		text := st.Mode().String()
		switch {
		case d.Type()&fs.ModeSymlink != 0:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			text += " -> " + to
		case d.Type().IsRegular():
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			text += "\n" + string(b)
		}
		out[rel] = text
		return nil
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

func same(t *testing.T, when string, got, want map[string]string, emptyDirs bool) {
	t.Helper()
	for p := range want {
		if got[p] != want[p] {
			t.Errorf("%s: %s is\n%s\nnot\n%s", when, p, got[p], want[p])
		}
	}
	for p, text := range got {
		if _, ok := want[p]; !ok && !(emptyDirs && strings.HasPrefix(text, "d")) {
			t.Errorf("%s: %s is left over", when, p)
		}
	}
}

const first = `{
  "ignition": {"version": "3.5.0"},
  "passwd": {
    "groups": [{"name": "ops", "gid": 2000}],
    "users": [
      {"name": "alice", "groups": ["sudo", "ops"], "sshAuthorizedKeys": ["ssh-ed25519 AAAA alice"], "passwordHash": "$y$hash"},
      {"name": "old", "shell": "/bin/bash", "groups": ["ops"]}
    ]
  },
  "storage": {
    "directories": [{"path": "/srv/data", "mode": 488, "user": {"name": "alice"}}],
    "files": [
      {"path": "/etc/new.conf", "mode": 384, "contents": {"source": "data:,new%0A"}},
      {"path": "/etc/baked.conf", "overwrite": true, "contents": {"source": "data:,changed%0A"}},
      {"path": "/etc/append.conf", "append": [{"source": "data:,more%0A"}]},
      {"path": "/etc/gz", "contents": {"compression": "gzip", "source": "data:;base64,H4sIAAAAAAACA0vPV8hMz8ss4QIA9KPtKwkAAAA="}}
    ],
    "links": [
      {"path": "/etc/link", "target": "/etc/new.conf"},
      {"path": "/etc/hard", "target": "/etc/new.conf", "hard": true}
    ]
  },
  "systemd": {"units": [
    {"name": "hello.service", "enabled": true, "contents": "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"},
    {"name": "ssh.service", "dropins": [{"name": "10.conf", "contents": "[Service]\nNice=1\n"}]},
    {"name": "noise.service", "mask": true}
  ]}
}`

const second = `{
  "ignition": {"version": "3.4.0"},
  "passwd": {"users": [
    {"name": "alice", "groups": ["ops2"], "sshAuthorizedKeys": ["ssh-ed25519 BBBB alice"]},
    {"name": "bob"}
  ], "groups": [{"name": "ops2"}]},
  "storage": {"files": [
    {"path": "/etc/new.conf", "mode": 420, "contents": {"source": "data:,newer%0A"}},
    {"path": "/etc/other.conf", "contents": {"source": "data:,other%0A"}}
  ]},
  "systemd": {"units": [{"name": "hello.service", "enabled": false}]}
}`

const empty = `{"ignition": {"version": "3.5.0"}}`

func TestApply(t *testing.T) {
	s := newSystem(t, base)
	c := s.must(first)
	got := s.tree()
	for p, want := range map[string]string{
		"etc/new.conf":                     "-rw-------\nnew\n",
		"etc/baked.conf":                   "-rw-r--r--\nchanged\n",
		"etc/append.conf":                  "-rw-r--r--\nbaked\nmore\n",
		"etc/link":                         "Lrwxrwxrwx -> /etc/new.conf",
		"etc/hard":                         "-rw-------\nnew\n",
		"srv/data":                         "drwxr-x---",
		"home/alice/.ssh/authorized_keys":  "-rw-------\nssh-ed25519 AAAA alice\n",
		"home/alice/.ssh":                  "drwx------",
		"etc/systemd/system/noise.service": "Lrwxrwxrwx -> /dev/null",
		"etc/systemd/system/ssh.service.d/10.conf": "-rw-r--r--\n[Service]\nNice=1\n",
		"etc/group":  "-rw-r--r--\nroot:x:0:\nsudo:x:27:alice\nold:x:1000:\nops:x:2000:alice,old\nalice:x:1001:\n",
		"etc/passwd": "-rw-r--r--\nroot:x:0:0:root:/root:/bin/bash\nold:x:1000:1000::/home/old:/bin/bash\nalice:x:1001:1001::/home/alice:/bin/bash\n",
		"etc/shadow": "-rw-r--r--\nroot:*:20000:0:99999:7:::\nold:!:20000:0:99999:7:::\nalice:$y$hash::0:99999:7:::\n",
	} {
		if got[p] != want {
			t.Errorf("%s is\n%s\nnot\n%s", p, got[p], want)
		}
	}
	if !slices.Contains(s.verbs, "enable hello.service") || len(c.Paths) == 0 {
		t.Errorf("verbs %v, changes %+v", s.verbs, c)
	}
	if again := s.must(first); len(again.Paths) != 0 {
		t.Errorf("a second run changed %v", again.Paths)
	}
	same(t, "second run", s.tree(), got, false)
}

// TestCorrected checks that a corrected config removes the files that it does not contain, and
// restores the original files.
func TestCorrected(t *testing.T) {
	s := newSystem(t, base)
	before := s.tree()
	s.must(first)
	s.must(second)
	got := s.tree()
	for _, gone := range []string{"etc/link", "etc/hard", "etc/gz", "etc/systemd/system/hello.service", "etc/systemd/system/noise.service"} {
		if got[gone] != "" {
			t.Errorf("%s is still there", gone)
		}
	}
	for p, want := range map[string]string{
		"etc/baked.conf":  before["etc/baked.conf"],
		"etc/append.conf": before["etc/append.conf"],
		"etc/new.conf":    "-rw-r--r--\nnewer\n",
		"etc/passwd":      "-rw-r--r--\nroot:x:0:0:root:/root:/bin/bash\nold:x:1000:1000::/home/old:/bin/sh\nalice:x:1001:1001::/home/alice:/bin/bash\nbob:x:1003:1003::/home/bob:/bin/bash\n",
	} {
		if got[p] != want {
			t.Errorf("%s is\n%s\nnot\n%s", p, got[p], want)
		}
	}
	if strings.Contains(got["etc/group"], "sudo:x:27:alice") || !strings.Contains(got["etc/shadow"], "alice:*:") {
		t.Errorf("alice still has the former config's group or password:\n%s\n%s", got["etc/group"], got["etc/shadow"])
	}
	if s.enabled["hello.service"] {
		t.Error("hello.service is still enabled")
	}
	s.must(empty)
	after := s.tree()
	for p := range after { // home directories stay: they have users' files
		if strings.HasPrefix(p, "home/alice") || strings.HasPrefix(p, "home/bob") {
			delete(after, p)
		}
	}
	same(t, "everything taken back", after, before, true)
}

// TestActivation checks that if Activate fails, the next Apply activates the same changes again,
// and only once.
func TestActivation(t *testing.T) {
	s := newSystem(t, base)
	const file, other = "/etc/sysctl.d/10-site.conf", "/etc/sysctl.d/20-site.conf"
	config := func(path string) string {
		return `{"ignition":{"version":"3.4.0"},"storage":{"files":[{"path":"` + path + `","contents":{"source":"data:,x"}}]},` +
			`"systemd":{"units":[{"name":"site.service","contents":"[Unit]\n"}]}}`
	}
	target := s.target()
	if _, err := applyTo(t.Context(), target, config(file)); err != nil {
		t.Fatal(err)
	}
	killed := errors.New("killed")
	target.Activate = func(context.Context, apply.Changes) error { return killed }
	if _, err := applyTo(t.Context(), target, config(other)); !errors.Is(err, killed) {
		t.Fatal(err)
	}
	var told []apply.Changes
	target.Activate = func(_ context.Context, c apply.Changes) error { told = append(told, c); return nil }
	for range 2 {
		if _, err := applyTo(t.Context(), target, config(other)); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{file, other, "/etc/systemd/system/site.service"} {
		if !slices.Contains(told[0].Paths, p) {
			t.Errorf("Activate did not get the change of %s: %v", p, told[0])
		}
	}
	if us := told[0].Units; len(us) != 1 || !us[0].Changed {
		t.Errorf("units: %v", us)
	}
	if len(told[1].Paths) > 0 {
		t.Errorf("told twice: %v", told[1])
	}
}

// TestPowerCut cuts the power before each effect of a first run, and of a correction.
func TestPowerCut(t *testing.T) {
	for _, tc := range []struct {
		name    string
		configs []string // all but the last are applied without a cut
	}{
		{"first run", []string{first}},
		{"correction", []string{first, second}},
		{"taken back", []string{first, empty}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			last := len(tc.configs) - 1
			prepare := func() *system {
				s := newSystem(t, base)
				for _, c := range tc.configs[:last] {
					s.must(c)
				}
				s.effects = 0
				return s
			}
			whole := prepare()
			whole.must(tc.configs[last])
			want, count := whole.tree(), whole.effects
			if count < 8 {
				t.Fatalf("only %d effects", count)
			}
			for n := 1; n <= count; n++ {
				s := prepare()
				s.cutAt = n
				if _, err := s.apply(tc.configs[last]); !errors.Is(err, errPower) {
					t.Fatalf("cut at %d: %v", n, err)
				}
				s.cutAt = 0
				s.must(tc.configs[last])
				same(t, fmt.Sprintf("cut at %d of %d", n, count), s.tree(), want, false)
				if s.enabled["hello.service"] != whole.enabled["hello.service"] {
					t.Errorf("cut at %d: hello.service enabled: %v", n, s.enabled["hello.service"])
				}
				// A correction right after the power cut still undoes everything.
				s.must(empty)
				for p, text := range s.tree() {
					if _, there := base[p]; !there && !strings.HasPrefix(text, "d") {
						t.Errorf("cut at %d, then taken back: %s is left over", n, p)
					} else if there && !strings.HasSuffix(text, "\n"+base[p]) {
						t.Errorf("cut at %d, then taken back: %s is %s", n, p, text)
					}
				}
				if t.Failed() {
					return
				}
			}
		})
	}
}

func TestRefuses(t *testing.T) {
	for _, tc := range []struct{ name, config, words string }{
		{"disks", `{"ignition":{"version":"3.5.0"},"storage":{"disks":[{"device":"/dev/sda"}],"filesystems":[{"device":"/dev/sda1","format":"ext4","path":"/x"}]},"kernelArguments":{"shouldExist":["quiet"]}}`, "storage.disks: the disk is made by the Image"},
		{"raid and luks", `{"ignition":{"version":"3.5.0"},"storage":{"raid":[{"name":"r","level":"raid1","devices":["/dev/a","/dev/b"]}],"luks":[{"name":"l","device":"/dev/c"}]}}`, "storage.luks: the disk is made by the Image"},
		{"remote", `{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/a","contents":{"source":"https://example.com/a"}}]}}`, "contents of /a must be inline (data:)"},
		{"merge", `{"ignition":{"version":"3.5.0","config":{"merge":[{"source":"https://example.com/a"}]}}}`, "fetches no further configs"},
		{"no JSON", `x`, "not an Ignition config"},
		{"overwrite", `{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/etc/baked.conf","contents":{"source":"data:,x"}}]}}`, "exists already with other contents: add overwrite: true"},
		{"directory", `{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/etc","overwrite":true,"contents":{"source":"data:,x"}}]}}`, "/etc is a directory that the machine needs"},
		{"hash", `{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/a","contents":{"source":"data:,x","verification":{"hash":"sha256-` + strings.Repeat("0", 64) + `"}}}]}}`, "verifying its contents"},
		{"no such user", `{"ignition":{"version":"3.5.0"},"storage":{"files":[{"path":"/a","user":{"name":"nobody-here"},"contents":{"source":"data:,x"}}]}}`, "there is no user nobody-here"},
		{"no such group", `{"ignition":{"version":"3.5.0"},"passwd":{"users":[{"name":"a","groups":["nowhere"]}]}}`, "the image has no group nowhere"},
		{"uid taken", `{"ignition":{"version":"3.5.0"},"passwd":{"users":[{"name":"a","uid":1000}]}}`, "uid 1000 belongs to old"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newSystem(t, base)
			before := s.tree()
			_, err := s.apply(tc.config)
			if err == nil || !strings.Contains(err.Error(), tc.words) {
				t.Fatalf("%v", err)
			}
			same(t, "refused", s.tree(), before, false)
			if s.effects != 0 {
				t.Errorf("it had %d effects", s.effects)
			}
		})
	}
}
