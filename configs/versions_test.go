package configs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestExampleVersions checks that the examples and the images of the end-to-end tests use the
// versions that messages suggest.
func TestExampleVersions(t *testing.T) {
	version := regexp.MustCompile(`(?m)^(?:  version|kubernetesVersion): "?(v?[0-9.]+)`)
	allowed := map[string]bool{
		ExampleKubernetes: true, ExampleContainerd: true,
		"v1.36.5": true, // openyurt.yaml: OpenYurt needs an older Kubernetes
		"v1.7.0":  true, // OpenYurt
	}
	seen := 0
	for _, pattern := range []string{"examples/*.yaml", "../test/e2e/testdata/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range version.FindAllStringSubmatch(string(text), -1) {
				seen++
				if !allowed[m[1]] {
					t.Errorf("%s: version %s", file, m[1])
				}
			}
		}
	}
	if seen == 0 {
		t.Error("no example pins a version")
	}
}

// versionsImage returns an Image with these versions.
func versionsImage(t *testing.T, suite, kubernetes, containerd string) (*Image, error) {
	t.Helper()
	doc := "apiVersion: edgebake.io/v1alpha1\nkind: Image\nname: x\nsourceDate: 2026-01-01T00:00:00Z\nbase: {debian: {suite: " + suite + "}}\n" +
		"kubernetes: {version: " + kubernetes + ", source: {goModule: {}}}\ncontainerd: " + containerd + "\n"
	return parseImage("image.yaml", []byte(doc))
}

func TestVersionPairs(t *testing.T) {
	url := func(v string) string {
		return "{version: " + v + ", source: {url: {base: 'https://example.com', sha256: {containerd-" + v + "-linux-amd64.tar.gz: " + strings.Repeat("0a", 32) + "}}}}"
	}
	for _, c := range []struct {
		kubernetes, containerd string
		warning, err           string
	}{
		{ExampleKubernetes, url(ExampleContainerd), "", ""},
		{"v1.36.5", url("2.4.2"), "", ""},
		{"v1.36.5", url("2.10.0"), "containerd.version: containerd 2.10 is newer than this edgebake, which was tested with 2.4 and earlier", ""},
		{"v1.35.4", url("2.2.9"), "containerd.version: containerd 2.2 has had no security fixes since 6 November 2026: use 2.3.7", ""},
		{"v1.34.4", url("2.3.7"), "kubernetes.version: Kubernetes v1.34 has had no security fixes since 27 October 2026: use v1.37.2", ""},
		{"v1.35.4", "{debian: true}", "", ""}, // Debian supports this version
		{"v1.36.5", "{debian: true}", "containerd.debian: containerd 1.7 works with Kubernetes v1.36, but not with v1.38 and later", ""},
		{"v1.37.2", url("1.7.35"), "containerd.version: containerd 1.7 works with Kubernetes v1.37, but not with v1.38 and later", ""},
		{"v1.38.0", url("1.7.35"), "", "containerd.version: kubelet v1.38 does not start with containerd 1.7"},
		{"v1.38.0", "{debian: true}", "", "containerd.debian: kubelet v1.38 does not start with containerd 1.7"},
		{"v1.38.0", url(ExampleContainerd), "kubernetes.version: Kubernetes v1.38 is newer than this edgebake, which was tested with v1.37 and earlier", ""},
		{"v1.38.0", url("2.4.2"), "kubernetes.version: Kubernetes v1.38 is newer", ""},
	} {
		img, err := versionsImage(t, "trixie", c.kubernetes, c.containerd)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s with %s: %v, want %q", c.kubernetes, c.containerd, err, c.err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s with %s: %v", c.kubernetes, c.containerd, err)
			continue
		}
		got := img.Warnings().Error()
		if c.warning == "" && got != "" || !strings.Contains(got, c.warning) {
			t.Errorf("%s with %s warns %q, want %q", c.kubernetes, c.containerd, got, c.warning)
		}
	}
}

// TestContainerdOfDebian checks that the version of containerd in Debian's releases is known,
// unless the Image has other sources.
func TestContainerdOfDebian(t *testing.T) {
	if _, err := versionsImage(t, "bookworm", ExampleKubernetes, "{debian: true}"); err == nil || !strings.Contains(err.Error(), "containerd.debian: Debian bookworm has containerd 1.6, which is not supported") {
		t.Errorf("bookworm's own containerd: %v", err)
	}
	if _, err := versionsImage(t, "bookworm, sources: [deb http://deb.example.com/debian bookworm main]", ExampleKubernetes, "{debian: true}"); err != nil {
		t.Errorf("another source's containerd: %v", err)
	}
}

func TestYurthubOnANewerKubernetes(t *testing.T) {
	yurthub := "{debian: true}\nyurthub: {version: v1.7.0, binary: {url: 'https://example.com/yurthub', sha256: " + strings.Repeat("0a", 32) + "}}"
	for version, warns := range map[string]bool{"v1.36.5": false, "v1.37.2": true} {
		img, err := versionsImage(t, "trixie", version, yurthub)
		if err != nil {
			t.Fatal(err)
		}
		got := img.Warnings().Error()
		if strings.Contains(got, "yurthub.version: v1.7.0 is certified by OpenYurt up to Kubernetes v1.34 and was tested here up to v1.36, not with v1.37") != warns {
			t.Errorf("%s: %q", version, got)
		}
	}
}
