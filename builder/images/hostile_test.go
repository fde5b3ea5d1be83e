package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/edgebake/edgebake/builder/disk"
	"github.com/edgebake/edgebake/builder/registry"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/ondisk/tree"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/imagetest"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/klauspost/compress/zstd"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

func xattr(name, value string) tar.Header {
	return tar.Header{Name: "f", Mode: 0o644, PAXRecords: map[string]string{"SCHILY.xattr." + name: value}}
}

func acl(version uint32, entries ...[3]uint32) string {
	b := binary.LittleEndian.AppendUint32(nil, version)
	for _, e := range entries {
		b = binary.LittleEndian.AppendUint16(b, uint16(e[0]))
		b = binary.LittleEndian.AppendUint16(b, uint16(e[1]))
		b = binary.LittleEndian.AppendUint32(b, e[2])
	}
	return string(b)
}

// TestXattrs checks that attributes are errors if the kernel would reject them, as in containerd,
// and that attributes of unknown namespaces are ignored.
func TestXattrs(t *testing.T) {
	const none = 1<<32 - 1
	capability := func(magic uint32, n int) string {
		return string(binary.LittleEndian.AppendUint32(nil, magic)) + strings.Repeat("\x00", n-4)
	}
	plain := func(e ...[3]uint32) string { return acl(2, e...) }
	u, g, m, o := [3]uint32{1, 6, none}, [3]uint32{4, 4, none}, [3]uint32{16, 7, none}, [3]uint32{32, 4, none}
	for _, tt := range []struct {
		name   string
		header tar.Header
		want   string // the file's attributes, or "!" and an error
	}{
		{"unknown namespace", xattr("com.apple.quarantine", "x"), ""},
		{"system", xattr("system.nfs4_acl", "x"), ""},
		{"no namespace", xattr("plain", "x"), ""},
		{"trusted", xattr("trusted.overlay.redirect", "/x"), ""},
		{"user", xattr("user.x", "1"), " user.x"},
		{"label", xattr("security.selinux", "x"), " security.selinux"},
		{"user without a name", xattr("user.", "x"), "!no name after"},
		{"long name", xattr("user."+strings.Repeat("n", 251), "x"), "!the name has 256 bytes"},
		{"value over 64 KiB", xattr("user.x", strings.Repeat("v", 64<<10+1)), "!more than the 65536"},
		{"value over a block", xattr("user.x", strings.Repeat("v", 4<<10)), "!ext4 has space"},
		{"capability", xattr("security.capability", imagetest.Capability), " security.capability"},
		{"capability of revision 3", xattr("security.capability", capability(0x03000001, 24)), " security.capability"},
		{"capability of revision 1", xattr("security.capability", capability(0x01000000, 12)), "!not of revision 2 or 3"},
		{"capability truncated", xattr("security.capability", imagetest.Capability[:19]), "!not of revision 2 or 3"},
		{"capability of another size", xattr("security.capability", capability(0x02000000, 24)), "!not of revision 2 or 3"},
		{"no capability", xattr("security.capability", ""), "!not of revision 2 or 3"},
		{"ACL", xattr("system.posix_acl_access", imagetest.ACL), " system.posix_acl_access"},
		{"ACL of another version", xattr("system.posix_acl_access", acl(1, u, g, o)), ""},
		{"ACL truncated", xattr("system.posix_acl_access", imagetest.ACL[:9]), "!not a POSIX ACL"},
		{"ACL without others", xattr("system.posix_acl_access", plain(u, g)), "!incomplete"},
		{"ACL without a mask", xattr("system.posix_acl_access", plain(u, [3]uint32{2, 7, 5}, g, o)), "!incomplete"},
		{"ACL out of order", xattr("system.posix_acl_access", plain(u, o, g)), "!out of order"},
		{"ACL with an unknown tag", xattr("system.posix_acl_access", plain(u, g, o, [3]uint32{64, 4, 1})), "!unknown tag"},
		{"ACL with unknown permissions", xattr("system.posix_acl_access", plain(u, g, [3]uint32{32, 8, none})), "!permissions"},
		{"ACL for nobody", xattr("system.posix_acl_access", plain(u, [3]uint32{2, 7, none}, g, m, o)), "!without a user or group"},
		{"default ACL of a file", xattr("system.posix_acl_default", imagetest.ACL), "!only a directory"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := apply(t, imagetest.Script(tt.header))
			if why, bad := strings.CutPrefix(tt.want, "!"); bad {
				wantError(t, err, `entry "f"`, why)
				return
			}
			if err != nil || got["f"] != "100644 0:0"+tt.want {
				t.Errorf("%q, %v", got["f"], err)
			}
		})
	}
	// containerd calls chmod last, which also changes the ACL.
	if got := aclWithMode(imagetest.ACL, 0o741); got != acl(2, [3]uint32{1, 7, none}, [3]uint32{2, 7, 1000}, [3]uint32{4, 4, none}, [3]uint32{16, 4, none}, [3]uint32{32, 1, none}) {
		t.Errorf("%x", got)
	}
}

