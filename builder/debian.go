package builder

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/edgebake/edgebake/builder/plan"
	"github.com/edgebake/edgebake/builder/procgroup"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/overlays"
)

// debianRecipe contains everything that determines the base, except the state of Debian's archive.
// Because of the archive, the lock also contains the digest of the base.
type debianRecipe struct {
	Version    int      `json:"version"` // incremented when the arguments in this file change
	Suite      string   `json:"suite"`
	Arch       string   `json:"arch"`
	Sources    []string `json:"sources,omitempty"`
	Components []string `json:"components"`
	Keyrings   []string `json:"keyrings,omitempty"` // SHA-256
	Packages   []string `json:"packages"`
	Run        []string `json:"run,omitempty"`
	SourceDate int64    `json:"sourceDate"`
	Initrd     string   `json:"initrd"` // the script of edgebake that the initrd runs
}

// pathFilters exclude documentation and translations, but keep copyright files.
var pathFilters = []string{
	"path-exclude=/usr/share/man/*",
	"path-exclude=/usr/share/info/*",
	"path-exclude=/usr/share/locale/*",
	"path-exclude=/usr/share/doc/*",
	"path-include=/usr/share/doc/*/copyright",
}

// initrdSettings replaces settings that Debian would read from /etc/fstab when it makes the initrd:
// the initrd needs the tools for ext4 and has no swap to resume from.
const initrdSettings = "echo FSTYPE=ext4; echo RESUME=none"

// initrdEnv is the environment variable that passes the initrd script to a hook of mmdebstrap.
// mmdebstrap prints the text of its hooks, so the script is not in it.
const initrdEnv = "EDGEBAKE_INITRD"

func newDebianRecipe(img *configs.Image, date time.Time, keyrings []string) debianRecipe {
	b := img.Base.Debian
	pk := append(overlays.Packages(img), b.PackagesFor(img.Arch)...)
	slices.Sort(pk)
	return debianRecipe{
		Version: 5, Suite: b.Suite, Arch: img.Arch, Sources: b.Sources,
		Components: overlays.Components(img), Keyrings: keyrings,
		Packages: slices.Compact(pk), Run: b.Run, SourceDate: date.Unix(),
		Initrd: overlays.InitrdScript(),
	}
}

// debianKey returns the cache key of a Debian base.
func debianKey(in plan.Input) string { return in.Make + " " + string(in.Recipe) }

// makeDebian runs mmdebstrap and writes the root file system to w as a tar. It needs no root: for
// an ordinary user, mmdebstrap makes a user namespace.
func (b *executor) makeDebian(ctx context.Context, r debianRecipe, w io.Writer, say func(line string)) error {
	scratch, err := newScratch()
	if err != nil {
		return err
	}
	paths, err := b.writeKeyrings(ctx, r, scratch)
	if err != nil {
		b.keep(removeScratch(scratch))
		return err
	}
	cmd := procgroup.Command(ctx, "mmdebstrap", r.args(paths)...)
	cmd.Env = append(cmd.Env, "SOURCE_DATE_EPOCH="+strconv.FormatInt(r.SourceDate, 10), "LC_ALL=C.UTF-8", "TZ=UTC", initrdEnv+"="+r.Initrd, "TMPDIR="+scratch)
	// The base must not depend on the current directory.
	cmd.Dir = "/"
	ownMounts(cmd)
	cmd.Stdout = w
	log := &lineTail{say: say}
	cmd.Stderr = log
	// An interrupted mmdebstrap needs time to unmount and remove its directories.
	err = procgroup.Run(cmd, 30*time.Second)
	b.keep(removeScratch(scratch))
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		output := "\n" + log.text()
		if b.ShowsDetails {
			output = ""
		}
		return fmt.Errorf("mmdebstrap: %w%s%s", err, debianHint(log.text()), output)
	}
	return nil
}

