// Package vm boots a small VM in which ipvscare is tested. The VM has Debian's kernel, and an
// initramfs with a static test binary, ipvscare, kernel modules and keepalived. It has no disk and
// no network card: its nodes and masters are network namespaces.
package vm

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/u-root/u-root/pkg/cpio"
	"github.com/ulikunitz/xz"
)

// suite and packages determine where the guest's files come from.
const suite = "trixie"

func packages() []string {
	return []string{"linux-image-cloud-amd64", "keepalived", "ipvsadm", "iproute2", "nftables", "iptables", "ipset"}
}

// programs returns the paths of programs in the packages. Their libraries are added.
func programs() []string {
	return []string{"usr/sbin/keepalived", "usr/sbin/ipvsadm", "usr/sbin/tc", "usr/bin/ip", "usr/sbin/nft",
		"usr/sbin/xtables-nft-multi", "usr/sbin/ipset"}
}

// iptables returns the names under which xtables-nft-multi is called.
func iptables() []string {
	var names []string
	for _, family := range []string{"iptables", "ip6tables"} {
		names = append(names, family, family+"-save", family+"-restore")
	}
	return names
}

// extensions is the directory of iptables' own libraries.
const extensions = "usr/lib/x86_64-linux-gnu/xtables/"

// buildOptions is a file without which keepalived prints an error.
const buildOptions = "etc/keepalived/keepalived.config-opts"

// modules returns the names of kernel modules for the VM. Their dependencies are added.
func modules() []string {
	return []string{"ip_vs", "ip_vs_rr", "ip_vs_wrr", "ip_vs_lc", "ip_vs_wlc", "ip_vs_sh", "ip_vs_dh",
		"veth", "bridge", "dummy", "sch_netem", "inet_diag", "tcp_diag", "ipv6",
		"nf_tables", "nft_ct", "nft_masq", "nft_chain_nat", "nf_conntrack_netlink",
		// Modules that kube-proxy needs:
		"nft_compat", "nft_nat", "nft_fib_ipv4", "nft_numgen", "nft_limit", "nft_reject_ipv4", "nft_hash",
		"xt_comment", "xt_tcpudp", "xt_conntrack", "xt_mark", "xt_MASQUERADE", "xt_addrtype", "xt_statistic", "xt_nat", "xt_set", "ipt_REJECT",
		"ip_set_hash_ip", "ip_set_hash_ipport", "ip_set_hash_ipportip", "ip_set_hash_ipportnet", "ip_set_hash_net", "ip_set_bitmap_port"}
}

// Missing returns an error that lists what this machine lacks to run the VM.
func Missing() error {
	var errs []error
	for _, p := range []string{"qemu-system-x86_64", "mmdebstrap"} {
		if _, err := exec.LookPath(p); err != nil {
			errs = append(errs, err)
		}
	}
	if runtime.GOARCH != "amd64" {
		errs = append(errs, fmt.Errorf("the guest is for amd64, this is %s", runtime.GOARCH))
	}
	return errors.Join(errs...)
}

// debian returns a tar of the packages, which is made once and kept in the user's cache directory.
func debian(ctx context.Context, log io.Writer) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	key := sha256.Sum256([]byte(suite + strings.Join(packages(), ",")))
	dir := filepath.Join(cache, "edgebake-test")
	file := filepath.Join(dir, fmt.Sprintf("ipvs-guest-%x.tar", key[:6]))
	if _, err := os.Stat(file); err == nil {
		return file, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	tmp := file + fmt.Sprintf(".%d.tmp.tar", os.Getpid())
	defer os.Remove(tmp)
	cmd := exec.CommandContext(ctx, "mmdebstrap", "--variant=extract", "--architectures=amd64",
		"--include="+strings.Join(packages(), ","), suite, tmp)
	cmd.Stderr = log
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("making the guest's files with %v: %w", cmd.Args, err)
	}
	return file, os.Rename(tmp, file)
}