func TestImpossibleOwnersAndDevices(t *testing.T) {
	for _, tt := range []struct {
		h    tar.Header
		want string
	}{
		{tar.Header{Uid: 1<<32 - 1}, "owner 4294967295 is out of range"},
		{tar.Header{Gid: 1<<32 - 1}, "group 4294967295 is out of range"},
		{tar.Header{Uid: 1 << 32}, "owner 4294967296 is out of range"},
		{tar.Header{Typeflag: tar.TypeChar, Devmajor: 4096}, "device 4096:0 is beyond"},
		{tar.Header{Typeflag: tar.TypeBlock, Devminor: 1 << 20}, "device 0:1048576 is beyond"},
	} {
		tt.h.Name = "f"
		_, err := apply(t, imagetest.Script(tt.h))
		wantError(t, err, `entry "f"`, tt.want)
	}
}

// TestWhiteoutsOfLongNames uses names that have more than 255 bytes only with the prefix of a
// whiteout.
func TestWhiteoutsOfLongNames(t *testing.T) {
	for n := 250; n <= 255; n++ {
		name := strings.Repeat("n", n)
		got, err := apply(t, imagetest.Script(imagetest.File(name, 0o644, 0, 0, "")), imagetest.Script(imagetest.Whiteout(name)))
		if err != nil || got[name] != "20000 0:0" {
			t.Errorf("%d bytes: %v, %v", n, got, err)
		}
	}
	_, err := apply(t, imagetest.Script(imagetest.Whiteout(strings.Repeat("n", 256))))
	wantError(t, err, "260 bytes")
}

// TestOrderOfWhiteouts checks that the order of a layer's entries does not change the effect of
// whiteouts.
func TestOrderOfWhiteouts(t *testing.T) {
	dir, file := imagetest.Dir, imagetest.File
	base := imagetest.Script(dir("d", 0o750, 1, 2), file("d/old", 0o644, 0, 0, ""), dir("d/sub", 0o711, 3, 4), file("d/sub/x", 0o644, 0, 0, ""), file("f", 0o644, 0, 0, ""), dir("e", 0o755, 0, 0), file("e/x", 0o644, 0, 0, ""))
	for name, steps := range map[string][]any{
		"removed and made again":      {imagetest.Whiteout("d"), dir("d", 0o700, 5, 6), file("d/new", 0o644, 0, 0, "")},
		"implied directory":           {imagetest.Whiteout("d"), file("d/new", 0o644, 0, 0, "")},
		"opaque":                      {imagetest.Opaque("d"), dir("d", 0o700, 5, 6), file("d/new", 0o644, 0, 0, ""), file("d/sub/y", 0o644, 0, 0, "")},
		"file in place of directory":  {imagetest.Whiteout("d"), imagetest.Whiteout("d/old"), imagetest.Opaque("d/sub"), file("d", 0o600, 5, 6, "")},
		"removed at two levels":       {imagetest.Whiteout("d"), imagetest.Whiteout("d/old"), imagetest.Whiteout("f")},
		"opaque and removed":          {imagetest.Opaque("d"), imagetest.Whiteout("d"), imagetest.Whiteout("d/old")},
		"through a link of the layer": {imagetest.Symlink("l", "e"), imagetest.Whiteout("l/x"), imagetest.Whiteout("f")},
	} {
		t.Run(name, func(t *testing.T) {
			var first map[string]string
			permute(steps, func(order []any) {
				got, err := apply(t, base, imagetest.Script(order...))
				if err != nil {
					t.Fatalf("%v: %v", order, err)
				}
				if first == nil {
					first = got
					t.Log(got)
				}
				if !reflect.DeepEqual(got, first) {
					t.Errorf("%v:\n got %v\nwant %v", order, got, first)
				}
			})
			for p, what := range first {
				if what == "20000 0:0" && first[filepath.Dir(p)] == "20000 0:0" {
					t.Errorf("%s lies below a whiteout", p)
				}
			}
		})
	}
	// The entries of the base must stay hidden.
	got, err := apply(t, base, imagetest.Script(imagetest.Whiteout("d"), dir("d", 0o700, 5, 6)))
	if err != nil || got["d"] != "40700 5:6 trusted.overlay.opaque" {
		t.Errorf("%v, %v", got, err)
	}
}

// permute calls f with the steps in every order in which directories come before their entries.
func permute(steps []any, f func([]any)) {
	name := func(s any) string {
		switch s := s.(type) {
		case tar.Header:
			return strings.TrimSuffix(s.Name, "/")
		default:
			return reflect.ValueOf(s).FieldByName("Header").FieldByName("Name").String()
		}
	}
	var rec func(done, left []any)
	rec = func(done, left []any) {
		if len(left) == 0 {
			f(done)
			return
		}
		for i, s := range left {
			rest := slices.Delete(slices.Clone(left), i, i+1)
			mark := strings.Contains(name(s), ".wh.")
			if !mark && slices.ContainsFunc(rest, func(r any) bool {
				return !strings.Contains(name(r), ".wh.") && strings.HasPrefix(name(s), name(r)+"/")
			}) {
				continue
			}
			rec(append(slices.Clone(done), s), rest)
		}
	}
	rec(nil, steps)
}

