package builder

import (
	"archive/tar"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/buildtest"
)

// TestMemory checks that a tree of 100,000 entries is built in 256 MiB, and prints the memory per
// entry.
func TestMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("NOT TESTED: -short")
	}
	rss := func(entries int) int64 {
		base := buildtest.Base()
		for i := range entries {
			if i%100 == 0 {
				base = append(base, buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: fmt.Sprintf("./usr/share/many/%03d/", i/100), Mode: 0o755}})
			}
			base = append(base, buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("./usr/share/many/%03d/file-%06d", i/100, i), Mode: 0o644}, Body: "content"})
		}
		p := newProject(t, base, nil)
		exe, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		out := t.TempDir()
		cmd := exec.Command(exe, "-test.run", "^TestDoubleBuild$")
		cmd.Env = append(os.Environ(), "EDGEBAKE_TEST_BUILD="+p.dir, "EDGEBAKE_TEST_OUT="+filepath.Join(out, "x.raw"), "EDGEBAKE_CACHE="+filepath.Join(out, "cache"))
		said, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, said)
		}
		// wait's maximum would include this process's memory before exec.
		_, peak, ok := strings.Cut(string(said), "VmHWM:")
		var kib int64
		if _, err := fmt.Sscan(peak, &kib); !ok || err != nil {
			t.Fatalf("no peak in %q", said)
		}
		return kib << 10
	}
	few, many := rss(1000), rss(100_000)
	t.Logf("peak memory: %d MiB for 1,000 entries, %d MiB for 100,000: %d bytes an entry", few>>20, many>>20, (many-few)/99_000)
	if many > 256<<20 {
		t.Errorf("100,000 entries take %d MiB, want at most 256", many>>20)
	}
}
