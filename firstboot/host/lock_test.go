package host

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/edgebake/edgebake/firstboot/machine"
	"github.com/edgebake/edgebake/ondisk"
)

// TestLock checks that Lock uses flock, as ipvscare does.
func TestLock(t *testing.T) {
	f := Files{Root: t.TempDir()}
	if err := os.Mkdir(filepath.Join(f.Root, "run"), 0o755); err != nil {
		t.Fatal(err)
	}
	unlock, err := f.Lock(t.Context(), ondisk.HostsLock)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(f.Root, ondisk.HostsLock)
	if st, err := os.Stat(filepath.Dir(path)); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("its directory: %v %v", st.Mode(), err)
	}
	if exec.Command("flock", "-n", path, "true").Run() == nil {
		t.Error("another program can get the lock")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := f.Lock(ctx, ondisk.HostsLock); !errors.Is(err, machine.ErrLocked) {
		t.Errorf("a second time: %v", err)
	}
	unlock()
	if out, err := exec.Command("flock", "-n", path, "true").CombinedOutput(); err != nil {
		t.Errorf("after unlocking it: %v %s", err, out)
	}
	if unlock, err = f.Lock(t.Context(), ondisk.HostsLock); err != nil {
		t.Fatal(err)
	}
	unlock()
}
