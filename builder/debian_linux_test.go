package builder

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
)

// TestDebianMounts checks that other processes do not see the mounts of mmdebstrap.
func TestDebianMounts(t *testing.T) {
	desk.NeedRoot(t, "for an ordinary user, mmdebstrap makes its own namespace")
	if !rootIsMount() {
		desk.Lacks(t, "in a chroot mounts cannot be kept apart")
	}
	p := newProject(t, buildtest.Base(), toDebian)
	standIn(t, p)
	point := filepath.Join(p.dir, "mount")
	if err := os.Mkdir(point, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Build(t.Context(), p.image(t), p.options(filepath.Join(t.TempDir(), "x.raw"))); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(p.runs(t), "mounted") {
		desk.Lacks(t, "root may not mount here")
	}
	if _, err := os.Stat(filepath.Join(point, "inside")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the mount is visible outside the namespace: %v", err)
	}
}

// TestMountsBelow checks that mountsBelow finds /proc, and nothing in a new directory.
func TestMountsBelow(t *testing.T) {
	if all := mountsBelow(""); !slices.Contains(all, "/proc") {
		t.Errorf("mountsBelow does not list /proc: %q", all)
	}
	if none := mountsBelow(t.TempDir()); len(none) > 0 {
		t.Errorf("mounts below a new directory: %q", none)
	}
}

// TestReadMountPoints checks that escaped names are decoded.
func TestReadMountPoints(t *testing.T) {
	const mounts = "36 35 98:0 / / rw - ext4 /dev/vda rw\n37 36 0:5 / /tmp/a\\040b\\134040c/dev rw - devtmpfs udev rw\n"
	if got := readMountPoints(mounts); !slices.Equal(got, []string{"/", `/tmp/a b\040c/dev`}) {
		t.Errorf("%q", got)
	}
}
