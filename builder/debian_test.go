package builder

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"os/user"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/edgebake/edgebake/builder/fetch"
	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
)

// standIn puts a fake mmdebstrap first on PATH. It writes the project's base, and appends a line to
// the project's file runs. If the project has a file fail, it fails; if it has a script hang, it
// runs that script first.
func standIn(t *testing.T, p *project) {
	t.Helper()
	dir := t.TempDir()
	script := `#!/bin/sh
echo "$SOURCE_DATE_EPOCH $PWD $*" >> runs
`
	script = strings.ReplaceAll(script, "runs", filepath.Join(p.dir, "runs")) + `
echo "I: making it" >&2
if [ -e "` + p.dir + `/mount" ]; then mount -t tmpfs none "` + p.dir + `/mount" && touch "` + p.dir + `/mount/inside" && echo mounted >> "` + p.dir + `/runs"; fi
if [ -e "` + p.dir + `/fail" ]; then echo "Ign:1 for now" >&2; echo "E: Unable to locate package nonsense" >&2; exit 25; fi
if [ -e "` + p.dir + `/hang" ]; then . "` + p.dir + `/hang"; fi
case "$*" in
*--architectures=arm64*) cat "` + p.dir + `/base-arm64.tar" ;;
*) cat "` + p.dir + `/base.tar" ;;
esac
`
	for name, body := range map[string]string{"mmdebstrap": script, "newuidmap": "#!/bin/sh\n", "apt-get": "#!/bin/sh\n"} {
		desk.WriteProgram(t, filepath.Join(dir, name), body)
	}
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
}