// newScratch makes the directory for mmdebstrap. Its path is absolute and has no symbolic links, as
// mountsBelow requires. For root, only root and apt's user may enter the directory, because the
// base will contain root's setuid programs.
func newScratch() (string, error) {
	parent, err := filepath.Abs(os.TempDir())
	if err == nil {
		parent, err = filepath.EvalSymlinks(parent)
	}
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(parent, "edgebake-base-") // MkdirTemp sets mode 0700
	if err != nil {
		return "", err
	}
	if os.Geteuid() != 0 {
		return dir, os.Chmod(dir, 0o755)
	}
	apt, err := user.Lookup("_apt")
	if err != nil {
		return dir, nil // without its own user, apt downloads as root
	}
	uid, err := strconv.ParseUint(apt.Uid, 10, 32)
	if err == nil && grantAccess(dir, uint32(uid)) != nil {
		// The file system has no access control lists, so let the group of apt's user enter.
		var gid int
		if gid, err = strconv.Atoi(apt.Gid); err == nil {
			err = errors.Join(os.Chown(dir, -1, gid), os.Chmod(dir, 0o750))
		}
	}
	return dir, err
}

// removeScratch removes the directory, including files that a killed mmdebstrap left. Some belong
// to IDs of a user namespace: an ordinary user can remove these only through mmdebstrap.
func removeScratch(dir string) error {
	if mounts := mountsBelow(dir); len(mounts) > 0 {
		return fmt.Errorf("removing %s: something is mounted there: umount %s, then rm -r %s", dir, strings.Join(mounts, " "), dir)
	}
	err := os.RemoveAll(dir)
	if err == nil || os.Geteuid() == 0 {
		return err
	}
	argv, listErr := clearScratch(dir)
	if listErr != nil || argv == nil {
		return errors.Join(err, listErr)
	}
	cmd := procgroup.Command(context.Background(), "mmdebstrap", append([]string{"--unshare-helper"}, argv...)...)
	cmd.Dir = "/"
	if output, helpErr := cmd.CombinedOutput(); helpErr != nil {
		return fmt.Errorf("%w: mmdebstrap --unshare-helper: %w: %s", err, helpErr, bytes.TrimSpace(output))
	}
	return os.RemoveAll(dir)
}

// clearScratch returns the command that empties the directories in dir, or nil if there are none.
// Without a path, find would search the current directory, which is /.
func clearScratch(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) == 0 {
		return nil, err
	}
	args := []string{"find"}
	for _, e := range entries {
		args = append(args, filepath.Join(dir, e.Name()))
	}
	return append(args, "-xdev", "-mindepth", "1", "-delete"), nil
}

func (r debianRecipe) args(keyrings []string) []string {
	mode := "unshare"
	if os.Geteuid() == 0 {
		mode = "root"
	}
	args := []string{
		"--mode=" + mode, "--variant=minbase", "--format=tar",
		"--architectures=" + r.Arch,
		"--components=" + strings.Join(r.Components, ","),
		"--include=" + strings.Join(r.Packages, ","),
		`--aptopt=APT::Install-Recommends "false"`,
		// Skip dpkg's syncs: edgebake syncs the complete tar.
		"--dpkgopt=force-unsafe-io",
	}
	// Installing the kernel's package makes the initrd, so write the initrd's settings before.
	args = append(args, `--essential-hook=mkdir -p "$1/etc/initramfs-tools/conf.d" && { `+initrdSettings+`; } >"$1/etc/initramfs-tools/conf.d/edgebake"`)
	args = append(args, `--essential-hook=d="$1/etc/initramfs-tools/scripts/local-bottom"; mkdir -p "$d" && printf %s "${`+initrdEnv+`:?}" >"$d/edgebake" && chmod 755 "$d/edgebake"`)
	for _, f := range pathFilters {
		args = append(args, "--dpkgopt="+f)
	}
	for _, k := range keyrings {
		args = append(args, "--keyring="+k)
	}
	for _, step := range r.Run {
		args = append(args, `--customize-hook=chroot "$1" /bin/sh -euc `+shellQuote(step))
	}
	args = append(args, r.Suite, "-")
	return append(args, r.Sources...)
}

// refusedNamespace matches mmdebstrap's error if the kernel refuses to make a user namespace.
var refusedNamespace = regexp.MustCompile(`unshare(\(\)| syscall)? failed: (Operation not permitted|Permission denied|No space left on device)`)

