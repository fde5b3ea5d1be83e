package oracle

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff/apply"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/metadata"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/unpack"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/edgebake/edgebake/builder/fetch"
	baker "github.com/edgebake/edgebake/builder/images"
	"github.com/edgebake/edgebake/configs"
	"github.com/edgebake/edgebake/configs/imageref"
	"github.com/edgebake/edgebake/ondisk/store"
	"github.com/edgebake/edgebake/test/desk"
	"github.com/edgebake/edgebake/test/imagetest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
)

// needRoot ends a test that only root can run: it is skipped on a developer's computer and fails in
// CI.
func needRoot(t *testing.T) {
	t.Helper()
	desk.NeedRoot(t, "it makes files of others")
}

var sourceDate = time.Unix(1767225600, 0).UTC()

func options() baker.Options {
	return baker.Options{Arch: "amd64", ContainerdVersion: configs.ExampleContainerd, SourceDate: sourceDate}
}

// testImages returns the images that both edgebake and containerd unpack.
func testImages(hello string) []imagetest.Image {
	base := imagetest.Script(
		imagetest.Dir("etc", 0o755, 0, 0),
		imagetest.File("etc/os-release", 0o644, 0, 0, "ID=test\n"),
		imagetest.Dir("srv", 0o750, 3, 4))
	top := func(text string) imagetest.Layer {
		return imagetest.Script(imagetest.File("srv/app", 0o755, 0, 0, text))
	}
	run := imagetest.Script(imagetest.File("bin/hello", 0o755, 0, 0, hello))
	entry := map[string]any{"Entrypoint": []string{"/bin/hello"}}
	return []imagetest.Image{
		{Ref: "edgebake.test/hello:1", Layers: []imagetest.Layer{base, run}, Config: entry},
		{Ref: "edgebake.test/pause:1", Layers: []imagetest.Layer{imagetest.Script(imagetest.File("pause", 0o755, 0, 0, hello))}, Config: map[string]any{"Entrypoint": []string{"/pause", "pause"}}},
		{Ref: "edgebake.test/docker:1", Docker: true, Layers: []imagetest.Layer{base, run, top("docker")}, Config: entry},
		{Ref: "edgebake.test/empty:1", Layers: []imagetest.Layer{imagetest.Script()}},
		{Ref: "edgebake.test/multi:1", Layers: []imagetest.Layer{base, top("multi")}, DropOthers: true,
			Others: []imagetest.Image{{Arch: "arm64", Layers: []imagetest.Layer{top("arm")}}}},
		{Ref: "edgebake.test/dockermulti:1", Docker: true, Layers: []imagetest.Layer{base, top("dockermulti")},
			Others: []imagetest.Image{{Docker: true, Arch: "arm64", Layers: []imagetest.Layer{top("arm")}}}},
		imagetest.Nasty("edgebake.test/nasty:1", hello),
		imagetest.Many("edgebake.test/many:1", 30000),
	}
}

// bake bakes a layout's images and writes the store below dir.
func bake(t *testing.T, dir, layout string, o baker.Options, refs ...string) *baker.Result {
	t.Helper()
	r, c := bakeNodes(t, layout, o, refs...)
	if err := imagetest.Materialize(dir, r.Nodes, c); err != nil {
		t.Fatal(err)
	}
	return r
}

