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

// release has the properties of a minor release of v1 that differ between releases. Flags are
// in flags.
type release struct {
	minor int
	// form: from 1.7 on, yurthub can use kubelet's certificate, and so run as a unit on a node
	// that has joined. Before, it runs as a static pod with its own identity.
	form string
	// pools is the version of the NodePools that yurthub lists.
	pools string
	// dummy is yurthub's interface, unless its arguments name another one.
	dummy string
}

// releases are the tested releases, oldest first.
var releases = []release{
	{6, FormStaticPod, "v1beta1", "yurthub-dummy0"},
	{7, FormUnit, "v1beta2", "hub-dummy0"},
}

// The oldest and newest supported minor releases, and the first one that runs as a unit.
var (
	Oldest    = releases[0].minor
	Newest    = releases[len(releases)-1].minor
	FirstUnit = releases[slices.IndexFunc(releases, func(r release) bool { return r.form == FormUnit })].minor
)

// releaseOf returns the properties of a minor release. A newer one than all known ones is
// treated as the newest.
func releaseOf(minor int) release {
	of := releases[0]
	for _, r := range releases {
		if r.minor <= minor {
			of = r
		}
	}
	return of
}

// FormOf returns the form in which a minor release runs.
func FormOf(minor int) string { return releaseOf(minor).form }

// LastKubernetesOfPods is the last minor release of Kubernetes whose kubelet runs pods behind
// a yurthub of the form staticPod. Later kubelets list Services by spec.clusterIP, which that
// yurthub does not support (OpenYurt's issue 2379), and start no pod without that list.
const LastKubernetesOfPods = 30

// The newest minor releases of Kubernetes for which OpenYurt certifies yurthub as a unit, and
// with which it was tested here.
const (
	CertifiedKubernetes = 34
	NewestKubernetes    = 36
)

// Release returns a minor release as people write it, e.g. v1.7.
func Release(minor int) string { return "v1." + strconv.Itoa(minor) }

// Supported returns the range of supported releases as text.
func Supported() string { return Release(Oldest) + " to " + Release(Newest) }

// Example returns a supported version.
func Example() string { return Release(Newest) + ".0" }

// VersionForm matches a version of yurthub.
var VersionForm = regexp.MustCompile(`^v1\.([0-9]+)\.([0-9]+)(-[0-9A-Za-z.]+)?$`)

// Minor returns the minor release of a version such as v1.7.0.
func Minor(version string) (int, bool) {
	m := VersionForm.FindStringSubmatch(version)
	if m == nil {
		return 0, false
	}
	minor, err := strconv.Atoi(m[1])
	return minor, err == nil
}

// RunsAsPod reports whether a version is supported and runs as a static pod.
func RunsAsPod(version string) bool {
	minor, ok := Minor(version)
	return ok && minor >= Oldest && FormOf(minor) == FormStaticPod
}

var reported = regexp.MustCompile(`\b(v1\.\d{1,3})\.\d`)

// Reported returns the release, e.g. v1.7, in the output of `yurthub --version`; "" if it was
// built by hand, without one.
func Reported(output string) string {
	if m := reported.FindStringSubmatch(output); m != nil {
		return m[1]
	}
	return ""
}

// FirstOf returns the first version of a release as of Reported; "" for "".
func FirstOf(release string) string {
	if release == "" {
		return ""
	}
	return release + ".0"
}

// CanBorrow reports whether a release, as of Reported, can use kubelet's certificate.
func CanBorrow(release string) bool {
	minor, ok := Minor(FirstOf(release))
	return ok && FormOf(minor) == FormUnit
}

// module is OpenYurt's Go module.
const module = "github.com/openyurtio/openyurt"

var (
	// versionFlag is how OpenYurt's own builds, by make and for its releases, set the version
	// that a program reports. Go records it unless -trimpath was given, which they do not use.
	versionFlag = regexp.MustCompile(`(?:^|[\s='"])` + regexp.QuoteMeta(module) + `/pkg/projectinfo\.gitVersion=([^\s'"]*)`)
	// tagged matches a commit with a tag. Anything longer (v1.6.1-0a1b2c3 of make,
	// v1.6.2-0.2026… of Go) is some commits after a tag, so that its version is uncertain.
	tagged = regexp.MustCompile(`^(v1\.[0-9]+\.[0-9]+)(?:\+dirty)?$`)
)

// BuiltFrom returns the release of OpenYurt that a program was built from, "" if that is
// uncertain.
func BuiltFrom(info *debug.BuildInfo) string {
	if info.Main.Path != module {
		return ""
	}
	var said []string
	if v := info.Main.Version; v != "" && v != "(devel)" { // from the tag, since Go 1.24
		said = append(said, v)
	}
	for _, s := range info.Settings {
		if s.Key != "-ldflags" {
			continue
		}
		if all := versionFlag.FindAllStringSubmatch(s.Value, -1); len(all) > 0 {
			said = append(said, all[len(all)-1][1]) // the last one applies
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
