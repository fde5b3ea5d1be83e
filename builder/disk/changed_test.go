package disk

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestChangedBlobs checks that no image is made, in any format, if a blob changes during the build.
// An existing image stays.
func TestChangedBlobs(t *testing.T) {
	s, blobs := sample()
	changed := errors.New("a blob has changed")
	for name, o := range map[string]WriteOptions{
		"raw": {}, "zst": {Zstd: true}, "replacing": {Force: true},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "image")
			if o.Force {
				if err := os.WriteFile(path, []byte("old"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			l, err := Compute(s)
			if err != nil {
				t.Fatal(err)
			}
			o.Unchanged = func() error { return changed }
			o.Slot = func(Digest) ([]byte, error) {
				t.Error("the damaged image would be signed")
				return nil, changed
			}
			if _, err := Write(t.Context(), path, s, l, blobs, o); !errors.Is(err, changed) {
				t.Errorf("the damaged image was written: %v", err)
			}
			files, err := os.ReadDir(filepath.Dir(path))
			if err != nil {
				t.Fatal(err)
			}
			if old, _ := os.ReadFile(path); o.Force && string(old) != "old" || len(files) > 0 != o.Force {
				t.Errorf("left: %v", files)
			}
		})
	}
}