// bakeNodes bakes the images of a layout.
func bakeNodes(t *testing.T, layout string, o baker.Options, refs ...string) (*baker.Result, *fetch.Cache) {
	t.Helper()
	c, err := fetch.Open(filepath.Join(t.TempDir(), "cache"))
	if err != nil {
		t.Fatal(err)
	}
	var imgs []configs.ContainerImage
	for _, r := range refs {
		imgs = append(imgs, configs.ContainerImage{Ref: r, Layout: layout})
	}
	pinned, err := baker.Resolve(t.Context(), c, imgs, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := baker.Fetch(t.Context(), c, pinned, o); err != nil {
		t.Fatal(err)
	}
	r, err := baker.Bake(t.Context(), c, pinned, o)
	if err != nil {
		t.Fatal(err)
	}
	return r, c
}

// containerdImport unpacks a layout's images below root with containerd's own packages, and names
// them as its CRI plugin does.
func containerdImport(ctx context.Context, root, layout string, keepLayers bool) error {
	ctx = namespaces.WithNamespace(ctx, store.Namespace)
	at := func(p string) string { return filepath.Join(root, p) }
	cs, err := local.NewStore(at(store.ContentDir))
	if err != nil {
		return err
	}
	sn, err := overlay.NewSnapshotter(at(store.SnapshotterDir))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(at(store.MetaDir), 0o711); err != nil {
		return err
	}
	db, err := bolt.Open(at(store.MetaDB), 0o644, nil)
	if err != nil {
		return err
	}
	mdb := metadata.NewDB(db, cs, map[string]snapshots.Snapshotter{"overlayfs": sn})
	if err := mdb.Init(ctx); err != nil {
		return err
	}
	names := metadata.NewImageStore(mdb)
	blobs := mdb.ContentStore()
	platform := platforms.Only(platforms.MustParse("linux/amd64"))
	labels := images.ChildGCLabels
	if !keepLayers {
		labels = images.ChildGCLabelsFilterLayers
	}
	raw, err := os.ReadFile(filepath.Join(layout, "index.json"))
	if err != nil {
		return err
	}
	var index ocispec.Index
	if err := json.Unmarshal(raw, &index); err != nil {
		return err
	}
	for _, d := range index.Manifests {
		name := d.Annotations[ocispec.AnnotationRefName]
		d.Annotations, d.Platform = nil, nil
		get := images.HandlerFunc(func(ctx context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
			f, err := os.Open(filepath.Join(layout, "blobs", d.Digest.Algorithm().String(), d.Digest.Encoded()))
			if err != nil {
				return nil, err
			}
			defer f.Close()
			err = content.WriteBlob(ctx, blobs, "import-"+d.Digest.String(), f, d)
			if errdefs.IsAlreadyExists(err) {
				err = nil
			}
			return nil, err
		})
		children := images.LimitManifests(images.FilterPlatforms(images.ChildrenHandler(blobs), platform), platform, 1)
		u, err := unpack.NewUnpacker(ctx, blobs, unpack.WithUnpackPlatform(unpack.Platform{
			Platform: platform, SnapshotterKey: "overlayfs",
			Snapshotter: mdb.Snapshotter("overlayfs"), Applier: apply.NewFileSystemApplier(blobs),
		}))
		if err != nil {
			return err
		}
		handlers := u.Unpack(images.Handlers(get, images.SetChildrenMappedLabels(blobs, children, labels)))
		if err := images.Dispatch(ctx, handlers, nil, d); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if _, err := u.Wait(); err != nil {
			return fmt.Errorf("unpacking %s: %w", name, err)
		}
		config, err := images.Config(ctx, blobs, d, platform)
		if err != nil {
			return err
		}
		ref, err := imageref.Parse(name)
		if err != nil {
			return err
		}
		for _, n := range store.RecordNames(ref.Repo(), ref.Tag, d.Digest.String(), config.Digest.String()) {
			if _, err := names.Create(ctx, images.Image{Name: n, Target: d, Labels: map[string]string{
				store.LabelManaged: "managed", store.LabelPinned: "pinned", store.LabelBaked: "true",
			}}); err != nil {
				return err
			}
		}
	}
	if _, err := mdb.GarbageCollect(ctx); err != nil {
		return err
	}
	return errors.Join(db.Close(), sn.Close())
}

func TestStoreMatchesContainerd(t *testing.T) {
	needRoot(t)
	imgs := testImages(strings.Repeat("not run here", 1000))
	layout := filepath.Join(t.TempDir(), "layout")
	if _, err := imagetest.WriteLayout(layout, imgs...); err != nil {
		t.Fatal(err)
	}
	var refs []string
	for _, i := range imgs {
		refs = append(refs, i.Ref)
	}
	for _, keep := range []bool{false, true} {
		t.Run(fmt.Sprintf("keepLayers=%v", keep), func(t *testing.T) {
			theirs, ours := t.TempDir(), t.TempDir()
			if err := containerdImport(t.Context(), filepath.Join(theirs, store.Root), layout, keep); err != nil {
				t.Fatal(err)
			}
			o := options()
			o.KeepLayers = keep
			slices.Reverse(refs)
			bake(t, ours, layout, o, refs...)
			theirs, ours = filepath.Join(theirs, store.Root), filepath.Join(ours, store.Root)
			a, b := readState(t, theirs), readState(t, ours)
			compareStates(t, a, b)
			compareTrees(t, filepath.Join(theirs, store.ContentDir, "blobs"), filepath.Join(ours, store.ContentDir, "blobs"))
			entries := 0
			for key, s := range byKey(a) {
				other, ok := byKey(b)[key]
				if !ok {
					continue // already reported
				}
				entries += compareTrees(t, filepath.Join(theirs, store.SnapshotDir(s.ID)), filepath.Join(ours, store.SnapshotDir(other.ID)))
			}
			t.Logf("%d entries in %d snapshots compared", entries, len(a.Snapshots))
			if entries < 30000 {
				t.Errorf("only %d entries compared", entries)
			}
		})
	}
}

func readState(t *testing.T, root string) *store.State {
	t.Helper()
	s, err := store.Read(filepath.Join(root, store.MetaDB), filepath.Join(root, store.SnapshotterDB))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func byKey(s *store.State) map[string]store.Snapshot {
	m := map[string]store.Snapshot{}
	for _, sn := range s.Snapshots {
		m[sn.Key] = sn
	}
	return m
}

// compareStates compares two states, without times, sequence numbers, the schema's version, and
// sizes, which depend on the file system.
func compareStates(t *testing.T, theirs, ours *store.State) {
	t.Helper()
	lines := func(s *store.State) []string {
		var out []string
		for _, i := range s.Images {
			out = append(out, fmt.Sprintf("image %s %s %s %d %s", i.Name, i.MediaType, i.Digest, i.Size, sorted(i.Labels)))
		}
		for _, b := range s.Blobs {
			labels := maps.Clone(b.Labels)
			// This label names the registry of a blob; edgebake's blobs have none.
			maps.DeleteFunc(labels, func(k, _ string) bool { return strings.HasPrefix(k, "containerd.io/distribution.source") })
			out = append(out, fmt.Sprintf("blob %s %d %s", b.Digest, b.Size, sorted(labels)))
		}
		for _, n := range s.Snapshots {
			out = append(out, fmt.Sprintf("snapshot %s on %q kind %d inodes %d %s", n.Key, n.Parent, n.Kind, n.Inodes, sorted(n.Labels)))
		}
		slices.Sort(out)
		return out
	}
	a, b := lines(theirs), lines(ours)
	for _, l := range a {
		if !slices.Contains(b, l) {
			t.Errorf("only containerd has: %s", l)
		}
	}
	for _, l := range b {
		if !slices.Contains(a, l) {
			t.Errorf("only we have: %s", l)
		}
	}
	t.Logf("%d records compared", len(a))
}

func sorted(m map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, k+"="+m[k])
	}
	return strings.Join(out, " ")
}

