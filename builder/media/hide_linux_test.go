package media

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/edgebake/edgebake/ondisk/file"
)

// TestStampHidesFromReaders checks that an image is not stamped in place while another program has
// it open for reading.
func TestStampHidesFromReaders(t *testing.T) {
	for _, name := range []string{"g.raw", "g.raw.zst"} {
		path := filepath.Join(t.TempDir(), name)
		golden(t, path, 1<<20, name != "g.raw")
		if err := os.Chmod(path, 0o644); err != nil {
			t.Fatal(err)
		}
		reader, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer reader.Close()
		for range 2 {
			if _, err := Stamp(t.Context(), path, site(), StampOptions{Now: now}); !errors.Is(err, file.ErrOpen) {
				t.Errorf("%s: %v", name, err)
			}
			if _, err := reader.Seek(0, io.SeekStart); err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(reader); err != nil || bytes.Contains(b, []byte(token)) {
				t.Errorf("%s: the reader has the token, %v", name, err)
			}
		}
		reader.Close()
		stamp(t, path, StampOptions{})
	}
}
