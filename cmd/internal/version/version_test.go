package version

import (
	"testing"

	"golang.org/x/mod/semver"
)

// TestOfSource checks that a program without a recorded version has the source's version, in the
// format of a release.
func TestOfSource(t *testing.T) {
	if got := OfSource(); got == unknown || !semver.IsValid("v"+got) {
		t.Errorf("the version is %q", got)
	}
}
