package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"testing"
)

// TestProgramsOnly checks that programs and libraries are kept under the names by which they are
// run, and that the archive is complete and reproducible.
func TestProgramsOnly(t *testing.T) {
	var root bytes.Buffer
	w := tar.NewWriter(&root)
	for _, h := range []tar.Header{
		{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./usr/sbin/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./usr/sbin/nft", Typeflag: tar.TypeReg, Mode: 0o755, Size: 3},
		{Name: "./usr/sbin/iptables-nft", Typeflag: tar.TypeSymlink, Linkname: "xtables-nft-multi"},
		{Name: "./usr/lib64/ld-linux-x86-64.so.2", Typeflag: tar.TypeSymlink, Linkname: "../lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"},
		{Name: "./usr/lib/x86_64-linux-gnu/libc.so.6", Typeflag: tar.TypeReg, Mode: 0o644, Size: 3},
		{Name: "./usr/lib/systemd/system/nftables.service", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "./usr/share/doc/nftables/README", Typeflag: tar.TypeReg, Mode: 0o644},
		{Name: "./etc/nftables.conf", Typeflag: tar.TypeReg, Mode: 0o644},
	} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte("abc")[:h.Size]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := programsOnly(bytes.NewReader(root.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	again, err := programsOnly(bytes.NewReader(root.Bytes()))
	if err != nil || !bytes.Equal(got, again) {
		t.Errorf("the second time it is another: %v", err)
	}
	if len(got) < 1024 || !bytes.Equal(got[len(got)-1024:], make([]byte, 1024)) {
		t.Error("the archive has no end")
	}
	links, files := map[string]string{}, map[string]string{}
	for r := tar.NewReader(bytes.NewReader(got)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		switch h.Typeflag {
		case tar.TypeSymlink:
			links[h.Name] = h.Linkname
		case tar.TypeReg:
			files[h.Name] = string(b)
		}
		if !h.ModTime.Equal(sourceDate) {
			t.Errorf("%s is of %v", h.Name, h.ModTime)
		}
	}
	if len(files) != 2 || files["usr/sbin/nft"] != "abc" || files["usr/lib/x86_64-linux-gnu/libc.so.6"] != "abc" {
		t.Errorf("files: %q", files)
	}
	for name, to := range map[string]string{"lib64": "usr/lib64", "lib": "usr/lib", "usr/sbin/iptables": "iptables-nft", "usr/sbin/ip6tables-restore": "ip6tables-nft-restore",
		"usr/sbin/iptables-nft": "xtables-nft-multi", "usr/lib64/ld-linux-x86-64.so.2": "../lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"} {
		if links[name] != to {
			t.Errorf("%s leads to %q, want %q", name, links[name], to)
		}
	}
}