func smallLimits(o *Options) { o.MaxLayer, o.MaxFiles = 1<<20, 1000 }

// TestLayerBombs checks that a small layer with huge contents is rejected with an error that names
// the layer.
func TestLayerBombs(t *testing.T) {
	zeros := func(n int) imagetest.Layer {
		return imagetest.Script(imagetest.File("zeros", 0o644, 0, 0, string(make([]byte, n))))
	}
	names := imagetest.Layer{Tar: func(w *imagetest.Writer) error {
		for n := range 1100 {
			if err := w.Put(tar.Header{Name: fmt.Sprint("f", n)}, ""); err != nil {
				return err
			}
		}
		return nil
	}}
	deep := imagetest.Layer{Tar: func(w *imagetest.Writer) error {
		for n := range 3 {
			if err := w.Put(tar.Header{Name: fmt.Sprint(n) + strings.Repeat("/d", 1500)}, ""); err != nil {
				return err
			}
		}
		return nil
	}}
	links := imagetest.Layer{Tar: func(w *imagetest.Writer) error {
		target := "."
		for n := range 200 {
			if err := w.Put(tar.Header{Name: fmt.Sprint("l", n), Typeflag: tar.TypeSymlink, Linkname: target}, ""); err != nil {
				return err
			}
			target = strings.Repeat("./", 1000) + fmt.Sprint("l", n)
		}
		for n := range 20 {
			if err := w.Put(tar.Header{Name: fmt.Sprint("l199/f", n)}, ""); err != nil {
				return err
			}
		}
		return nil
	}}
	whiteouts := imagetest.Layer{Tar: func(w *imagetest.Writer) error {
		for n := range 1100 {
			if err := w.Put(tar.Header{Name: fmt.Sprint(".wh.f", n)}, ""); err != nil {
				return err
			}
		}
		return nil
	}}
	zstdZeros := zeros(2 << 20)
	zstdZeros.Compression = "zstd"
	for name, tt := range map[string]struct {
		layers []imagetest.Layer
		want   []string
	}{
		"zeros":     {[]imagetest.Layer{zeros(100), zeros(2 << 20)}, []string{"layer 2 of 2 sha256:", "more than 1Mi", "raise imageStore.maxLayerSize"}},
		"zstd":      {[]imagetest.Layer{zstdZeros}, []string{"layer 1 of 1 sha256:", "more than 1Mi", "raise imageStore.maxLayerSize"}},
		"together":  {[]imagetest.Layer{zeros(1000 << 10), zeros(1001 << 10), zeros(1002 << 10), zeros(1003 << 10), zeros(1004 << 10)}, []string{"of 5 sha256:", "more than 4Mi", "raise imageStore.maxLayerSize"}},
		"names":     {[]imagetest.Layer{names}, []string{"layer 1 of 1 (sha256:", "more than 1000 files", "raise imageStore.maxFiles"}},
		"deep":      {[]imagetest.Layer{deep}, []string{"layer 1 of 1 (sha256:", "raise imageStore.maxFiles"}},
		"links":     {[]imagetest.Layer{links}, []string{"layer 1 of 1 (sha256:", "elements in total", "raise imageStore.maxFiles"}},
		"whiteouts": {[]imagetest.Layer{zeros(1), whiteouts}, []string{"layer 2 of 2 (sha256:", "more than 1000 files", "raise imageStore.maxFiles"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, imgs := writeLayout(t, imagetest.Image{Ref: "edgebake.test/bomb:1", Layers: tt.layers})
			c, o := newCache(t), testOptions()
			smallLimits(&o)
			_, err := resolveAndBake(t, c, o, imgs)
			wantError(t, err, append(tt.want, "edgebake.test/bomb:1")...)
			if strings.Contains(err.Error(), "broken") || strings.Contains(err.Error(), "damaged") {
				t.Error(err)
			}
			var ie *ImageError
			var le *LimitError
			if !errors.As(err, &ie) || !errors.As(err, &le) {
				t.Errorf("%v is not an ImageError with a LimitError", err)
			}
			unpoisoned(t, c)
		})
	}
}

// TestSparseBomb checks that small tar files that claim a sparse file of 2 GiB (PAX formats 0.1 and
// 1.0) are rejected, and that one of 2 MiB is accepted.
func TestSparseBomb(t *testing.T) {
	for name, records := range map[string]map[string]string{
		"1.0": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "big", "GNU.sparse.realsize": fmt.Sprint(2 << 30)},
		"0.1": {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "big", "GNU.sparse.size": fmt.Sprint(2 << 30), "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,512"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCache(t)
			_, err := applyLayer(t.Context(), c, sectionOf(sparseTar(t, records)), "blob", nil, time.Unix(0, 0), newBudget(&Options{}))
			wantError(t, err, `entry "big"`, "2.0Gi", "at most 1.0Gi", "imageStore.maxLayerSize")
			unpoisoned(t, c)
			if raised, err := c.TempDir(); err != nil || raised == "" {
				t.Error(err)
			}
		})
	}
	small := map[string]string{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "big", "GNU.sparse.realsize": fmt.Sprint(2 << 20)}
	s, err := applyLayer(t.Context(), newCache(t), sectionOf(sparseTar(t, small)), "blob", nil, time.Unix(0, 0), newBudget(&Options{}))
	if err != nil || s.root.children["big"].Data.Size != 2<<20 {
		t.Errorf("a small one: %v", err)
	}
}

