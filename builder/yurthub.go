package builder

import (
	"debug/buildinfo"
	"fmt"
	"io"
	"regexp"
	"runtime/debug"

	"golang.org/x/mod/semver"

	"github.com/edgebake/edgebake/configs"
)

const (
	yurthubPath   = "usr/local/bin/yurthub"
	yurthubModule = "github.com/openyurtio/openyurt"
)

// checkYurthub refuses a program of another minor version than the Image says:
// first boot gives yurthub the arguments of that version, and it never starts
// with one that it does not know. A program that does not tell passes.
func checkYurthub(program io.ReaderAt, want *configs.Yurthub) error {
	if want == nil || want.Binary == nil {
		return nil
	}
	info, err := buildinfo.Read(program)
	if err != nil {
		return nil // not linked by Go, or stripped of what it was made of
	}
	is := openYurtVersion(info)
	if is == "" || semver.MajorMinor(is) == semver.MajorMinor(want.Version) {
		return nil
	}
	return fmt.Errorf("is %s, the Image says %s; give the program of %s, or set yurthub.version to %s if the cluster's OpenYurt is that", is, want.Version, want.Version, is)
}

var (
	// openYurtFlag is how OpenYurt's own builds, by make and of its releases,
	// give a program the version that it reports. Go records it unless
	// -trimpath was given, which they do not.
	openYurtFlag = regexp.MustCompile(`(?:^|[\s='"])` + regexp.QuoteMeta(yurthubModule) + `/pkg/projectinfo\.gitVersion=([^\s'"]*)`)
	// openYurtRelease is a commit with that tag. Anything more (v1.6.1-0a1b2c3
	// of make, v1.6.2-0.2026… of Go) lies some commits after a tag, on the way
	// to a version that nobody can tell from that.
	openYurtRelease = regexp.MustCompile(`^(v1\.[0-9]+\.[0-9]+)(?:\+dirty)?$`)
)

// openYurtVersion is the release of OpenYurt that a program was built from,
// empty where that cannot be told for sure.
func openYurtVersion(info *debug.BuildInfo) string {
	if info.Main.Path != yurthubModule {
		return ""
	}
	var said []string
	if v := info.Main.Version; v != "" && v != "(devel)" { // Go's, by the tag, since 1.24
		said = append(said, v)
	}
	for _, s := range info.Settings {
		if s.Key != "-ldflags" {
			continue
		}
		if all := openYurtFlag.FindAllStringSubmatch(s.Value, -1); len(all) > 0 {
			said = append(said, all[len(all)-1][1]) // the last one holds
		}
	}
	version := ""
	for _, v := range said {
		m := openYurtRelease.FindStringSubmatch(v)
		if m == nil || version != "" && version != m[1] {
			return ""
		}
		version = m[1]
	}
	return version
}
