package openyurt

import (
	"regexp"
	"runtime/debug"
	"strconv"
)

// Oldest and newest minor releases of v1 whose contracts were tried.
const (
	Oldest = 6
	Newest = 7
)

// Forms in which yurthub runs.
const (
	FormUnit      = "unit"
	FormStaticPod = "staticPod"
)

// FirstUnit is the first minor release that can use kubelet's certificate, and
// so run as a unit beside a node that has joined. Those before it run as a
// static pod, with an identity of their own.
const FirstUnit = 7

// FormOf is how a minor release runs.
func FormOf(minor int) string {
	if minor < FirstUnit {
		return FormStaticPod
	}
	return FormUnit
}

// LastKubernetesOfPods is the last minor release of Kubernetes whose kubelet
// runs pods behind a yurthub of form staticPod. Later ones list Services by
// spec.clusterIP (OpenYurt's issue 2379), of which it knows nothing, and start
// no pod without the list.
const LastKubernetesOfPods = 30

// Release is a minor release as people write it, e.g. v1.7.
func Release(minor int) string { return "v1." + strconv.Itoa(minor) }

// Supported names the releases that edgebake supports.
func Supported() string { return Release(Oldest) + " to " + Release(Newest) }

// Example is a version that edgebake supports.
func Example() string { return Release(Newest) + ".0" }

// VersionForm is what a version of yurthub looks like.
var VersionForm = regexp.MustCompile(`^v1\.([0-9]+)\.([0-9]+)(-[0-9A-Za-z.]+)?$`)

// Minor is the minor release of a version such as v1.7.0.
func Minor(version string) (int, bool) {
	m := VersionForm.FindStringSubmatch(version)
	if m == nil {
		return 0, false
	}
	minor, err := strconv.Atoi(m[1])
	return minor, err == nil
}

// RunsAsPod reports whether a version is a served one that runs as a static
// pod.
func RunsAsPod(version string) bool {
	minor, ok := Minor(version)
	return ok && minor >= Oldest && FormOf(minor) == FormStaticPod
}

var reported = regexp.MustCompile(`\b(v1\.\d{1,3})\.\d`)

// Reported is the release, as v1.7, in what `yurthub --version` prints; "": it
// was built by hand, without one.
func Reported(output string) string {
	if m := reported.FindStringSubmatch(output); m != nil {
		return m[1]
	}
	return ""
}

// CanBorrow reports whether a release, as Reported has it, can use kubelet's
// certificate.
func CanBorrow(release string) bool {
	minor, ok := Minor(release + ".0")
	return ok && FormOf(minor) == FormUnit
}

// module is OpenYurt's Go module.
const module = "github.com/openyurtio/openyurt"

var (
	// versionFlag is how OpenYurt's own builds, by make and of its releases,
	// give a program the version that it reports. Go records it unless
	// -trimpath was given, which they do not.
	versionFlag = regexp.MustCompile(`(?:^|[\s='"])` + regexp.QuoteMeta(module) + `/pkg/projectinfo\.gitVersion=([^\s'"]*)`)
	// release is a commit with that tag. Anything more (v1.6.1-0a1b2c3 of make,
	// v1.6.2-0.2026… of Go) lies some commits after a tag, on the way to a
	// version that nobody can tell from that.
	release = regexp.MustCompile(`^(v1\.[0-9]+\.[0-9]+)(?:\+dirty)?$`)
)

// BuiltFrom is the release of OpenYurt that a program was built from, empty
// where that is uncertain.
func BuiltFrom(info *debug.BuildInfo) string {
	if info.Main.Path != module {
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
		if all := versionFlag.FindAllStringSubmatch(s.Value, -1); len(all) > 0 {
			said = append(said, all[len(all)-1][1]) // the last one holds
		}
	}
	version := ""
	for _, v := range said {
		m := release.FindStringSubmatch(v)
		if m == nil || version != "" && version != m[1] {
			return ""
		}
		version = m[1]
	}
	return version
}