// tree is a tar in memory, whose files are accessed by path.
type tree struct {
	files map[string][]byte
	links map[string]string // maps a path to the path of its target
	base  map[string]string // maps the file name of a shared library to its path
}

func readTree(file string) (*tree, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	t := &tree{files: make(map[string][]byte), links: make(map[string]string), base: make(map[string]string)}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if err == io.EOF {
			return t, nil
		}
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", file, err)
		}
		name := path.Clean(h.Name)
		wanted := strings.HasPrefix(name, "boot/vmlinuz") || strings.Contains(name, "/modules/") ||
			strings.Contains(name, ".so") || slices.Contains(programs(), name) || name == buildOptions
		switch {
		case h.Typeflag == tar.TypeSymlink:
			target := h.Linkname
			if !path.IsAbs(target) {
				target = path.Join(path.Dir(name), target)
			}
			t.links[name] = strings.TrimPrefix(path.Clean(target), "/")
		case h.Typeflag == tar.TypeLink:
			t.links[name] = path.Clean(h.Linkname)
		case h.Typeflag == tar.TypeReg && wanted:
			b, err := io.ReadAll(r)
			if err != nil {
				return nil, fmt.Errorf("reading %s of %s: %w", name, file, err)
			}
			t.files[name] = b
		default:
			continue
		}
		if strings.Contains(name, ".so") {
			t.base[path.Base(name)] = name
		}
	}
}

// open returns the content of a file, following links.
func (t *tree) open(name string) ([]byte, error) {
	for range 10 {
		if b, ok := t.files[name]; ok {
			return b, nil
		}
		next, ok := t.links[name]
		if !ok {
			break
		}
		name = next
	}
	return nil, fmt.Errorf("%s is not in the guest's packages", name)
}

// libraries adds the shared libraries that a program needs to into.
func (t *tree) libraries(bin []byte, into map[string][]byte) error {
	e, err := elf.NewFile(bytes.NewReader(bin))
	if err != nil {
		return err
	}
	needed, err := e.ImportedLibraries()
	if err != nil {
		return err
	}
	for _, p := range e.Progs {
		if p.Type == elf.PT_INTERP {
			b, err := io.ReadAll(p.Open())
			if err != nil {
				return err
			}
			name := strings.Trim(string(b), "\x00/")
			data, err := t.open(t.base[path.Base(name)])
			if err != nil {
				return err
			}
			into[name] = data
		}
	}
	for _, lib := range needed {
		name := "lib/x86_64-linux-gnu/" + lib
		if _, ok := into[name]; ok {
			continue
		}
		data, err := t.open(t.base[lib])
		if err != nil {
			return fmt.Errorf("library %s: %w", lib, err)
		}
		into[name] = data
		if err := t.libraries(data, into); err != nil {
			return err
		}
	}
	return nil
}