// sparseTar writes a sparse tar file, which archive/tar can only read.
func sparseTar(t *testing.T, records map[string]string) []byte {
	t.Helper()
	var pax bytes.Buffer
	for _, k := range slices.Sorted(maps.Keys(records)) {
		line := fmt.Sprintf(" %s=%s\n", k, records[k])
		n := len(line) + 2
		if n >= 100 {
			n++
		}
		fmt.Fprintf(&pax, "%d%s", n, line)
	}
	block := func(name string, flag byte, body []byte) []byte {
		h := make([]byte, 512)
		copy(h, name)
		copy(h[100:], "0000644\x000000000\x000000000\x00")
		copy(h[124:], fmt.Sprintf("%011o\x00%011o\x00        ", len(body), 0))
		h[156] = flag
		copy(h[257:], "ustar\x0000")
		sum := 0
		for _, c := range h {
			sum += int(c)
		}
		copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
		return append(h, append(body, make([]byte, (512-len(body)%512)%512)...)...)
	}
	data := make([]byte, 512)
	if records["GNU.sparse.major"] == "1" {
		data = append([]byte("1\n0\n512\n"), make([]byte, 504+512)...)
	}
	out := block("PaxHeaders/big", 'x', pax.Bytes())
	out = append(out, block("GNUSparseFile/big", '0', data)...)
	return append(out, make([]byte, 1024)...)
}

// TestDeepPathsAreCheap checks that the cost of a deep path grows only with its length. It stacks
// layers whose 1500 nested directories have no tar entries, and lays them out on a disk.
func TestDeepPathsAreCheap(t *testing.T) {
	deep := func(name string) imagetest.Layer {
		return imagetest.Layer{Tar: func(w *imagetest.Writer) error {
			for n := range 20 {
				if err := w.Put(tar.Header{Name: strings.Repeat("d/", 1500) + fmt.Sprint(name, n)}, "x"); err != nil {
					return err
				}
			}
			return nil
		}}
	}
	var layers []imagetest.Layer
	for n := range 6 {
		layers = append(layers, deep(fmt.Sprint("f", n)))
	}
	_, imgs := writeLayout(t, imagetest.Image{Ref: "edgebake.test/deep:1", Layers: layers})
	c := newCache(t)
	nodes := 0
	took := desk.Processor(t, func() {
		r := mustBake(t, c, testOptions(), imgs)
		merged, err := tree.Merge([]tree.Layer{{Name: "images", Nodes: r.Nodes}}, testOptions().SourceDate)
		if err != nil {
			t.Fatal(err)
		}
		_, err = disk.Compute(disk.Spec{ID: "x", Arch: "amd64", SourceDate: testOptions().SourceDate, Partitions: []disk.Partition{{Label: "DATA", FS: disk.Ext4, Nodes: merged}}})
		if err != nil {
			t.Fatal(err)
		}
		nodes = len(r.Nodes)
	})
	t.Logf("%d nodes in %v", nodes, took)
	if took > time.Minute {
		t.Errorf("%d nodes took %v", nodes, took)
	}
}

// TestTooManyLayers checks that an image with more layers than overlayfs supports is rejected
// before anything is fetched.
func TestTooManyLayers(t *testing.T) {
	many := func(n int) []configs.ContainerImage {
		var layers []imagetest.Layer
		for i := range n {
			layers = append(layers, imagetest.Script(imagetest.File(fmt.Sprint(i), 0o644, 0, 0, "")))
		}
		_, imgs := writeLayout(t, imagetest.Image{Ref: "edgebake.test/tall:1", Layers: layers})
		return imgs
	}
	_, err := Resolve(t.Context(), newCache(t), many(501), testOptions())
	wantError(t, err, "edgebake.test/tall:1", "the image has 501 layers", "500")
	c := newCache(t)
	r := mustBake(t, c, testOptions(), many(500))
	if _, err := store.Verify(store.NodeFiles(r.Nodes, c), store.Root); err != nil {
		t.Error(err)
	}
}

// TestCompressionIsSniffed checks that a layer's first bytes determine its compression, as in
// containerd.
func TestCompressionIsSniffed(t *testing.T) {
	const oci = "application/vnd.oci.image.layer.v1.tar"
	for _, docker := range []bool{false, true} {
		types := []string{oci + "+gzip", oci + "+zstd"}
		if docker {
			types = []string{dockerLayer, dockerLayer + ".gzip", dockerLayer + ".zstd"}
		}
		for _, mediaType := range types {
			for _, compression := range []string{"gzip", "zstd", "none"} {
				l := imagetest.Script(imagetest.File("f", 0o644, 0, 0, "x"))
				l.Compression, l.MediaType = compression, mediaType
				_, imgs := writeLayout(t, imagetest.Image{Ref: "edgebake.test/a:1", Docker: docker, Layers: []imagetest.Layer{l}})
				if _, err := resolveAndBake(t, newCache(t), testOptions(), imgs); err != nil {
					t.Errorf("%s as %s: %v", compression, mediaType, err)
				}
			}
		}
	}
}

