package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"

	"github.com/edgebake/edgebake/builder/fetch"
)

// netfilterSuite is the Debian release of nft and iptables in kube-proxy's
// image.
const netfilterSuite = "trixie"

// netfilter returns nft, iptables and their libraries from Debian's packages, which upstream's
// kube-proxy image also has. The result is cached, so the same cache gives the same image.
func netfilter(ctx context.Context, cache *fetch.Cache, arch string, log io.Writer) ([]byte, error) {
	fmt.Fprintln(log, "fetching nft and iptables for kube-proxy from Debian")
	sha, err := cache.Make(ctx, "test/images netfilter 1 "+netfilterSuite+" "+arch, func(ctx context.Context, w io.Writer) error {
		mode := "unshare"
		if os.Geteuid() == 0 {
			mode = "root"
		}
		// The variant extract unpacks packages without setting them up. So it needs no emulation
		// for another architecture, and installs nothing but the packages' dependencies.
		cmd := exec.CommandContext(ctx, "mmdebstrap", "--mode="+mode, "--variant=extract", "--format=tar", "--architectures="+arch,
			"--include=nftables,iptables", `--aptopt=APT::Install-Recommends "false"`, netfilterSuite, "-")
		cmd.Dir = "/"
		cmd.Env = append(os.Environ(), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", sourceDate.Unix()), "LC_ALL=C.UTF-8")
		var stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = w, &stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("mmdebstrap: %w\n%s", err, stderr.Bytes())
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("fetching nft and iptables from Debian: %w", err)
	}
	made, err := os.Open(cache.BlobPath(sha))
	if err != nil {
		return nil, err
	}
	defer made.Close()
	return programsOnly(made)
}

// programsOnly keeps the programs and libraries of a root file system, and adds the links that the
// packages' scripts would make.
func programsOnly(root io.Reader) ([]byte, error) {
	type entry struct {
		tar.Header
		data []byte
	}
	var kept []entry
	for r := tar.NewReader(root); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("reading mmdebstrap's tar: %w", err)
		}
		name := path.Clean(strings.TrimPrefix(h.Name, "./"))
		if !slices.ContainsFunc([]string{"usr/sbin/", "usr/lib/", "usr/lib64/"}, func(dir string) bool { return strings.HasPrefix(name, dir) }) ||
			strings.HasPrefix(name, "usr/lib/systemd/") || h.Typeflag == tar.TypeDir {
			continue
		}
		data, err := io.ReadAll(r)
		if err != nil {
			return nil, fmt.Errorf("reading %s in mmdebstrap's tar: %w", name, err)
		}
		kept = append(kept, entry{tar.Header{Typeflag: h.Typeflag, Name: name, Linkname: h.Linkname, Mode: h.Mode, Size: int64(len(data))}, data})
	}
	link := func(name, to string) {
		kept = append(kept, entry{tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to, Mode: 0o777}, nil})
	}
	// Programs search for the loader and libraries at their paths from before the merge of /usr.
	for _, dir := range []string{"lib", "lib64"} {
		link(dir, "usr/"+dir)
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, tool := range []string{"", "-save", "-restore"} {
			link("usr/sbin/"+family+tool, family+"-nft"+tool)
		}
	}
	slices.SortFunc(kept, func(a, b entry) int { return cmp.Compare(a.Name, b.Name) })
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	made := map[string]bool{}
	for _, e := range kept {
		for i, c := range e.Name {
			if dir := e.Name[:i+1]; c == '/' && !made[dir] {
				made[dir] = true
				if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755, ModTime: sourceDate, Format: tar.FormatPAX}); err != nil {
					return nil, err
				}
			}
		}
		e.ModTime, e.Format = sourceDate, tar.FormatPAX
		if err := w.WriteHeader(&e.Header); err != nil {
			return nil, err
		}
		if _, err := w.Write(e.data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}
