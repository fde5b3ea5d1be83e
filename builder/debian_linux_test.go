package builder

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/buildtest"
	"github.com/edgebake/edgebake/test/desk"
)

// TestDebianMounts: what mmdebstrap mounts and leaves behind nobody else sees.
func TestDebianMounts(t *testing.T) {
	desk.NeedRoot(t, "an ordinary user's mmdebstrap has a namespace of its own")
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
		t.Errorf("its mount is seen from outside: %v", err)
	}
}
