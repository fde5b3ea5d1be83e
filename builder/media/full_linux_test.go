package media

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/edgebake/edgebake/test/disktest"
)

// TestStampOnAFullDisk runs itself again where a small file system can be
// mounted. The image is sparse there: its slot has holes, which a full disk
// cannot fill.
func TestStampOnAFullDisk(t *testing.T) {
	disktest.Mounted(t, `mount -t tmpfs -o size=24m none "$0"`, stampOnAFullDisk)
}

func stampOnAFullDisk(t *testing.T, dir string) {
	image := filepath.Join(dir, "g.raw")
	r := golden(t, image, 1<<20, false)
	ballast, err := os.Create(filepath.Join(dir, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = ballast.Write(make([]byte, 4096))
	}
	if err := errors.Join(ballast.Close(), os.Chmod(image, 0o644)); err != nil {
		t.Fatal(err)
	}
	_, err = Stamp(t.Context(), image, site(), StampOptions{Now: now})
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "make room") {
		t.Errorf("stamped on a full disk: %v", err)
	}
	i, err := Inspect(image)
	if err != nil {
		t.Fatal(err)
	}
	if i.Slot.State != SlotGolden || i.Slot.Golden != r.Golden {
		t.Errorf("the old slot is gone: %+v", i.Slot)
	}
	if st, err := os.Stat(image); err != nil || st.Mode().Perm() != 0o644 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	if err := os.Remove(ballast.Name()); err != nil {
		t.Fatal(err)
	}
	if got := stamp(t, image, StampOptions{}); got.Slot.Golden != r.Golden {
		t.Errorf("with room again: %+v", got)
	}
}
