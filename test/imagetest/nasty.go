package imagetest

import (
	"archive/tar"
	"encoding/binary"
	"fmt"
	"strings"
	"time"
)

func xattrs(kv ...string) map[string]string {
	m := map[string]string{}
	for i := 0; i < len(kv); i += 2 {
		m["SCHILY.xattr."+kv[i]] = kv[i+1]
	}
	return m
}

// Capability is a value of security.capability, version 2: cap_net_bind_service=ep.
var Capability = string([]byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})

// ACL is a value of system.posix_acl_access: u::rw-, u:1000:rwx, g::r--, m::rwx, o::r--.
var ACL = func() string {
	b := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range [][3]uint32{{1, 6, 1<<32 - 1}, {2, 7, 1000}, {4, 4, 1<<32 - 1}, {16, 7, 1<<32 - 1}, {32, 4, 1<<32 - 1}} {
		b = binary.LittleEndian.AppendUint16(b, uint16(e[0]))
		b = binary.LittleEndian.AppendUint16(b, uint16(e[1]))
		b = binary.LittleEndian.AppendUint32(b, e[2])
	}
	return string(b)
}()

// script is a list of entries, each a tar.Header or a file.
type script []any

func (s script) write(w *Writer) error {
	for _, step := range s {
		switch v := step.(type) {
		case tar.Header:
			if err := w.Put(v, ""); err != nil {
				return err
			}
		case file:
			if err := w.Put(v.Header, v.body); err != nil {
				return err
			}
		default:
			return fmt.Errorf("unknown step %T", step)
		}
	}
	return nil
}

type file struct {
	tar.Header
	body string
}

// Dir returns a directory entry for Script.
func Dir(name string, mode int64, uid, gid int) tar.Header {
	return tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: mode, Uid: uid, Gid: gid}
}

// File returns a regular file for Script.
func File(name string, mode int64, uid, gid int, body string) any {
	return file{tar.Header{Name: name, Mode: mode, Uid: uid, Gid: gid}, body}
}

// Symlink returns a symbolic link for Script.
func Symlink(name, target string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}
}

// Hardlink returns a hard link for Script.
func Hardlink(name, target string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: target, Mode: 0o755}
}

// Whiteout returns an entry that removes name from the lower layers.
func Whiteout(name string) any {
	dir, base := "", name
	if i := strings.LastIndexByte(name, '/'); i >= 0 {
		dir, base = name[:i+1], name[i+1:]
	}
	return File(dir+".wh."+base, 0, 0, 0, "")
}

// Opaque returns an entry that hides the contents of dir in the lower layers.
func Opaque(dir string) any { return File(dir+"/.wh..wh..opq", 0, 0, 0, "") }

// Script returns a layer with these entries.
func Script(steps ...any) Layer { return Layer{Tar: script(steps).write} }

