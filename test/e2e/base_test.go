package e2e

import (
	"archive/tar"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
)

// TestBaseTwice builds twice from the same state of Debian's archive, with different umasks, time
// zones, languages and directories. The bases and the images must be equal. Small stand-ins
// replace Kubernetes and containerd.
func TestBaseTwice(t *testing.T) {
	desk.NeedProgram(t, "mmdebstrap", "mmdebstrap")
	bin := filepath.Join(t.TempDir(), "edgebake")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", bin, "../../cmd/edgebake").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	for _, hardware := range []string{"cloud", "generic"} {
		t.Run(hardware, func(t *testing.T) {
			if hardware != "cloud" {
				nightly(t)
			}
			build := func(name, umask string, env ...string) (dir string, files map[string]string) {
				dir = filepath.Join(t.TempDir(), name)
				if err := buildtest.Write(dir, nil, func(doc string) string {
					return strings.NewReplacer("base:\n  tar:\n    file: base.tar\n", "hardware: "+hardware+"\nbase:\n  debian: {suite: trixie}\n",
						"/etc/motd", "/etc/a-file").Replace(doc)
				}); err != nil {
					t.Fatal(err)
				}
				cmd := exec.CommandContext(t.Context(), "sh", "-c", "umask "+umask+`; exec "$0" "$@"`,
					bin, "build", "image.yaml", "--output", "x.raw", "--export-base", "made.tar")
				cmd.Dir = dir
				tmp, err := os.MkdirTemp("", "edgebake "+name)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { os.RemoveAll(tmp) })
				if err := os.Chmod(tmp, 0o755); err != nil { // for apt's own user
					t.Fatal(err)
				}
				cmd.Env = append(os.Environ(), append(env, "TMPDIR="+tmp, "EDGEBAKE_CACHE="+filepath.Join(dir, "cache"))...)
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("%s: %v\n%s", name, err, out)
				}
				return dir, digests(t, filepath.Join(dir, "made.tar"))
			}
			const packages = "./var/lib/dpkg/status"
			first, have := build("first", "022", "TZ=UTC", "LC_ALL=C.UTF-8")
			second, others := build("of another name", "077", "TZ=Asia/Kathmandu", "LC_ALL=tr_TR.UTF-8")
			if have[packages] != others[packages] { // the archive may have been updated between the two runs
				first, have = second, others
				second, others = build("third", "022", "TZ=America/St_Johns", "LC_ALL=C")
			}
			if len(have) < 5000 {
				t.Errorf("the base has only %d files", len(have))
			}
			both := maps.Clone(have)
			maps.Copy(both, others)
			for _, name := range slices.Sorted(maps.Keys(both)) {
				if have[name] != others[name] {
					t.Errorf("%s differs: %q and %q", name, have[name], others[name])
				}
			}
			for _, name := range []string{"made.tar", "x.raw"} {
				if out, err := exec.CommandContext(t.Context(), "cmp", filepath.Join(first, name), filepath.Join(second, name)).CombinedOutput(); err != nil {
					t.Errorf("%s: %v\n%s", name, err, out)
				}
			}
		})
	}
}

// digests maps the names in an archive to the digests of their contents.
func digests(t *testing.T, archive string) map[string]string {
	t.Helper()
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	files := map[string]string{}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatalf("%s: %v", archive, err)
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, r); err != nil {
			t.Fatalf("%s: %v", archive, err)
		}
		files[h.Name] = fmt.Sprintf("%v %d:%d %s %v %d:%d %v, %d bytes %.6x", h.FileInfo().Mode(), h.Uid, h.Gid, h.Linkname, h.ModTime.UTC(), h.Devmajor, h.Devminor, h.PAXRecords, h.Size, sum.Sum(nil))
	}
}