// debianHint returns the fix for common failures, or "".
func debianHint(log string) string {
	has := func(s string) bool { return strings.Contains(log, s) }
	switch {
	case has("NO_PUBKEY") || has("not signed") || has("no Signed-By"):
		return "\nThe archive's key is unknown: install the newest debian-archive-keyring, or name the key under base.debian.keyrings."
	case missingPackage.MatchString(log):
		return "\nA package is not in this suite or component: check base.debian.packages, suite and sources."
	case has("Temporary failure resolving") || has("Could not connect") || has("Connection failed"):
		return "\nThe archive cannot be reached: check the network and http_proxy, or use another mirror (base.debian.sources) or an exported base (--base)."
	// Check this before newuidmap, which also fails in this case.
	case refusedNamespace.MatchString(log):
		return "\nThis user cannot create namespaces: set sysctl kernel.unprivileged_userns_clone=1 (Debian) or kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), and user.max_user_namespaces above 0; or run as root. A container requires --privileged; in a chroot only root can."
	case has("No space left on device"):
		return "\nThe directory for temporary files is full: set TMPDIR to one with 2 GB of free space that every user may enter."
	case has("newuidmap") || has("subuid"):
		return "\nUser namespaces need a range of ids: apt-get install uidmap, then usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $USER."
	case has("is expired") || has("is not valid yet"):
		return "\nThe archive's index does not match this computer's clock: set the clock, or name an up-to-date mirror in base.debian.sources."
	case has("cannot find /usr/bin/qemu-"):
		return "\nEmulation works on this computer, but not inside a base, which requires a static qemu: replace qemu-user-binfmt with qemu-user-static."
	// Do not match "binfmt": mmdebstrap also prints that word when it works.
	case has("Exec format error") || has("can neither be executed natively"):
		return "\nThis computer cannot run programs of that architecture: apt-get install qemu-user-static arch-test."
	}
	return ""
}

func shellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// lineTail passes lines on to say and keeps the last 25 for an error message.
type lineTail struct {
	say  func(string)
	part []byte
	last []string
}

func (t *lineTail) Write(p []byte) (int, error) {
	t.part = append(t.part, p...)
	for {
		line, rest, ok := bytes.Cut(t.part, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		t.part = rest
		s := strings.TrimRight(string(line), "\r")
		// apt overwrites its progress line: keep only its last state.
		if i := strings.LastIndexByte(s, '\r'); i >= 0 {
			s = s[i+1:]
		}
		if s == "" {
			continue
		}
		// "Ign:" marks a request that apt will repeat. If it fails again, apt reports why.
		if !strings.HasPrefix(s, "Ign:") {
			t.last = append(t.last, s)
			t.last = t.last[max(0, len(t.last)-25):]
		}
		if t.say != nil {
			t.say(s)
		}
	}
}

func (t *lineTail) text() string { return strings.Join(append(t.last, string(t.part)), "\n") }

// keyrings imports the Image's keyrings into the cache and returns their digests for the recipe:
// mmdebstrap, which may run much later, must use the same keyrings.
func (b *resolver) keyrings(ctx context.Context) (digests []string, _ error) {
	var errs []error
	for i, k := range b.img.Base.Debian.Keyrings {
		sha, err := b.importNamed(ctx, k, "")
		if err != nil {
			errs = append(errs, fieldError(fmt.Sprintf("base.debian.keyrings[%d]", i), err))
			continue
		}
		digests = append(digests, sha)
	}
	b.plan.Keyrings = b.img.Base.Debian.Keyrings
	return digests, errors.Join(errs...)
}

// writeKeyrings copies the recipe's keyrings to dir, readable for all users, and returns their
// paths. It keeps the file names, since apt detects the format by the extension.
func (b *executor) writeKeyrings(ctx context.Context, r debianRecipe, dir string) ([]string, error) {
	if len(b.plan.Keyrings) != len(r.Keyrings) {
		return nil, fmt.Errorf("the recipe of the base lists %s, but the plan has %d", configs.Count(len(r.Keyrings), "keyring"), len(b.plan.Keyrings))
	}
	var paths []string
	for i, sha := range r.Keyrings {
		name := b.plan.Keyrings[i]
		if _, err := b.importNamed(ctx, name, sha); err != nil {
			return nil, err
		}
		raw, err := b.Cache.ReadBlob(sha)
		if err != nil {
			return nil, err
		}
		own := filepath.Join(dir, fmt.Sprintf("keyring-%d", i))
		path := filepath.Join(own, filepath.Base(name))
		// Set the modes explicitly, since the umask limits them.
		if err := errors.Join(os.Mkdir(own, 0o755), os.WriteFile(path, raw, 0o644), os.Chmod(own, 0o755), os.Chmod(path, 0o644)); err != nil {
			return nil, fmt.Errorf("copying keyring %s: %w", name, err)
		}
		paths = append(paths, path)
	}
	return paths, nil
}