// layerOfBytes makes blob the second layer of an image. raw is the uncompressed layer.
func layerOfBytes(l *layout, blob, raw []byte, compression string) {
	diff, _ := l.putRaw(raw)
	l.change(func(m, c jsonDoc) {
		d := layerOf(m, 1)
		d["digest"], d["size"] = l.putRaw(blob)
		d["mediaType"] = "application/vnd.oci.image.layer.v1.tar+" + compression
		c["rootfs"].(jsonDoc)["diff_ids"].([]any)[1] = diff
	})
}

func tarOf(t *testing.T, l imagetest.Layer) []byte {
	t.Helper()
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	if err := l.Tar(&imagetest.Writer{Writer: tw}); err != nil {
		t.Fatal(err)
	}
	tw.Close()
	return buf.Bytes()
}

// TestZstdWindows checks that windows up to containerd's limit are accepted, and that the error for
// a larger window does not say that the layer is damaged.
func TestZstdWindows(t *testing.T) {
	raw := tarOf(t, imagetest.Script(imagetest.File("f", 0o644, 0, 0, "x")))
	for _, tt := range []struct {
		log  int
		want string
	}{{20, ""}, {27, ""}, {28, ""}, {29, ""}, {30, "--long=29"}, {31, "--long=29"}} {
		l := newLayout(t, small("edgebake.test/a:1", "a"))
		// Make a frame of a header and one uncompressed block.
		frame := []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, byte(tt.log-10) << 3}
		head := uint32(1 | len(raw)<<3)
		frame = append(append(frame, byte(head), byte(head>>8), byte(head>>16)), raw...)
		layerOfBytes(l, frame, raw, "zstd")
		_, err := resolveAndBake(t, newCache(t), testOptions(), l.imgs)
		if tt.want == "" {
			if err != nil {
				t.Errorf("window of 2^%d bytes: %v", tt.log, err)
			}
			continue
		}
		wantError(t, err, "layer 2 of 2", tt.want)
		if strings.Contains(err.Error(), "damaged") || strings.Contains(err.Error(), "truncated") {
			t.Errorf("nothing is damaged: %v", err)
		}
	}
	// Begin this layer with a skippable frame.
	l := newLayout(t, small("edgebake.test/a:1", "a"))
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	layerOfBytes(l, z.EncodeAll(raw, []byte{0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 'h', 'i'}), raw, "zstd")
	if _, err := resolveAndBake(t, newCache(t), testOptions(), l.imgs); err != nil {
		t.Error(err)
	}
}

// FuzzLayerReader checks that the limit of a layer's uncompressed size holds for any compressed
// bytes.
func FuzzLayerReader(f *testing.F) {
	raw := []byte(strings.Repeat("a tar, say ", 100))
	var gz bytes.Buffer
	w := gzip.NewWriter(&gz)
	w.Write(raw)
	w.Close()
	z, err := zstd.NewWriter(nil)
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range [][]byte{raw, gz.Bytes(), z.EncodeAll(raw, nil), {}} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		sum := sha(string(b))
		l := Layer{Descriptor: Descriptor{MediaType: ociLayer + "+gzip", Digest: imageref.DigestOf(sum[:]), Size: int64(len(b))}}
		r, err := newLayerReader(bytes.NewReader(b), l, 8<<20)
		if err != nil {
			return
		}
		defer r.Close()
		n, err := io.Copy(io.Discard, &limitedReader{r: r, limit: sizeLimit{layer: 1 << 20}})
		if n > 1<<20 {
			t.Errorf("%d bytes came out: %v", n, err)
		}
	})
}

// FuzzApplyOver applies a damaged layer on top of a valid layer, with limits.
func FuzzApplyOver(f *testing.F) {
	lower := imagetest.Nasty("x:1", "")
	write := func(l imagetest.Layer) []byte {
		var buf bytes.Buffer
		tw := tar.NewWriter(&buf)
		if err := l.Tar(&imagetest.Writer{Writer: tw}); err != nil {
			f.Fatal(err)
		}
		tw.Close()
		return buf.Bytes()
	}
	base := write(lower.Layers[0])
	for _, l := range lower.Layers[1:5] {
		f.Add(write(l))
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		c := openCache(t, dir)
		limit := newBudget(&Options{MaxFiles: 2000, MaxLayer: 8 << 20})
		low, err := applyLayer(t.Context(), c, sectionOf(base), "low", nil, time.Unix(0, 0), limit)
		if err != nil {
			t.Fatal(err)
		}
		s, err := applyLayer(t.Context(), c, sectionOf(b), "blob", low, time.Unix(0, 0), limit)
		if err != nil {
			return
		}
		nodes := s.nodes("fs", "", nil)
		if len(nodes) > 2000 {
			t.Errorf("%d names", len(nodes))
		}
		if _, err := tree.Merge([]tree.Layer{{Name: "images", Nodes: nodes}}, time.Unix(0, 0)); err != nil {
			t.Errorf("the unpacked files cannot be merged: %v", err)
		}
	})
}