func (p *project) runs(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(p.dir, "runs"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return string(b)
}

func toDebian(s string) string {
	return strings.Replace(s, "  tar:\n    file: base.tar\n", "  debian: {suite: trixie, packages: [tcpdump]}\n", 1)
}

func TestDebianBase(t *testing.T) {
	p := newProject(t, buildtest.Base(), toDebian)
	standIn(t, p)
	out := filepath.Join(t.TempDir(), "x.raw")
	var said []string
	o := p.options(out)
	o.Force = true
	o.Events = func(e Event) { said = append(said, e.Step+" "+e.State+" "+e.Text) }
	first, err := Build(t.Context(), p.image(t), o)
	if err != nil {
		t.Fatal(err)
	}
	runs := p.runs(t)
	if !strings.HasPrefix(runs, "1767225600 / ") || !strings.Contains(runs, "tcpdump") || strings.Count(runs, "\n") != 1 {
		t.Errorf("mmdebstrap ran as: %s", runs)
	}
	if all := strings.Join(said, "\n"); !strings.Contains(all, "base detail I: making it") {
		t.Errorf("mmdebstrap's output is not shown:\n%s", all)
	}
	// The archive is unreachable, but a build with a lock or a filled cache does not need it.
	if err := os.WriteFile(filepath.Join(p.dir, "fail"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	o.Lock = first.Plan.Lock()
	if _, err := Build(t.Context(), p.image(t), o); err != nil || p.runs(t) != runs {
		t.Errorf("built from the lock: %v, runs %q", err, p.runs(t))
	}
}

// TestUpdate checks that Update makes a new base although the cache has one.
func TestUpdate(t *testing.T) {
	p := newProject(t, buildtest.Base(), toDebian)
	standIn(t, p)
	o := p.options(filepath.Join(t.TempDir(), "x.raw"))
	o.Force = true
	first, err := Build(t.Context(), p.image(t), o)
	if err != nil {
		t.Fatal(err)
	}
	newer := buildtest.Base()
	for i := range newer {
		if newer[i].Name == "./var/lib/dpkg/status" {
			newer[i].Body += "\nPackage: new\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2\n"
		}
	}
	packed, err := buildtest.Tar(newer)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(p.dir, "base.tar"), packed, 0o644); err != nil {
		t.Fatal(err)
	}
	same, err := Build(t.Context(), p.image(t), o)
	if err != nil || same.Report.Golden != first.Report.Golden {
		t.Errorf("the cache's base is not used: %v", err)
	}
	o.Update = true
	updated, err := Build(t.Context(), p.image(t), o)
	if err != nil {
		t.Fatal(err)
	}
	if updated.Report.Packages != first.Report.Packages+1 || updated.Report.Plan == first.Report.Plan {
		t.Errorf("not updated: %d packages, before %d", updated.Report.Packages, first.Report.Packages)
	}
	// If the cache has neither base, a locked build rejects the archive's new base and names the
	// fix.
	o.Update, o.Locked, o.Lock = false, true, first.Plan.Lock()
	o.Cache = newProject(t, buildtest.Base(), nil).cache
	if _, err := Build(t.Context(), p.image(t), o); err == nil || !strings.Contains(err.Error(), "the Debian archive has changed") {
		t.Errorf("locked: %v", err)
	}
	// A build without --locked renews the lock and warns.
	var warned string
	o.Locked = false
	o.Cache = newProject(t, buildtest.Base(), nil).cache
	o.Events = func(e Event) {
		if e.State == StateWarning && e.Step == "base" {
			warned = e.Text
		}
	}
	renewed, err := Build(t.Context(), p.image(t), o)
	if err != nil || renewed.Report.Golden != updated.Report.Golden || !strings.Contains(warned, "differs from the lock") {
		t.Errorf("renewed: %v, warning %q", err, warned)
	}
}

func TestDebianFails(t *testing.T) {
	p := newProject(t, buildtest.Base(), toDebian)
	standIn(t, p)
	if err := os.WriteFile(filepath.Join(p.dir, "fail"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	_, err := p.build(t, filepath.Join(dir, "x.raw"))
	for _, want := range []string{"input base: ", "exit status 25", "Unable to locate package nonsense", "check base.debian.packages"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q: %v", want, err)
		}
	}
	// The explanation comes before mmdebstrap's output.
	if meant, said, ok := strings.Cut(err.Error(), "\nI: making it"); !ok || !strings.Contains(meant, "check base.debian.packages") || strings.Contains(said, "Ign:") {
		t.Error(err)
	}
	// A failed run is not cached.
	if err := os.Remove(filepath.Join(p.dir, "fail")); err != nil {
		t.Fatal(err)
	}
	if _, err := p.build(t, filepath.Join(dir, "x.raw")); err != nil {
		t.Error(err)
	}
}

// interrupt runs a build whose mmdebstrap is a script, and interrupts it when the script prints
// "hangs". It returns the build's error, and the notes that the script and its child wrote.
func interrupt(t *testing.T, script string) (notes string, err error) {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	p := newProject(t, buildtest.Base(), toDebian)
	standIn(t, p)
	script = `scratch=$(mktemp -d); echo here >"$scratch/file"; notes="` + p.dir + `/runs"
` + script
	if err := os.WriteFile(filepath.Join(p.dir, "hang"), []byte(script), 0o644); err != nil {
		t.Fatal(err)
	}
	// Handle interrupts as edgebake's main does. A shell starts background programs with interrupts
	// ignored. Without this handler, the build's programs would ignore them too.
	ctx, cancel := signal.NotifyContext(t.Context(), os.Interrupt)
	defer cancel()
	o := p.options(filepath.Join(t.TempDir(), "x.raw"))
	o.Events = func(e Event) {
		if e.Text == "hangs" {
			cancel()
		}
	}
	if _, err = Build(ctx, p.image(t), o); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	notes = p.runs(t)
	pid := regexp.MustCompile(`child ([0-9]+)`).FindStringSubmatch(notes)
	if pid == nil {
		t.Fatalf("no child was started: %q", notes)
	}
	if state := processState(t, pid[1]); state != "" && state != "Z" {
		t.Errorf("the child of mmdebstrap still runs: %s", state)
	}
	left, globErr := filepath.Glob(filepath.Join(os.TempDir(), "*"))
	if globErr != nil || len(left) > 0 {
		t.Errorf("left behind: %q, %v", left, globErr)
	}
	return notes, err
}

// processState returns the state of a process (R, S, Z …), or "" if it does not exist.
func processState(t *testing.T, pid string) string {
	t.Helper()
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return ""
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return after[:1]
}

// TestDebianInterrupted interrupts only edgebake, not the processes that it started. The fake
// mmdebstrap waits for its children to end, and then removes its files.
func TestDebianInterrupted(t *testing.T) {
	notes, _ := interrupt(t, `
trap 'echo interrupted >>"$notes"' INT
head -c 4096 "`+"$(dirname \"$notes\")"+`/base.tar"
sh -c 'echo "child $$" >>"$0"; echo hangs >&2; exec sleep 1000' "$notes"
rm -r "$scratch"
echo cleaned >>"$notes"
exit 1
`)
	if !strings.Contains(notes, "interrupted\ncleaned\n") {
		t.Errorf("mmdebstrap got no signal: %q", notes)
	}
}

// TestDebianKilled checks that if mmdebstrap dies, its child processes are ended and its files
// removed.
func TestDebianKilled(t *testing.T) {
	_, err := interrupt(t, `
sh -c 'trap "" INT; echo "child $$" >>"$0"; exec sleep 1000' "$notes" >/dev/null 2>&1 &
while ! grep -q child "$notes"; do :; done
echo hangs >&2
exec sleep 1000
`)
	if kept := (*LeftoverError)(nil); errors.As(err, &kept) {
		t.Error(kept)
	}
}

// TestScratch checks that the command from clearScratch removes all contents of the directory and
// nothing else, for directories with unusual names, and that an empty directory needs no command.
func TestScratch(t *testing.T) {
	tmp := filepath.Join(t.TempDir(), "a [b] c")
	link := filepath.Join(t.TempDir(), "link")
	if err := errors.Join(os.Mkdir(tmp, 0o755), os.Symlink(tmp, link)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", link)
	dir, err := newScratch()
	if err != nil {
		t.Fatal(err)
	}
	if real, err := filepath.EvalSymlinks(dir); err != nil || real != dir {
		t.Errorf("%s is %s, %v", dir, real, err)
	}
	// No other user may reach a setuid program that root unpacks there.
	if fi, err := os.Stat(dir); err != nil || os.Geteuid() == 0 && fi.Mode().Perm()&0o027 != 0 || os.Geteuid() != 0 && fi.Mode().Perm() != 0o755 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	if find, err := clearScratch(dir); err != nil || find != nil {
		t.Errorf("clearScratch of an empty directory: %q, %v", find, err)
	}
	root := filepath.Join(dir, "mmdebstrap.x")
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	find, err := clearScratch(dir)
	if err != nil || len(find) == 0 {
		t.Fatalf("%q, %v", find, err)
	}
	cmd := exec.Command(find[0], find[1:]...)
	cmd.Dir = t.TempDir()
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, said)
	}
	if left, err := os.ReadDir(root); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
	if err := removeScratch(dir); err != nil {
		t.Error(err)
	}
}

// TestScratchAndApt checks that apt's user, which downloads, can enter root's directory but cannot
// replace files in it, and that other users cannot enter.
func TestScratchAndApt(t *testing.T) {
	desk.NeedRoot(t, "to make a directory that apt's user enters")
	desk.NeedProgram(t, "apt-get", "apt")
	apt, err := user.Lookup("_apt")
	if err != nil {
		t.Fatal(err)
	}
	uid, err := strconv.Atoi(apt.Uid)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", "/tmp") // every user can enter /tmp
	dir, err := newScratch()
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	cache, err := fetch.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	b := &executor{buildEnv: &buildEnv{Options: Options{Cache: cache}}, plan: &plan.Plan{Keyrings: []string{"site.asc"}}}
	sha, _, err := b.Cache.Put(t.Context(), "", strings.NewReader("key"))
	if err != nil {
		t.Fatal(err)
	}
	paths, err := b.writeKeyrings(t.Context(), debianRecipe{Keyrings: []string{sha}}, dir)
	if err != nil {
		t.Fatal(err)
	}
	as := func(uid int, script string) (string, error) {
		cmd := exec.Command("sh", "-c", script, dir, paths[0])
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: 54321}}
		said, err := cmd.CombinedOutput()
		return string(said), err
	}
	if said, err := as(uid, `cat "$1"`); err != nil || said != "key" {
		t.Errorf("apt's user cannot read the keyring: %v: %s", err, said)
	}
	for _, script := range []string{`mv "$(dirname "$1")" "$0/other"`, `mkdir "$0/new"`, `chmod 777 "$0"`, `rm -rf "$1"; ! test -e "$1"`} {
		if said, err := as(uid, script); err == nil {
			t.Errorf("apt's user succeeded in running %s: %s", script, said)
		}
	}
	if said, err := as(54321, `ls "$0"`); err == nil {
		t.Errorf("another user can list the directory: %s", said)
	}
}

