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

// release has the properties that differ between minor releases of v1. Differences of flags are in
// flags.
type release struct {
	minor int
	// form is how yurthub runs. From 1.7 on, it can use kubelet's certificate, so it can run as a
	// unit on a node that has joined. Before 1.7, it runs as a static pod with its own identity.
	form string
	// pools is the API version of the NodePools that yurthub lists.
	pools string
	// dummy is the name of yurthub's interface, if its arguments do not name another one.
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

// releaseOf returns the properties of a minor release. A release newer than all known ones is
// treated like the newest.
func releaseOf(minor int) release {
	of := releases[0]
	for _, r := range releases {
		if r.minor <= minor {
			of = r
		}
	}
	return of
}

// FormOf returns the form in which yurthub of a minor release runs.
func FormOf(minor int) string { return releaseOf(minor).form }

// LastKubernetesOfPods is the last minor release of Kubernetes whose kubelet can run pods behind
// yurthub as a static pod. Later kubelets list Services by spec.clusterIP before they start pods,
// which that yurthub does not support (OpenYurt issue 2379).
const LastKubernetesOfPods = 30

// The newest minor releases of Kubernetes for yurthub as a unit: CertifiedKubernetes is OpenYurt's
// own limit, NewestKubernetes the newest that edgebake tests.
const (
	CertifiedKubernetes = 34
	NewestKubernetes    = 36
)

// Release returns a minor release in its usual form, for example v1.7.
func Release(minor int) string { return "v1." + strconv.Itoa(minor) }

// Supported returns the range of supported releases as text.
func Supported() string { return Release(Oldest) + " to " + Release(Newest) }

// Example returns an example of a supported version.
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

// Reported returns the release, for example v1.7, from the output of `yurthub --version`, or "" if
// that names no release, because the program was built by hand.
func Reported(output string) string {
	if m := reported.FindStringSubmatch(output); m != nil {
		return m[1]
	}
	return ""
}

// FirstOf returns the first version of a release in the form of Reported; "" for "".
func FirstOf(release string) string {
	if release == "" {
		return ""
	}
	return release + ".0"
}

// UsesKubeletCertificate reports whether a release, in the form of Reported, can use kubelet's
// certificate.
func UsesKubeletCertificate(release string) bool {
	minor, ok := Minor(FirstOf(release))
	return ok && FormOf(minor) == FormUnit
}

// module is OpenYurt's Go module.
const module = "github.com/openyurtio/openyurt"

var (
	// versionFlag matches the linker flag with which OpenYurt's own builds set the version that a
	// program reports. Go records that flag, because these builds do not use -trimpath.
	versionFlag = regexp.MustCompile(`(?:^|[\s='"])` + regexp.QuoteMeta(module) + `/pkg/projectinfo\.gitVersion=([^\s'"]*)`)
	// tagged matches the version of a tagged commit. A longer version, such as v1.6.1-0a1b2c3
	// (make) or v1.6.2-0.2026… (Go), means commits after the tag, so its release is uncertain.
	tagged = regexp.MustCompile(`^(v1\.[0-9]+\.[0-9]+)(?:\+dirty)?$`)
)

// BuiltFrom returns the release of OpenYurt from which a program was built; "" if that is
// uncertain.
func BuiltFrom(info *debug.BuildInfo) string {
	if info.Main.Path != module {
		return ""
	}
	var versions []string
	if v := info.Main.Version; v != "" && v != "(devel)" { // the version from the tag, since Go 1.24
		versions = append(versions, v)
	}
	for _, s := range info.Settings {
		if s.Key != "-ldflags" {
			continue
		}
		if all := versionFlag.FindAllStringSubmatch(s.Value, -1); len(all) > 0 {
			versions = append(versions, all[len(all)-1][1]) // the last one applies
		}
	}
	version := ""
	for _, v := range versions {
		m := tagged.FindStringSubmatch(v)
		if m == nil || version != "" && version != m[1] {
			return ""
		}
		version = m[1]
	}
	return version
}
