package version

import (
	"testing"

	"golang.org/x/mod/semver"
)

// TestOfSource: a program without a stamp tells the source's version, in the
// form of a release's.
func TestOfSource(t *testing.T) {
	if got := OfSource(); got == unknown || !semver.IsValid("v"+got) {
		t.Errorf("it says %q", got)
	}
}