// TestDebianHint checks that each known error of mmdebstrap gets the matching hint.
func TestDebianHint(t *testing.T) {
	for log, want := range map[string]string{
		"E: unshare() failed: Operation not permitted\nnewuidmap: write to uid_map failed: Operation not permitted\nE: newuidmap 11  0 1000 1 1 100000 65536 failed: \nE: child had a non-zero exit status: 1": "unprivileged_userns_clone",
		"E: unshare syscall failed: Operation not permitted":                                 "in a chroot only root can",
		"E: unshare() failed: No space left on device":                                       "max_user_namespaces",
		"I: chosen mode: unshare\nE: newuidmap 11  0 1000 1 failed: Operation not permitted": "apt-get install uidmap",
		"W: no entry in /etc/subuid for me\nE: failed to parse /etc/subuid and /etc/subgid":  "usermod --add-subuids",
		"E: cannot find newuidmap":                                                           "apt-get install uidmap",
		"tar: write error: No space left on device":                                          "set TMPDIR",
		"E: something else": "",
	} {
		if got := debianHint(log); !strings.Contains(got, want) || (want == "") != (got == "") {
			t.Errorf("hint for %q: %q, want %q", log, got, want)
		}
	}
}

// TestKeyringChanges checks that mmdebstrap gets the keyring whose digest is in the recipe, with
// the original file name, even if the file has changed since it was read.
func TestKeyringChanges(t *testing.T) {
	p := newProject(t, buildtest.Base(), func(s string) string {
		return strings.Replace(toDebian(s), "suite: trixie,", "suite: trixie, keyrings: [keys/site.asc],", 1)
	})
	standIn(t, p)
	path := filepath.Join(p.dir, "keys/site.asc")
	if err := errors.Join(os.Mkdir(filepath.Dir(path), 0o755), os.WriteFile(path, []byte("key one"), 0o600)); err != nil {
		t.Fatal(err)
	}
	// Let the fake mmdebstrap record its input.
	tool, err := exec.LookPath("mmdebstrap")
	if err != nil {
		t.Fatal(err)
	}
	script, err := os.ReadFile(tool)
	if err != nil {
		t.Fatal(err)
	}
	look := `for a; do case "$a" in --keyring=*) k=${a#--keyring=}; echo "$(basename "$k") $(stat -c %a "$k") $(cat "$k")" > "` + p.dir + `/given";; esac; done
case "$*"`
	desk.WriteProgram(t, tool, strings.Replace(string(script), `case "$*"`, look, 1))
	b := start(t, p.image(t), p.options(""))
	if err := os.WriteFile(path, []byte("key two"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.makeInputs(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(p.dir, "given")); err != nil || string(got) != "site.asc 644 key one\n" {
		t.Errorf("mmdebstrap is given %q, %v", got, err)
	}
}
