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

// TestStampOnAFullDisk runs itself again in a namespace, in which it can mount a small file system.
// The slot of the sparse image has holes: on a full disk, these cannot be filled.
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
		t.Errorf("after space was freed: %+v", got)
	}
}

// TestStampManyOnASmallDisk checks that a lack of space is reported before anything is written.
// Files that will be replaced count as free space.
func TestStampManyOnASmallDisk(t *testing.T) {
	disktest.Mounted(t, `mount -t tmpfs -o size=24m none "$0"`, stampManyOnASmallDisk)
}

func stampManyOnASmallDisk(t *testing.T, dir string) {
	image, out := filepath.Join(dir, "g.raw"), filepath.Join(dir, "a", "out")
	golden(t, image, 1<<20, false)
	for what, o := range map[string]ManyOptions{"400 images": {}, "400 slots": {Slots: true}} {
		o.Now = now
		_, err := StampMany(t.Context(), image, named(400), out, o)
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "too little for "+what+" of at least") ||
			!strings.Contains(err.Error(), "directory "+dir+" has ") {
			t.Errorf("%s: %v", what, err)
		}
		if !o.Slots && !strings.Contains(err.Error(), "or write only the slots, 1") {
			t.Errorf("the error for images suggests nothing: %v", err)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
			t.Errorf("%s: %v, %v", what, entries, err)
		}
	}
	o := ManyOptions{StampOptions: StampOptions{Now: now, Force: true}, Slots: true}
	for range 2 { // the second time, there is only enough space because the existing files are replaced
		if _, err := StampMany(t.Context(), image, named(50), out, o); err != nil {
			t.Fatal(err)
		}
	}
	ballast, err := os.Create(filepath.Join(dir, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	defer ballast.Close()
	for err == nil {
		_, err = ballast.Write(make([]byte, 4096))
	}
	_, err = Stamp(t.Context(), image, site(), StampOptions{Now: now, Output: filepath.Join(dir, "one.raw")})
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "too little for the image of at least") {
		t.Errorf("one copy on a full disk: %v", err)
	}
}