// compareTrees compares two directories, without the times of directories and whiteouts, which
// unpacking takes from the clock.
func compareTrees(t *testing.T, theirs, ours string) (entries int) {
	t.Helper()
	a, b := describe(t, theirs), describe(t, ours)
	for _, name := range slices.Sorted(maps.Keys(a)) {
		switch got, ok := b[name]; {
		case !ok:
			t.Errorf("%s: missing %s", ours, name)
		case got != a[name]:
			t.Errorf("%s/%s:\n got %s\nwant %s", ours, name, got, a[name])
		}
	}
	for name := range b {
		if _, ok := a[name]; !ok {
			t.Errorf("%s: %s should not be there", ours, name)
		}
	}
	return len(a)
}

func describe(t *testing.T, root string) map[string]string {
	t.Helper()
	out := map[string]string{}
	first := map[uint64]string{} // inode → first name, to compare links
	err := filepath.WalkDir(root, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		d := fmt.Sprintf("mode %o owner %d:%d rdev %d", st.Mode, st.Uid, st.Gid, st.Rdev)
		kind := st.Mode & unix.S_IFMT
		if kind != unix.S_IFDIR {
			if name, ok := first[st.Ino]; ok {
				d += " link of " + name
			} else {
				first[st.Ino] = rel
			}
			d += fmt.Sprintf(" nlink %d", st.Nlink)
			if kind != unix.S_IFCHR || st.Rdev != 0 {
				d += fmt.Sprintf(" mtime %d.%09d", st.Mtim.Sec, st.Mtim.Nsec)
			}
		}
		switch kind {
		case unix.S_IFLNK:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			d += " -> " + to
		case unix.S_IFREG:
			f, err := os.Open(p)
			if err != nil {
				return err
			}
			defer f.Close()
			h := sha256.New()
			if _, err := io.Copy(h, f); err != nil {
				return err
			}
			d += fmt.Sprintf(" size %d sha256 %s", st.Size, hex.EncodeToString(h.Sum(nil)))
		}
		x, err := listXattrs(p)
		if err != nil {
			return err
		}
		out[rel] = d + x
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if strings.HasSuffix(root, "blobs") {
		// Ignore the times of blob files, which are those of their writing.
		for k, v := range out {
			before, rest, ok := strings.Cut(v, " mtime ")
			if ok {
				_, after, _ := strings.Cut(rest, " ")
				out[k] = before + " " + after
			}
		}
	}
	return out
}

func listXattrs(p string) (string, error) {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(p, buf)
	if err != nil {
		return "", err
	}
	var out []string
	for name := range bytes.SplitSeq(buf[:n], []byte{0}) {
		if len(name) == 0 {
			continue
		}
		v := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(p, string(name), v)
		if err != nil {
			return "", err
		}
		out = append(out, fmt.Sprintf(" %s=%x", name, v[:n]))
	}
	slices.Sort(out)
	return strings.Join(out, ""), nil
}
