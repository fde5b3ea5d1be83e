package builder

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/builder/buildtest"
)

// TestDebianMounts: what mmdebstrap mounts and leaves behind nobody else sees.
func TestDebianMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: an ordinary user's mmdebstrap has a namespace of its own")
	}
	if !rootIsMount() {
		t.Skip("SKIPPED: in a chroot mounts cannot be kept apart")
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
		t.Skip("SKIPPED: root may not mount here")
	}
	if _, err := os.Stat(filepath.Join(point, "inside")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its mount is seen from outside: %v", err)
	}
}
