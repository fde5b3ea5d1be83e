package configs

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestSeveralArchitectures checks that a document gives one Image for each listed architecture,
// with its own defaults, paths and packages.
func TestSeveralArchitectures(t *testing.T) {
	doc := strings.Replace(smallImage, "kind: Image\n", `kind: Image
arch: [amd64, arm64]
overlays: [{dir: "overlay-{arch}"}]
imagesFrom: ["charts/{arch}/*.yaml"]
registries: [{host: registry.test, authFile: "auth-{arch}.json"}]
agents: {firstboot: "bin/{arch}/firstboot"}
files: [{path: /etc/motd, contents: "{{.Arch}}", template: true}]
`, 1)
	all, err := ParseImages("image.yaml", []byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, i := range all {
		motd, err := i.RenderFile(*i.Files[0].Contents)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprint(i.Arch, i.Kernel.Consoles, i.Overlays[0].Dir, " ", i.ImagesFrom[0], " ", i.Registries[0].AuthFile, " ", i.Agents.Firstboot, " ", motd))
	}
	want := []string{"amd64[tty0 ttyS0,115200]overlay-amd64 charts/amd64/*.yaml auth-amd64.json bin/amd64/firstboot amd64", "arm64[tty0 ttyAMA0,115200]overlay-arm64 charts/arm64/*.yaml auth-arm64.json bin/arm64/firstboot arm64"}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if l := ListedArchitectures([]byte(doc)); !slices.Equal(l, []string{"amd64", "arm64"}) {
		t.Errorf("listed: %v", l)
	}
	if i, err := parseImage("image.yaml", []byte(doc)); err != nil || i.Arch != "amd64" {
		t.Errorf("%v", err)
	}
}

// TestOneDigestForTwo checks that one digest for the files of two architectures is rejected.
func TestOneDigestForTwo(t *testing.T) {
	i := strings.Index(smallImage, "base:")
	doc := smallImage[:i] + "arch: [amd64, arm64]\nbase: {tar: {url: \"https://example.test/{arch}.tar\", sha256: " + strings.Repeat("ab", 32) + "}}\n"
	rest := smallImage[i:]
	if at := regexp.MustCompile(`(?m)^[a-z]`).FindAllStringIndex(rest, 2); len(at) == 2 {
		doc += rest[at[1][0]:]
	}
	if _, err := ParseImages("image.yaml", []byte(doc)); err == nil || !strings.Contains(err.Error(), "base.tar.sha256: the same digest is given for the files of two architectures") {
		t.Errorf("%v\n%s", err, doc)
	}
	if _, err := ParseImages("image.yaml", []byte(doc), "arm64"); err != nil {
		t.Error(err)
	}
}

// TestGivenArchitectures checks that given architectures replace those in the document.
func TestGivenArchitectures(t *testing.T) {
	for doc, listed := range map[string][]string{
		smallImage:                     {"amd64"},
		smallImage + "arch: arm64\n":   {"arm64"},
		smallImage + "arch: [arm64]\n": {"arm64"},
		smallImage + "arch: ~\n":       {"amd64"},
	} {
		if l := ListedArchitectures([]byte(doc)); !slices.Equal(l, listed) {
			t.Errorf("listed %v, want %v:\n%s", l, listed, doc)
		}
		all, err := ParseImages("image.yaml", []byte(doc))
		if err != nil || len(all) != 1 || all[0].Arch != listed[0] {
			t.Errorf("%v, want %v: %v", all, listed, err)
		}
		all, err = ParseImages("image.yaml", []byte(doc), "arm64", "amd64")
		if err != nil || len(all) != 2 || all[0].Arch != "arm64" || all[0].Kernel.Consoles[1] != "ttyAMA0,115200" || all[1].Arch != "amd64" {
			t.Errorf("%v: %v", all, err)
		}
	}
}

func TestPackagesForArchitectures(t *testing.T) {
	b := DebianBase{Packages: []string{"vim", "intel-microcode [amd64]", "raspi-firmware=1 [arm64]"}}
	for arch, want := range map[string]string{"amd64": "[vim intel-microcode]", "arm64": "[vim raspi-firmware=1]"} {
		if got := fmt.Sprint(b.PackagesFor(arch)); got != want {
			t.Errorf("%s: %s, want %s", arch, got, want)
		}
	}
}

// TestDigestsForArchitectures checks that a digest for each architecture is required if a file has
// the same name for all of them.
func TestDigestsForArchitectures(t *testing.T) {
	sums := func(names ...string) string {
		var b strings.Builder
		for _, n := range names {
			fmt.Fprintf(&b, "%q: %s, ", n, strings.Repeat("ab", 32))
		}
		return strings.Replace(smallImage, "goModule: {}", "url: {base: 'https://x.test', sha256: {"+b.String()+"}}", 1) + "arch: [amd64, arm64]\n"
	}
	if _, err := ParseImages("image.yaml", []byte(sums("amd64/kubelet", "amd64/kubeadm", "arm64/kubelet", "arm64/kubeadm"))); err != nil {
		t.Error(err)
	}
	_, err := ParseImages("image.yaml", []byte(sums("amd64/kubelet", "amd64/kubeadm", "arm64/kubelet")))
	if err == nil || !strings.Contains(err.Error(), "kubernetes.source.url.sha256: has no digest of arm64/kubeadm") || strings.Count(err.Error(), "\n") != 0 {
		t.Errorf("%v", err)
	}
}
