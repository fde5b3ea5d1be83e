package walls

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDecisionHeadings: decisions are numbered without a gap, and begin with the
// number of their file.
func TestDecisionHeadings(t *testing.T) {
	files, err := filepath.Glob("../../docs/decisions/*.md")
	if err != nil || len(files) < 36 {
		t.Fatalf("%d decisions, %v", len(files), err)
	}
	for i, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		number := fmt.Sprintf("%04d", i+1)
		if !strings.HasPrefix(filepath.Base(f), number+"-") {
			t.Errorf("%s: expected decision %s", f, number)
		}
		heading, _, _ := strings.Cut(string(text), "\n")
		title, ok := strings.CutPrefix(heading, "# "+number+": ")
		if !ok || title == "" {
			t.Errorf("%s: its heading is %q, expected \"# %s: TITLE\"", f, heading, number)
		}
	}
}