// TestHostileOrderIsStable checks that a layer always gives the same snapshot, although Go iterates
// over maps in random order.
func TestHostileOrderIsStable(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 7))
	steps := []any{imagetest.Dir("d", 0o755, 0, 0)}
	for n := range 50 {
		steps = append(steps, imagetest.File(fmt.Sprint("d/", n), 0o644, n, n, ""))
	}
	var first map[string]string
	for range 5 {
		random.Shuffle(len(steps)-1, func(i, j int) { steps[i+1], steps[j+1] = steps[j+1], steps[i+1] })
		got, err := apply(t, imagetest.Script(steps...))
		if err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = got
		}
		if !reflect.DeepEqual(first, got) {
			t.Error("the order changed the result")
		}
	}
}

// wrap puts the layout's first manifest into a new index, to which the first name then points. edit
// returns the entries of the index.
func (l *layout) wrap(edit func(manifest jsonDoc) []any) {
	l.t.Helper()
	var index jsonDoc
	l.read("", &index)
	entry := index["manifests"].([]any)[0].(jsonDoc)
	digest, size := l.put(jsonDoc{"schemaVersion": 2, "mediaType": ociIndex, "manifests": edit(jsonDoc{"mediaType": entry["mediaType"], "digest": entry["digest"], "size": entry["size"]})})
	entry["digest"], entry["size"], entry["mediaType"] = digest, size, ociIndex
	l.writeIndex(index)
}

// foreign returns a manifest for another architecture.
func (l *layout) foreign(arch string) jsonDoc {
	l.t.Helper()
	config, n := l.put(jsonDoc{"architecture": arch, "os": "linux", "rootfs": jsonDoc{"type": "layers", "diff_ids": []any{}}})
	digest, size := l.put(jsonDoc{"schemaVersion": 2, "mediaType": ociManifest, "layers": []any{},
		"config": jsonDoc{"mediaType": "application/vnd.oci.image.config.v1+json", "digest": config, "size": n}})
	return jsonDoc{"mediaType": ociManifest, "digest": digest, "size": size}
}

// with returns a copy of an index's entry with a platform.
func with(d jsonDoc, os, arch string) jsonDoc {
	d = maps.Clone(d)
	d["platform"] = jsonDoc{"os": os, "architecture": arch}
	return d
}

// TestIndexes checks that edgebake selects the manifest in an index that containerd finds on the
// node. containerd examines only the first matching entry.
func TestIndexes(t *testing.T) {
	for name, tt := range map[string]struct {
		entries func(l *layout, ours jsonDoc) []any
		direct  bool
	}{
		"one without a platform":    {func(l *layout, ours jsonDoc) []any { return []any{ours} }, false},
		"ours second, no platforms": {func(l *layout, ours jsonDoc) []any { return []any{l.foreign("arm64"), ours} }, true},
		"platform before none":      {func(l *layout, ours jsonDoc) []any { return []any{l.foreign("arm64"), with(ours, "linux", "amd64")} }, false},
		"first is missing": {func(l *layout, ours jsonDoc) []any {
			d := l.foreign("arm64")
			d["digest"] = "sha256:" + strings.Repeat("1", 64)
			return []any{d, ours}
		}, true},
		"other spelling":  {func(l *layout, ours jsonDoc) []any { return []any{with(ours, "Linux", "x86_64")} }, false},
		"no system named": {func(l *layout, ours jsonDoc) []any { return []any{with(ours, "", "amd64")} }, false},
		"index in index": {func(l *layout, ours jsonDoc) []any {
			digest, size := l.put(jsonDoc{"schemaVersion": 2, "mediaType": ociIndex, "manifests": []any{with(l.foreign("arm64"), "linux", "arm64"), with(ours, "linux", "amd64")}})
			return []any{jsonDoc{"mediaType": ociIndex, "digest": digest, "size": size}}
		}, true},
		"attestation beside": {func(l *layout, ours jsonDoc) []any {
			return []any{with(l.foreign("unknown"), "unknown", "unknown"), with(ours, "linux", "amd64")}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLayout(t, small("edgebake.test/a:1", "a"))
			l.wrap(func(ours jsonDoc) []any { return tt.entries(l, ours) })
			c, o := newCache(t), testOptions()
			pinned, err := Resolve(t.Context(), c, l.imgs, o)
			if err != nil {
				t.Fatal(err)
			}
			if pinned[0].Direct != tt.direct {
				t.Errorf("direct: %v", pinned[0].Direct)
			}
			for _, digest := range []string{"", string(pinned[0].Target.Digest), string(pinned[0].Manifest.Digest)} {
				l.imgs[0].Digest = digest
				r := mustBake(t, c, o, l.imgs)
				s, err := store.Verify(store.NodeFiles(r.Nodes, c), store.Root)
				if err != nil || !slices.Equal(s.Images, []string{"edgebake.test/a:1"}) {
					t.Errorf("pinned to %q: %+v, %v", digest, s, err)
				}
			}
			if _, err := fetchAndArchive(t.Context(), c, pinned, o); err != nil {
				t.Error(err)
			}
		})
	}
	l := newLayout(t, small("edgebake.test/a:1", "a"))
	l.wrap(func(jsonDoc) []any { return []any{l.foreign("arm64"), l.foreign("s390x")} })
	_, err := Resolve(t.Context(), newCache(t), l.imgs, testOptions())
	wantError(t, err, "no manifest for linux/amd64, only for linux/arm64, linux/s390x")
}

