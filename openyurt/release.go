package openyurt

import (
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
)

// Forms in which yurthub runs.
const (
	FormUnit      = "unit"
	FormStaticPod = "staticPod"
)

// release is what a minor release of v1 has that not all have. Its flags are in
// flags.
type release struct {
	minor int
	// form: from 1.7 on yurthub can use kubelet's certificate, and so run as a
	// unit beside a node that has joined. Before, it runs as a static pod, with an
	// identity of its own.
	form string
	// pools is the version of the NodePools that yurthub lists.
	pools string
	// dummy is yurthub's interface, unless its arguments name another.
	dummy string
}

// releases are those whose contracts were tried, the oldest first.
var releases = []release{
	{6, FormStaticPod, "v1beta1", "yurthub-dummy0"},
	{7, FormUnit, "v1beta2", "hub-dummy0"},
}

// The oldest and the newest minor release that is supported, and the first that
// runs as a unit.
var (
	Oldest    = releases[0].minor
	Newest    = releases[len(releases)-1].minor
	FirstUnit = releases[slices.IndexFunc(releases, func(r release) bool { return r.form == FormUnit })].minor
)

// releaseOf is what is known of a minor release: one that is newer than all that
// are known is like the newest.
func releaseOf(minor int) release {
	of := releases[0]
	for _, r := range releases {
		if r.minor <= minor {
			of = r
		}
	}
	return of
}

// FormOf is how a minor release runs.
func FormOf(minor int) string { return releaseOf(minor).form }

// LastKubernetesOfPods is the last minor release of Kubernetes whose kubelet
// runs pods behind a yurthub of form staticPod. Later ones list Services by
// spec.clusterIP (OpenYurt's issue 2379), of which it knows nothing, and start
// no pod without the list.
const LastKubernetesOfPods = 30

// The newest minor releases of Kubernetes for which OpenYurt certifies yurthub as a unit, and
// with which it was tested here.
const (
	CertifiedKubernetes = 34
	NewestKubernetes    = 36
)

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

// RunsAsPod reports whether a version is a supported one that runs as a static
// pod.
func RunsAsPod(version string) bool {
	minor, ok := Minor(version)
	return ok && minor >= Oldest && FormOf(minor) == FormStaticPod
}

var reported = regexp.MustCompile(`\b(v1\.\d{1,3})\.\d`)

// Reported is the release, e.g. v1.7, in what `yurthub --version` prints; "": it
// was built by hand, without one.
func Reported(output string) string {
	if m := reported.FindStringSubmatch(output); m != nil {
		return m[1]
	}
	return ""
}

// FirstOf is the first version of a release that Reported returned; "" of "".
func FirstOf(release string) string {
	if release == "" {
		return ""
	}
	return release + ".0"
}

// CanBorrow reports whether a release, as Reported returns it, can use kubelet's
// certificate.
func CanBorrow(release string) bool {
	minor, ok := Minor(FirstOf(release))
	return ok && FormOf(minor) == FormUnit
}

// module is OpenYurt's Go module.
const module = "github.com/openyurtio/openyurt"

var (
	// versionFlag is how OpenYurt's own builds, by make and of its releases,
	// give a program the version that it reports. Go records it unless
	// -trimpath was given, which they do not.
	versionFlag = regexp.MustCompile(`(?:^|[\s='"])` + regexp.QuoteMeta(module) + `/pkg/projectinfo\.gitVersion=([^\s'"]*)`)
	// tagged is a commit with that tag. Anything more (v1.6.1-0a1b2c3 of make,
	// v1.6.2-0.2026… of Go) lies some commits after a tag, on the way to a
	// version that nobody can tell from that.
	tagged = regexp.MustCompile(`^(v1\.[0-9]+\.[0-9]+)(?:\+dirty)?$`)
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
		m := tagged.FindStringSubmatch(v)
		if m == nil || version != "" && version != m[1] {
			return ""
		}
		version = m[1]
	}
	return version
}