// moduleSet returns the uncompressed modules, and an order in which they can be loaded.
func (t *tree) moduleSet() (order []string, data map[string][]byte, err error) {
	paths := make(map[string]string)
	for name := range t.files {
		if base, ok := strings.CutSuffix(path.Base(name), ".ko.xz"); ok {
			paths[strings.ReplaceAll(base, "-", "_")] = name
		}
	}
	data = make(map[string][]byte)
	var add func(name string) error
	add = func(name string) error {
		if _, ok := data[name]; ok {
			return nil
		}
		p, ok := paths[name]
		if !ok {
			return nil // the module is built into the kernel
		}
		r, err := xz.NewReader(bytes.NewReader(t.files[p]))
		if err != nil {
			return fmt.Errorf("unpacking %s: %w", p, err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			return fmt.Errorf("unpacking %s: %w", p, err)
		}
		data[name] = b
		e, err := elf.NewFile(bytes.NewReader(b))
		if err != nil {
			return fmt.Errorf("reading %s: %w", p, err)
		}
		info, err := e.Section(".modinfo").Data()
		if err != nil {
			return fmt.Errorf("reading %s: %w", p, err)
		}
		for kv := range strings.SplitSeq(string(info), "\x00") {
			if deps, ok := strings.CutPrefix(kv, "depends="); ok && deps != "" {
				for d := range strings.SplitSeq(deps, ",") {
					if err := add(strings.ReplaceAll(d, "-", "_")); err != nil {
						return err
					}
				}
			}
		}
		order = append(order, name)
		return nil
	}
	for _, m := range modules() {
		if err := add(m); err != nil {
			return nil, nil, err
		}
	}
	return order, data, nil
}

// build writes kernel and initramfs to dir. extra maps paths in the guest to more files; it must
// have "init".
func build(ctx context.Context, dir string, extra map[string]string, log io.Writer) error {
	file, err := debian(ctx, log)
	if err != nil {
		return err
	}
	t, err := readTree(file)
	if err != nil {
		return err
	}
	for name, b := range t.files {
		if strings.HasPrefix(name, "boot/vmlinuz") {
			if err := os.WriteFile(filepath.Join(dir, "kernel"), b, 0o644); err != nil {
				return err
			}
		}
	}
	files, err := t.guestFiles()
	if err != nil {
		return err
	}
	for name, p := range extra {
		if files[name], err = os.ReadFile(p); err != nil {
			return err
		}
	}
	f, err := os.Create(filepath.Join(dir, "initramfs"))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := writeInitramfs(f, files); err != nil {
		return err
	}
	return f.Close()
}

// guestFiles returns the programs with their libraries, and the modules, keyed by their paths in
// the guest.
func (t *tree) guestFiles() (files map[string][]byte, err error) {
	files = make(map[string][]byte)
	for _, p := range programs() {
		b, err := t.open(p)
		if err != nil {
			return nil, err
		}
		files["bin/"+path.Base(p)] = b
		if err := t.libraries(b, files); err != nil {
			return nil, fmt.Errorf("libraries of %s: %w", p, err)
		}
	}
	for _, name := range t.base {
		if strings.HasPrefix(name, extensions) {
			if files[name], err = t.open(name); err != nil {
				return nil, err
			}
		}
	}
	if files[buildOptions], err = t.open(buildOptions); err != nil {
		return nil, err
	}
	order, mods, err := t.moduleSet()
	if err != nil {
		return nil, err
	}
	for name, b := range mods {
		files["modules/"+name+".ko"] = b
	}
	files["modules/order"] = []byte(strings.Join(order, "\n") + "\n")
	return files, nil
}

// writeInitramfs writes a cpio archive with the files, and with the directories and devices that
// the guest needs.
func writeInitramfs(f io.Writer, files map[string][]byte) error {
	w := cpio.Newc.Writer(f)
	records := []cpio.Record{cpio.CharDev("dev/console", 0o600, 5, 1), cpio.CharDev("dev/null", 0o666, 1, 3),
		cpio.Symlink("sbin/modprobe", "/init")}
	for _, name := range iptables() {
		records = append(records, cpio.Symlink("bin/"+name, "xtables-nft-multi"))
	}
	dirs := map[string]bool{}
	for _, d := range []string{"proc", "sys", "dev", "run", "tmp", "etc", "var/run", "sbin"} {
		dirs[d] = true
	}
	for name := range files {
		for d := path.Dir(name); d != "."; d = path.Dir(d) {
			dirs[d] = true
		}
	}
	dirs["var"] = true
	for _, d := range slices.Sorted(maps.Keys(dirs)) {
		if err := w.WriteRecord(cpio.Directory(d, 0o755)); err != nil {
			return err
		}
	}
	for name, b := range files {
		records = append(records, cpio.Record{ReaderAt: bytes.NewReader(b),
			Info: cpio.Info{Name: name, Mode: cpio.S_IFREG | 0o755, FileSize: uint64(len(b)), NLink: 1}})
	}
	for i, r := range records {
		r.Ino = uint64(i + 1)
		if err := w.WriteRecord(r); err != nil {
			return err
		}
	}
	return cpio.WriteTrailer(w)
}