// TestIndexOfAnAilingRegistry checks that a temporary failure of a registry is an error, and does
// not change which manifest of an index is selected. Entries that do not exist are skipped.
func TestIndexOfAnAilingRegistry(t *testing.T) {
	for status, want := range map[int]string{http.StatusNotFound: "", http.StatusForbidden: "403", http.StatusInternalServerError: "500"} {
		l := newLayout(t, small("edgebake.test/a:1", "a"))
		var first string
		l.wrap(func(ours jsonDoc) []any {
			first = l.foreign("amd64")["digest"].(string)
			return []any{with(l.foreign("amd64"), "linux", "amd64"), with(ours, "linux", "amd64")}
		})
		s := serve(t, l, httptest.NewServer)
		s.fail = func(w http.ResponseWriter, r *http.Request) bool {
			if strings.HasSuffix(r.URL.Path, first) {
				w.WriteHeader(status)
				return true
			}
			return false
		}
		o := testOptions()
		o.Registries = []configs.Registry{{Host: s.host, Insecure: true}}
		o.RetryWait = time.Millisecond
		pinned, err := Resolve(t.Context(), newCache(t), []configs.ContainerImage{{Ref: s.host + "/a:1"}}, o)
		if want != "" {
			wantError(t, err, want)
		} else if err != nil || !pinned[0].Direct {
			t.Errorf("status %d: %+v, %v", status, pinned, err)
		}
	}
}

// cutSource returns a blob. The first time, the last byte is missing.
type cutSource struct {
	source
	blob []byte
	cut  int
}

func (s *cutSource) fetch(_ context.Context, _ imageref.Ref, _ Descriptor, take func(io.Reader) error) error {
	b := s.blob
	if s.cut > 0 {
		s.cut--
		b = b[:len(b)-1]
	}
	return take(bytes.NewReader(b))
}

// TestLimitOfBrokenTransfers checks that the bytes of a failed transfer do not count against the
// image's size limit.
func TestLimitOfBrokenTransfers(t *testing.T) {
	raw := []byte(strings.Repeat("a tar, say ", 100))
	sum := sha(string(raw))
	digest := imageref.DigestOf(sum[:])
	l := Layer{Descriptor: Descriptor{MediaType: ociLayer, Digest: digest, Size: int64(len(raw))}, DiffID: digest}
	c := newCache(t)
	left := &atomic.Int64{}
	left.Store(int64(len(raw)))
	u := unpacker{limit: sizeLimit{1 << 20, left}}
	src := &cutSource{blob: raw, cut: 2}
	for range 2 {
		if err := u.fetchLayer(t.Context(), c, src, imageref.Ref{}, l, false); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatal(err)
		}
	}
	if err := u.fetchLayer(t.Context(), c, src, imageref.Ref{}, l, false); err != nil {
		t.Fatal(err)
	}
	if left.Load() != 0 {
		t.Errorf("%d bytes of the limit are left, wanted 0", left.Load())
	}
}

