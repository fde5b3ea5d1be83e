package builder

import (
	"debug/buildinfo"
	"fmt"
	"io"
	"strings"

	"golang.org/x/mod/semver"

	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/openyurt"
)

// yurthubPath is the path of yurthub's program in an image.
var yurthubPath = strings.TrimPrefix(openyurt.Program, "/")

// checkYurthub returns an error if yurthub has another minor version than the Image. First boot
// passes the arguments of the Image's version, and yurthub rejects unknown ones. A program without
// a version is accepted.
func checkYurthub(program io.ReaderAt, want *configs.Yurthub) error {
	if want == nil || want.Binary == nil {
		return nil
	}
	info, err := buildinfo.Read(program)
	if err != nil {
		return nil // not a Go program, or one without build information
	}
	is := openyurt.BuiltFrom(info)
	if is == "" || semver.MajorMinor(is) == semver.MajorMinor(want.Version) {
		return nil
	}
	return fmt.Errorf("is %s, but yurthub.version is %s: use the program of %s, or set yurthub.version to %s if the cluster runs that release of OpenYurt", is, want.Version, want.Version, is)
}