// Nasty returns an image of 20 layers with the difficult cases of unpacking. hello is a static
// program, which becomes /bin/hello.
func Nasty(ref, hello string) Image {
	long := strings.Repeat("n", 255)
	layers := []Layer{
		nastyBase(long, hello), // 1
		Script( // 2
			Whiteout("opt/a/gone"),
			Opaque("opt/opq"),
			File("opt/opq/new", 0o644, 3, 3, "new"),
			Whiteout("opt/todel"),
			Dir("opt/swap", 0o700, 11, 11),
			File("opt/swap/now", 0o644, 0, 0, "a directory"),
			File("opt/dir2file", 0o644, 0, 0, "now a file"),
			Symlink("opt/dir2link", "a"),
			File("opt/a/b/in-implied-parents", 0o644, 0, 0, "opt/a and opt/a/b are copied up"),
			File("bin/hard1", 0o755, 0, 0, "hard"),
			Hardlink("bin/hard2", "bin/hard1"),
			Dir("home/app", 0o750, 1000, 1000),
			File("usrlink/x", 0o644, 0, 0, "the link is below; here a directory"),
		),
		Script( // 3: a whiteout of a removed path, another opaque directory, a directory that becomes a file again
			Whiteout("opt/a/gone"),
			Opaque("opt/opq"),
			File("opt/opq/newer", 0o644, 3, 3, "newer"),
			Whiteout("opt/swap/now"),
			Dir("opt/wd", 0o700, 1, 1),
			File("opt/wd/y", 0o644, 0, 0, "y"),
			Whiteout("opt/never-there"),
			Whiteout("opt/"+long),
			File("opt/todel", 0o644, 0, 0, "back as a file"),
			Dir("opt/late", 0o755, 0, 0),
			File("opt/late/kept", 0o644, 0, 0, "kept"),
			Opaque("opt/late"),
			tar.Header{Name: "./dotted/", Typeflag: tar.TypeDir, Mode: 0o755},
			File("./dotted/f", 0o644, 0, 0, "dot"),
			File("/abs/f", 0o644, 0, 0, "absolute"),
		),
		Script(File("opt/swap", 0o640, 12, 13, "a file again")), // 4
		Script(), // 5: empty
	}
	for n := 6; n <= 20; n++ { // each removes files and creates them again
		name := fmt.Sprintf("gen/%d", n)
		steps := []any{Dir("gen", 0o750, n, n), File(name, 0o644, n, n, strings.Repeat(name, n))}
		if n > 6 {
			steps = append(steps, Whiteout(fmt.Sprintf("gen/%d", n-1)))
		}
		if n%5 == 0 {
			steps = append(steps, Opaque("gen"))
		}
		if n%2 == 0 {
			steps = append(steps, Whiteout("opt/flip"))
		} else {
			steps = append(steps, File("opt/flip/flop", 0o600, n, n, "back"))
		}
		l := Script(steps...)
		l.Compression = []string{"gzip", "zstd", "none"}[n%3]
		layers = append(layers, l)
	}
	return Image{Ref: ref, Layers: layers, Config: map[string]any{"Entrypoint": []string{"/bin/hello"}, "Env": []string{"PATH=/bin"}}}
}