// TestDocumentsAreReadAsContainerdDoes checks that a document is rejected if and only if
// containerd's types cannot represent it.
func TestDocumentsAreReadAsContainerdDoes(t *testing.T) {
	set := func(key string, v any) func(m, c jsonDoc) {
		return func(_, c jsonDoc) { c["config"].(jsonDoc)[key] = v }
	}
	for name, tt := range map[string]struct {
		edit func(m, c jsonDoc)
		want string
	}{
		"Env is a string":          {set("Env", "PATH=/bin"), "config.Env is a JSON string, expected a list"},
		"Env without a value":      {set("Env", []any{"PATH=/bin", "DEBUG"}), `config.Env[1] is "DEBUG", expected NAME=VALUE`},
		"Env with a NUL":           {set("Env", []any{"A=\x00"}), "config.Env[0]"},
		"a relative directory":     {set("WorkingDir", "app"), `config.WorkingDir is "app", expected an absolute path`},
		"Cmd is a string":          {set("Cmd", "sh -c x"), "config.Cmd is a JSON string, expected a list"},
		"Entrypoint has a number":  {set("Entrypoint", []any{1}), "is a JSON number, expected a string"},
		"Labels is a list":         {set("Labels", []any{}), "config.Labels is a JSON array, expected an object"},
		"Volumes has strings":      {set("Volumes", jsonDoc{"/x": "y"}), "is a JSON string, expected an object"},
		"User is a number":         {set("User", 1000), "config.User is a JSON number, expected a string"},
		"history is an object":     {func(_, c jsonDoc) { c["history"] = jsonDoc{} }, "history is a JSON object, expected a list"},
		"created is no time":       {func(_, c jsonDoc) { c["created"] = "yesterday" }, "containerd cannot read the document"},
		"annotations has a number": {func(m, _ jsonDoc) { m["annotations"] = jsonDoc{"a": 1} }, "annotations is a JSON number, expected a string"},
		"urls is a string":         {func(m, _ jsonDoc) { layerOf(m, 0)["urls"] = "x" }, "is a JSON string, expected a list"},
		"negative size":            {func(m, _ jsonDoc) { layerOf(m, 0)["size"] = -5 }, "the size -5"},
		"manifest with manifests":  {func(m, _ jsonDoc) { m["manifests"] = []any{} }, "descriptor has the media type of a manifest, but the blob is an index"},
		"schema 1":                 {func(m, _ jsonDoc) { m["fsLayers"] = []any{} }, "schema 1"},
		"unknown fields": {func(m, c jsonDoc) {
			m["x"], c["x"] = 1, 1
			c["config"].(jsonDoc)["Healthcheck"] = jsonDoc{"Test": []any{"x"}}
		}, ""},
		"no directory":          {set("WorkingDir", ""), ""},
		"an empty value":        {set("Env", []any{"A="}), ""},
		"null config":           {func(_, c jsonDoc) { c["config"] = nil }, ""},
		"no architecture":       {func(_, c jsonDoc) { delete(c, "architecture") }, ""},
		"no system":             {func(_, c jsonDoc) { delete(c, "os") }, ""},
		"other spelling":        {func(_, c jsonDoc) { c["architecture"] = "x86_64" }, ""},
		"another architecture":  {func(_, c jsonDoc) { c["architecture"] = "arm64" }, "the image is for linux/arm64"},
		"manifest without type": {func(m, _ jsonDoc) { delete(m, "mediaType") }, ""},
		"docker type inside":    {func(m, _ jsonDoc) { m["mediaType"] = dockerManifest }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLayout(t, small("edgebake.test/a:1", "a"))
			l.change(tt.edit)
			c := newCache(t)
			r, err := resolveAndBake(t, c, testOptions(), l.imgs)
			if tt.want != "" {
				wantError(t, err, "edgebake.test/a:1", tt.want)
				if strings.Contains(err.Error(), "Go ") {
					t.Errorf("the error contains a Go type: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := store.Verify(store.NodeFiles(r.Nodes, c), store.Root); err != nil {
				t.Error(err)
			}
		})
	}
}

func FuzzManifest(f *testing.F) {
	f.Add([]byte(`{"schemaVersion":2,"mediaType":"`+ociManifest+`","config":{"digest":"x","size":1},"layers":[]}`), "")
	f.Add([]byte(`{"manifests":[{"platform":{"os":"linux","architecture":"amd64"}}]}`), ociIndex)
	f.Fuzz(func(t *testing.T, raw []byte, mediaType string) {
		doc, err := parseManifest(raw, &mediaType)
		if err == nil && isManifest(mediaType) == (len(doc.Manifests) > 0) && len(doc.Manifests) > 0 {
			t.Errorf("%q is decoded as both an index and a manifest", raw)
		}
		readStrict(raw, &ocispec.Image{})
	})
}

// FuzzArchive opens damaged docker and OCI archives and reads the files that they list.
func FuzzArchive(f *testing.F) {
	docker := func(name, body string) []byte {
		var buf bytes.Buffer
		tw := tar.NewWriter(&buf)
		w := imagetest.Writer{Writer: tw}
		for _, e := range [][2]string{{"manifest.json", `[{"Config":"c.json","RepoTags":["a:1"],"Layers":["l.tar"]}]`}, {"c.json", `{"os":"linux","architecture":"amd64","rootfs":{"diff_ids":["sha256:` + strings.Repeat("0", 64) + `"]}}`}, {"l.tar", "x"}, {name, body}} {
			if err := w.Put(tar.Header{Name: e[0]}, e[1]); err != nil {
				f.Fatal(err)
			}
		}
		tw.Close()
		return buf.Bytes()
	}
	f.Add(docker("x", "y"))
	f.Add(docker("oci-layout", "{}"))
	f.Add(docker("index.json", `{"manifests":[{"digest":"sha256:x"}]}`))
	cache := f.TempDir()
	f.Fuzz(func(t *testing.T, raw []byte) {
		name := filepath.Join(t.TempDir(), "archive.tar")
		if err := os.WriteFile(name, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		o := testOptions()
		smallLimits(&o)
		_, err := Resolve(t.Context(), openCache(t, cache), []configs.ContainerImage{{Ref: "a:1", Archive: name}, {Ref: Sole, Archive: name}}, o)
		if err == nil && !bytes.Contains(raw, []byte("diff_ids")) {
			t.Error("Resolve returned an image for data without diff_ids")
		}
	})
}

func FuzzAuthFile(f *testing.F) {
	f.Add([]byte(`{"auths":{"x":{"auth":"cm9ib3Q6aHVudGVyMg=="}}}`))
	target, err := name.NewRepository("x/a")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		file := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(file, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		keys, err := registry.Logins(file)
		if err == nil {
			keys.Resolve(target) // must return, with or without an error
		}
	})
}
