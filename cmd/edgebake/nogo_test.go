package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/edgebake/edgebake/test/buildtest"
)

// withoutGo sets PATH to the programs that make a Debian base, without Go.
func withoutGo(t *testing.T, base string) {
	t.Helper()
	debianOf(t, base)
	bin, _, _ := strings.Cut(os.Getenv("PATH"), string(os.PathListSeparator))
	cat, err := exec.LookPath("cat") // called by the fake mmdebstrap
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(cat, filepath.Join(bin, "cat")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
}

// TestReleaseServerExample builds the guide's example whose programs come from a mirror, without Go
// in PATH. The test's mirror has the files that the guide names.
func TestReleaseServerExample(t *testing.T) {
	const example = "../../configs/examples/release-server.yaml"
	doc, err := os.ReadFile(example)
	if err != nil {
		t.Fatal(err)
	}
	guide, err := os.ReadFile("../../docs/guide.md")
	if err != nil {
		t.Fatal(err)
	}
	c := newCLI(t)
	if err := buildtest.Write(c.dir, buildtest.Base(), nil); err != nil {
		t.Fatal(err)
	}
	program := buildtest.Program("amd64")
	var entries []buildtest.Entry
	for _, name := range []string{"containerd", "containerd-shim-runc-v2", "ctr"} {
		entries = append(entries, buildtest.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: "bin/" + name, Mode: 0o755}, Body: program + name})
	}
	raw, err := buildtest.Tar(entries)
	if err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	z := gzip.NewWriter(&archive)
	if _, err := z.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	files := map[string]string{
		"kubernetes/v1.37.2/bin/linux/amd64/kubelet":            program + "kubelet",
		"kubernetes/v1.37.2/bin/linux/amd64/kubeadm":            program + "kubeadm",
		"containerd/v2.3.7/containerd-2.3.7-linux-amd64.tar.gz": archive.String(),
	}
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := strings.TrimPrefix(r.URL.Path, "/")
		asked = append(asked, name)
		if files[name] == "" {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, files[name])
	}))
	defer server.Close()

	const placeholder = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	text := strings.ReplaceAll(string(doc), "https://mirror.example.com", server.URL) + "agents: {firstboot: programs/firstboot, ipvscare: programs/ipvscare}\n"
	withoutGo(t, filepath.Join(c.dir, "base.tar"))

	// In the unedited example, the digest is a placeholder.
	c.file("image.yaml", text)
	c.run(0, "validate", "image.yaml")
	c.run(1, "build", "image.yaml")
	c.want(c.err, "expected "+placeholder)

	asked = nil
	for path, body := range files {
		sum := sha256.Sum256([]byte(body))
		name := filepath.Base(path)
		if !strings.Contains(text, name+": "+placeholder) {
			t.Errorf("the example has no digest of %s", name)
		}
		text = strings.Replace(text, name+": "+placeholder, name+": "+hex.EncodeToString(sum[:]), 1)
	}
	c.file("image.yaml", text)
	c.run(0, "build", "image.yaml")
	c.want(c.out, "my-edge.raw: amd64, Kubernetes v1.37.2, containerd 2.3.7")
	slices.Sort(asked)
	for path := range files {
		if !slices.Contains(asked, path) {
			t.Errorf("%s was not requested: %q", path, asked)
		}
		if !strings.Contains(string(guide), path) {
			t.Errorf("the guide does not say that the mirror has %s", path)
		}
	}
	if !strings.Contains(string(guide), filepath.Base(example)) {
		t.Error("the guide does not name the example")
	}
}