// nastyBase is the first layer of Nasty. long is a name of 255 bytes.
func nastyBase(long, hello string) Layer {
	return Script(
		Dir(".", 0o700, 9, 9), // ignored by containerd
		Dir("etc", 0o755, 0, 0),
		File("etc/passwd", 0o644, 0, 0, "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n"),
		Dir("bin", 0o755, 0, 0),
		File("bin/hello", 0o755, 0, 0, hello),
		Hardlink("bin/hello-link", "bin/hello"),
		Symlink("bin/sh", "hello"),
		File("bin/su", 0o4755, 0, 0, "setuid"),
		File("bin/sgid", 0o2755, 0, 42, "setgid"),
		file{tar.Header{Name: "bin/ping", Mode: 0o755, PAXRecords: xattrs("security.capability", Capability)}, "ping"},
		file{tar.Header{Name: "bin/ping2", Mode: 0o755, PAXRecords: xattrs("security.capability", Capability)}, "ping2"},
		Hardlink("bin/ping2-link", "bin/ping2"), // changing the owner drops the capability
		file{tar.Header{Name: "bin/acl", Mode: 0o674, PAXRecords: xattrs("system.posix_acl_access", ACL)}, "acl"},
		file{tar.Header{Name: "bin/acl-of-another-mode", Mode: 0o641, PAXRecords: xattrs("system.posix_acl_access", ACL)}, "acl"},
		file{tar.Header{Name: "bin/foreign", Mode: 0o644, PAXRecords: xattrs("com.apple.quarantine", "x", "system.nfs4_acl", "x", "system.posix_acl_access", "\x01\x00\x00\x00")}, "ignored by the kernel"},
		tar.Header{Name: "bin/acl-link", Typeflag: tar.TypeSymlink, Linkname: "acl", Mode: 0o777, PAXRecords: xattrs("system.posix_acl_access", ACL)},
		file{tar.Header{Name: "bin/userx", Mode: 0o644, Uid: 1000, Gid: 1000, PAXRecords: xattrs("user.foo", "bar\x01baz", "user.mime_type", "text/plain", "trusted.ignored", "x")}, "x"},
		tar.Header{Name: "bin/userlink", Typeflag: tar.TypeSymlink, Linkname: "sh", Mode: 0o777, PAXRecords: xattrs("user.foo", "ignored")},
		Dir("tmp", 0o1777, 0, 0),
		Dir("home/app", 0o700, 1000, 1000), // the entry for home is missing
		File("home/app/.profile", 0o600, 1000, 1000, "hi"),
		Dir("dev", 0o755, 0, 0),
		tar.Header{Name: "dev/null", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 3},
		tar.Header{Name: "dev/sda300", Typeflag: tar.TypeBlock, Mode: 0o660, Gid: 6, Devmajor: 259, Devminor: 300},
		tar.Header{Name: "dev/initctl", Typeflag: tar.TypeFifo, Mode: 0o600},
		Dir("opt", 0o755, 0, 0),
		tar.Header{Name: "opt/a/", Typeflag: tar.TypeDir, Mode: 0o750, Uid: 5, Gid: 6, PAXRecords: xattrs("user.dirx", "1", "system.posix_acl_default", ACL)},
		Dir("opt/a/b", 0o711, 7, 8),
		File("opt/a/b/deep", 0o640, 7, 8, "deep"),
		File("opt/a/gone", 0o640, 7, 8, "to be whited out"),
		Dir("opt/opq", 0o755, 0, 0),
		File("opt/opq/old1", 0o644, 0, 0, "old"),
		File("opt/opq/old2", 0o644, 0, 0, "old"),
		Dir("opt/opq/sub", 0o755, 3, 4),
		File("opt/opq/sub/x", 0o644, 0, 0, "x"),
		Dir("opt/todel", 0o755, 0, 0),
		File("opt/todel/x", 0o644, 0, 0, "x"),
		File("opt/swap", 0o644, 0, 0, "file"),
		Dir("opt/dir2file", 0o755, 0, 0),
		File("opt/dir2file/inner", 0o644, 0, 0, "inner"),
		Dir("opt/dir2link", 0o755, 0, 0),
		File("opt/dir2link/inner", 0o644, 0, 0, "inner"),
		File("opt/wd/x", 0o644, 0, 0, "x"),
		Hardlink("bin/sh-link", "bin/sh"),
		Hardlink("dev/null2", "dev/null"),
		Symlink("usrlink", "opt/a"),
		File("usrlink/via-symlink", 0o644, 9, 9, "through a link of the same layer"),
		Symlink("abslink", "/opt"),
		File("abslink/via-absolute", 0o644, 9, 9, "through an absolute link"),
		Symlink("outlink", "../../../opt"),
		File("outlink/via-outside", 0o644, 9, 9, "a link that ends at the root"),
		File("opt/"+long, 0o644, 0, 0, "255 bytes"),
		File(strings.Repeat("long/", 100)+strings.Repeat("m", 255), 0o644, 0, 0, "long path"),
		File("opt/ünïcödé ☃ name", 0o644, 4000000, 4000001, "big uid"),
		File("dup", 0o644, 1, 1, "first"),
		File("dup", 0o600, 2, 2, "second wins"),
		Dir("dupdir", 0o755, 1, 1),
		File("dupdir/kept", 0o644, 1, 1, "kept"),
		Dir("dupdir", 0o700, 2, 2),
		File("dupdir2", 0o644, 1, 1, "a file first"),
		Dir("dupdir2", 0o700, 2, 2),
		file{tar.Header{Name: "zeros", Mode: 0o644, ModTime: time.Unix(1600000000, 123456789)}, string(make([]byte, 1<<20))},
		File("empty", 0o644, 0, 0, ""),
		file{tar.Header{Name: "before-the-epoch", Mode: 0o644, ModTime: time.Unix(-5, 0)}, "e"},
	)
}

// Many returns an image of two layers. The first has n small files, of which the second removes
// half.
func Many(ref string, n int) Image {
	name := func(i int) string { return fmt.Sprintf("srv/%02x/file-%06d", i%256, i) }
	return Image{Ref: ref, Layers: []Layer{
		{Tar: func(w *Writer) error {
			for i := range n {
				if err := w.Put(tar.Header{Name: name(i), Mode: 0o644, Uid: i % 7}, fmt.Sprint(i)); err != nil {
					return err
				}
			}
			return nil
		}},
		{Compression: "zstd", Tar: func(w *Writer) error {
			for i := 0; i < n; i += 2 {
				d, b := "srv/"+fmt.Sprintf("%02x", i%256), fmt.Sprintf(".wh.file-%06d", i)
				if err := w.Put(tar.Header{Name: d + "/" + b}, ""); err != nil {
					return err
				}
			}
			return nil
		}},
	}}
}
